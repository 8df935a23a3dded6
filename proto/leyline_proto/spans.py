"""The span table: which message, and which part of it, owns each token.

Owns the lengths of messages and parts and what a splice does to them. A message stores lengths, never
positions, so nothing has to be moved when an earlier message changes; positions are sums. It does not
know token ids, KV or directives.

    messages   | m1                     | m2                        | ...
    parts      | MARKER TEXT     MARKER | MARKER TEXT CALL CALL MARKER
    tokens     0 1      3        18     19 ...
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal

MARKER = pb.PART_KIND_MARKER
TEXT = pb.PART_KIND_TEXT
REASONING = pb.PART_KIND_REASONING
CALL = pb.PART_KIND_CALL
CONTENT_KINDS = (TEXT, REASONING)


@dataclass(frozen=True, slots=True)
class Part:
    """`length` tokens of one kind. A TEXT part may be empty, so that content can always be addressed."""

    kind: pb.PartKind.ValueType
    length: int
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant message. An invalid one may be answered and need not be."""

    id: str
    name: str
    arguments_json: str
    valid: bool = True


@dataclass(frozen=True, slots=True)
class MessageEntry:
    """One message of the table. `turn` is the session's turn when it was appended; `edit_ids` are the edits of it that
    stand, `undone_ids` those that were undone."""

    id: str
    role: pb.Role.ValueType
    parts: tuple[Part, ...]
    turn: int = 0
    tool_call_id: str = ""
    tool_name: str = ""
    calls: tuple[Call, ...] = ()
    open: bool = False
    edit_ids: tuple[str, ...] = ()
    undone_ids: tuple[str, ...] = ()
    length: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", sum(part.length for part in self.parts))

    def ranges(self, start: int) -> Iterator[tuple[Part, int, int]]:
        """Each part with its [start, end), the message standing at `start`."""
        for part in self.parts:
            yield part, start, start + part.length
            start += part.length


@dataclass(frozen=True, slots=True)
class Piece:
    """What a splice took of one message: all of it, or `length` tokens of the part of this kind."""

    message: MessageEntry
    kind: pb.PartKind.ValueType
    length: int
    whole: bool


@dataclass(frozen=True, slots=True)
class SpanTable:
    """An immutable list of messages that tile [0, len)."""

    messages: tuple[MessageEntry, ...] = ()
    starts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The start of every message, and the end of the last: `len(messages) + 1` positions."""

    def __post_init__(self) -> None:
        starts = tuple(accumulate((message.length for message in self.messages), initial=0))
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return self.starts[-1]

    def _near(self, start: int, end: int) -> tuple[int, int]:
        """The range of messages that [start, end) may touch: those outside stand before or behind it."""
        return max(0, bisect_left(self.starts, start) - 1), bisect_right(self.starts, end)

    def find(self, message_id: str) -> tuple[int, int]:
        """(index in the table, start in tokens). Raises UNKNOWN_MESSAGE."""
        start = 0
        for index, message in enumerate(self.messages):
            if message.id == message_id:
                return index, start
            start += message.length
        raise Refusal("UNKNOWN_MESSAGE", f"no message {message_id!r} in this session", message_id=message_id)

    def result_of(self, call_id: str) -> MessageEntry:
        """The tool message that answers `call_id`. Raises UNKNOWN_TOOL_CALL."""
        for message in reversed(self.messages):
            if message.role == pb.ROLE_TOOL and message.tool_call_id == call_id:
                return message
        raise Refusal("UNKNOWN_TOOL_CALL", f"no result for tool call {call_id!r} in this session", call_id=call_id)

    def calls(self) -> dict[str, Call]:
        return {call.id: call for message in self.messages for call in message.calls}

    def answered(self) -> set[str]:
        return {message.tool_call_id for message in self.messages if message.role == pb.ROLE_TOOL}

    def unanswered(self) -> list[Call]:
        """Valid calls without a result, in order."""
        answered = self.answered()
        return [call for message in self.messages for call in message.calls if call.valid and call.id not in answered]

    def appended(self, *messages: MessageEntry) -> SpanTable:
        return SpanTable(self.messages + messages)

    def with_last(self, message: MessageEntry) -> SpanTable:
        return SpanTable((*self.messages[:-1], message))

    # ------------------------------------------------------------ cuts

    def check_cut(self, start: int, end: int) -> None:
        """Raises ILLEGAL_CUT unless every message that [start, end) touches goes whole, or loses tokens of one
        content part alone. The range itself must be in bounds."""
        low_idx, high_idx = self._near(start, end)
        starts = self.starts[low_idx : high_idx + 1]
        if start == end and start in starts:
            return
        for message, first in zip(self.messages[low_idx:high_idx], starts, strict=False):
            last = first + message.length
            if start <= first and last <= end and start < end:
                continue
            low, high = max(start, first), min(end, last)
            touched = low < high or (start == end and first < start < last)
            if touched and _content_part(message, first, low, high) is None:
                bad, part = _offender(message, first, low, high)
                name = pb.PartKind.Name(part.kind).removeprefix("PART_KIND_").lower()
                raise Refusal(
                    "ILLEGAL_CUT",
                    f"[{start}, {end}) cuts through a {name} of message {message.id!r} at token {bad}; cut whole "
                    f"messages [{first}, {last}) or inside one content part",
                    index=bad,
                    message_id=message.id,
                    part=name,
                    message_start=first,
                    message_end=last,
                )

    def splice(
        self,
        start: int,
        end: int,
        inserted: int,
        edit_id: str,
        turn: int,
        rendered: MessageEntry | None = None,
    ) -> tuple[SpanTable, tuple[Piece, ...]]:
        """The table after [start, end) was replaced by `inserted` tokens, and what went.

        A single message replaced whole stays in the table under its id, as `rendered` or as bare text: so a
        result that became R still answers its call. R in the place of several messages is a RAW message.
        The cut must have passed `check_cut`.
        """
        low_idx, high_idx = self._near(start, end)
        before = list(self.messages[:low_idx])
        after: list[MessageEntry] = []
        standing: list[MessageEntry] = []  # messages that keep some tokens, in their places around R
        pieces: list[Piece] = []
        r_done = inserted == 0
        first = self.starts[low_idx]
        for message in self.messages[low_idx:high_idx]:
            last = first + message.length
            whole = start <= first and last <= end and start < end
            low, high = max(start, first), min(end, last)
            if whole:
                pieces.append(Piece(message, TEXT, message.length, True))
            elif low < high or (start == end and first < start < last):
                part_idx = _content_part(message, first, low, high)
                assert part_idx is not None, "splice of an unchecked cut"
                own = 0 if r_done else inserted
                grown = _resize(message, part_idx, own - (high - low))
                pieces.append(Piece(message, message.parts[part_idx].kind, high - low, False))
                standing.append(replace(grown, edit_ids=(*message.edit_ids, edit_id)))
                r_done = True
            elif last <= start:
                before.append(message)
            else:
                after.append(message)
            first = last
        if not r_done:
            if rendered is not None:
                standing.append(replace(rendered, edit_ids=(*rendered.edit_ids, edit_id)))
            elif len(pieces) == 1:
                old = pieces[0].message
                standing.append(
                    replace(
                        old,
                        parts=(Part(TEXT, inserted),),
                        calls=(),
                        open=False,
                        edit_ids=(*old.edit_ids, edit_id),
                    )
                )
            else:
                r = MessageEntry(f"r-{edit_id}", pb.ROLE_RAW, (Part(TEXT, inserted),), turn, edit_ids=(edit_id,))
                standing.append(r)
        return SpanTable((*before, *standing, *after, *self.messages[high_idx:])), tuple(pieces)

    def unsplice(self, at: int, inserted: int, pieces: Sequence[Piece], edit_id: str) -> SpanTable:
        """The table after the `inserted` tokens at `at` gave way to what a splice had taken."""
        queue = list(pieces)
        out: list[MessageEntry] = []
        r_left = inserted
        first = 0
        for message in self.messages:
            last = first + message.length
            here = at if r_left == inserted else at + inserted
            index = next((i for i, piece in enumerate(queue) if _stands_in(piece, message, edit_id)), None)
            if index is not None and first <= here <= last:
                out.extend(_restored(one, edit_id) for one in queue[:index])
                piece = queue[index]
                del queue[: index + 1]
                own = min(r_left, last - here)
                part_idx = _content_part(message, first, here, here + own, piece.kind)
                assert part_idx is not None, "an intact R lies inside one content part"
                grown = _resize(message, part_idx, piece.length - own)
                left = tuple(e for e in message.edit_ids if e != edit_id)
                out.append(replace(grown, edit_ids=left, undone_ids=(*message.undone_ids, edit_id)))
                r_left -= own
            elif r_left and at <= first and last <= at + inserted:
                r_left -= message.length  # R as a message of its own
            else:
                if queue and r_left == 0 and first >= at + inserted:
                    out.extend(_restored(one, edit_id) for one in queue)
                    queue = []
                out.append(message)
            first = last
        return SpanTable((*out, *(_restored(one, edit_id) for one in queue)))


def _stands_in(piece: Piece, message: MessageEntry, edit_id: str) -> bool:
    return not piece.whole and piece.message.id == message.id and edit_id in message.edit_ids


def _restored(piece: Piece, edit_id: str) -> MessageEntry:
    message = piece.message if piece.whole else replace(piece.message, parts=(Part(piece.kind, piece.length),))
    return replace(message, undone_ids=(*message.undone_ids, edit_id))


def _content_part(
    message: MessageEntry, first: int, low: int, high: int, kind: pb.PartKind.ValueType | None = None
) -> int | None:
    """The index of the content part that holds [low, high] whole, the message standing at `first`."""
    for index, (part, start, end) in enumerate(message.ranges(first)):
        if part.kind in CONTENT_KINDS and start <= low and high <= end and kind in (None, part.kind):
            return index
    return None


def _offender(message: MessageEntry, first: int, low: int, high: int) -> tuple[int, Part]:
    """The first token of [low, high) that no content cut may take, with its part."""
    for part, start, end in message.ranges(first):
        if part.kind not in CONTENT_KINDS and start < max(high, low + 1) and end > low:
            return max(start, low), part
    for part, start, _ in message.ranges(first):
        if part.kind not in CONTENT_KINDS:
            return start, part
    raise AssertionError("a message of content alone has no illegal cut")


def _resize(message: MessageEntry, part_idx: int, by: int) -> MessageEntry:
    part = message.parts[part_idx]
    parts = list(message.parts)
    parts[part_idx] = replace(part, length=part.length + by)
    return replace(message, parts=tuple(parts))
