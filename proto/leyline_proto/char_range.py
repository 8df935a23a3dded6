"""Ranges inside a message's content: in tokens, and in characters of its text.

Owns the way from characters to the tokens that hold them. A cut takes whole tokens and splits no UTF-8 character; what
its tokens held beside the characters comes back with R. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ChatFormat
from leyline_proto.refusal import Refusal
from leyline_proto.spans import REASONING, TEXT, MessageEntry, SpanTable

_BLOCK = 256  # tokens between two places of a TextMap
_REACH = 4  # a UTF-8 character has at most 4 bytes, so it touches at most 4 tokens

TokenRange = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class CharCut:
    """What a directive on characters does to the tokens: [start, end) gives way to `ids`.

    Directives whose characters share a token are one cut: the first of them makes it, the others are `joined` to it
    and have nothing left to do. `forget`: one of them is a FORGET, so all are.
    """

    start: int
    end: int
    ids: tuple[int, ...] = ()
    joined: bool = False
    forget: bool = False


def content_range(
    entry: MessageEntry, first: int, kind: pb.PartKind.ValueType, within: pb.MessageTarget | None = None
) -> tuple[int, int]:
    """The tokens of the message's one part of this kind, the message standing at `first`; `within` may narrow them.

    Raises INVALID_ARGUMENT when there is not one such part, SPAN_OUT_OF_RANGE.
    """
    ranges = [(start, end) for part, start, end in entry.ranges(first) if part.kind == kind]
    if len(ranges) != 1:
        name = pb.PartKind.Name(kind).removeprefix("PART_KIND_").lower()
        raise Refusal(
            "INVALID_ARGUMENT",
            f"message {entry.id!r} has {len(ranges)} {name} parts, not one; name a span",
            message_id=entry.id,
            parts=len(ranges),
        )
    start, end = ranges[0]
    if within is None:
        return start, end
    low = within.content_start if within.HasField("content_start") else 0
    high = within.content_end if within.HasField("content_end") else end - start
    _check_inside("content", low, high, end - start, entry.id)
    return start + low, start + high


def _check_inside(what: str, low: int, high: int, length: int, message_id: str) -> None:
    if not 0 <= low <= high <= length:
        raise Refusal(
            "SPAN_OUT_OF_RANGE",
            f"{what} [{low}, {high}) is not inside [0, {length}) of message {message_id!r}",
            start=low,
            end=high,
            length=length,
        )


class TextMap:
    """The text of one content part and the tokens under it. Made once for all the directives of a call."""

    def __init__(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str], lead: str) -> None:
        self._ids, self._decode = ids, decode
        self._tokens, self._chars = [0], [0]  # places where no character is split
        texts: list[str] = []
        while self._tokens[-1] < len(ids):
            start = self._tokens[-1]
            end = min(start + _BLOCK, len(ids))
            while self._splits(end):
                end += 1
            texts.append(decode(ids[start:end]))
            self._tokens.append(end)
            self._chars.append(self._chars[-1] + len(texts[-1]))
        self.text = "".join(texts)
        self.lead = len(lead) if self.text.startswith(lead) else 0

    def cover(self, start: int, end: int) -> tuple[int, int]:
        """The fewest tokens that hold the characters [start, end)."""
        block = bisect_right(self._chars, start) - 1
        places = self._block(block)
        first = places[bisect_right(places, start, key=self._count_from(block)) - 1]
        while self._splits(first):
            first -= 1
        block = max(0, bisect_left(self._chars, end) - 1)
        places = self._block(block)
        last = places[bisect_left(places, end, key=self._count_from(block))]
        while self._splits(last):
            last += 1
        return first, max(first, last)

    def chars_before(self, token: int) -> int:
        """Characters in the tokens before this place, which splits none."""
        return self._count_from(max(0, bisect_left(self._tokens, token) - 1))(token)

    def _block(self, index: int) -> range:
        return range(self._tokens[index], self._tokens[min(index + 1, len(self._tokens) - 1)] + 1)

    def _count_from(self, block: int) -> Callable[[int], int]:
        start, chars = self._tokens[block], self._chars[block]
        return lambda token: chars + len(self._decode(self._ids[start:token]))

    def _splits(self, token: int) -> bool:
        """Whether a character has bytes on both sides of this place. UTF-8 shows it from the bytes around."""
        before = self._ids[max(0, token - _REACH) : token]
        after = self._ids[token : token + _REACH]
        return self._decode(before) + self._decode(after) != self._decode([*before, *after])


@dataclass(frozen=True, slots=True)
class _Wish:
    """A directive's characters [start, end), the lead counted, and the tokens that hold them."""

    index: int
    start: int
    end: int
    first: int
    last: int
    directive: pb.Directive


def names_characters(directive: pb.Directive) -> bool:
    target = directive.message if directive.WhichOneof("target") == "message" else None
    return target is not None and (target.HasField("char_start") or target.HasField("char_end"))


def char_cuts(
    directives: Sequence[pb.Directive], table: SpanTable, format: ChatFormat, token_range: TokenRange
) -> dict[int, CharCut]:
    """The cuts of those directives that name characters, by their index.

    Raises INVALID_ARGUMENT, UNKNOWN_MESSAGE, SPAN_OUT_OF_RANGE, SPANS_OVERLAP.
    """
    maps: dict[int, TextMap] = {}
    wishes: dict[int, list[_Wish]] = {}
    for index, directive in enumerate(directives):
        if not names_characters(directive):
            continue
        target = directive.message
        _check_kinds(directive)
        place, at = table.find(target.message_id)
        entry = table.messages[place]
        start, end = content_range(entry, at, REASONING if target.reasoning else TEXT)
        if start not in maps:
            lead = "" if target.reasoning else format.lead(entry.role)
            maps[start] = TextMap(list(token_range(start, end)), format.decode, lead)
        wishes.setdefault(start, []).append(_wish(index, directive, maps[start], entry.id))
    cuts: dict[int, CharCut] = {}
    for start, group in wishes.items():
        cuts.update(_joined(sorted(group, key=lambda w: (w.start, w.end)), start, maps[start], format))
    return cuts


def _check_kinds(directive: pb.Directive) -> None:
    target = directive.message
    if target.whole or target.HasField("content_start") or target.HasField("content_end"):
        raise Refusal(
            "INVALID_ARGUMENT",
            "a target names characters, or tokens of the content, or the whole message: one of them",
            field="message.char_start",
        )
    kind = directive.WhichOneof("replacement")
    if kind not in (None, "text"):
        raise Refusal("INVALID_ARGUMENT", "characters give way to text or to nothing, not to ids", field=kind)


def _wish(index: int, directive: pb.Directive, text: TextMap, message_id: str) -> _Wish:
    target = directive.message
    length = len(text.text) - text.lead
    low = target.char_start if target.HasField("char_start") else 0
    high = target.char_end if target.HasField("char_end") else length
    _check_inside("characters", low, high, length, message_id)
    start, end = low + text.lead, high + text.lead
    if high - low == length and not directive.text:
        return _Wish(index, 0, end, *text.cover(0, end), directive)  # a content without text has no lead
    return _Wish(index, start, end, *text.cover(start, end), directive)


def _joined(wishes: Sequence[_Wish], at: int, text: TextMap, format: ChatFormat) -> dict[int, CharCut]:
    """One cut for all the wishes that share tokens; `wishes` in order."""
    groups: list[list[_Wish]] = []
    end = -1
    for wish in wishes:
        previous = groups[-1][-1] if groups else None
        twice = previous is not None and wish.start == wish.end == previous.start == previous.end
        if previous is not None and (wish.start < previous.end or twice):
            raise Refusal(
                "SPANS_OVERLAP",
                f"characters [{previous.start - text.lead}, {previous.end - text.lead}) and "
                f"[{wish.start - text.lead}, {wish.end - text.lead}) of message "
                f"{wish.directive.message.message_id!r} overlap; the spans of one call must be disjoint",
                first=f"[{previous.start - text.lead}, {previous.end - text.lead})",
                second=f"[{wish.start - text.lead}, {wish.end - text.lead})",
            )
        if wish.first < end:
            groups[-1].append(wish)
        else:
            groups.append([wish])
        end = max(end, wish.last)
    cuts: dict[int, CharCut] = {}
    for group in groups:
        first, last = group[0].first, max(wish.last for wish in group)
        position = text.chars_before(first)
        pieces: list[str] = []
        for wish in group:
            pieces += [text.text[position : wish.start], wish.directive.text]
            position = wish.end
        pieces.append(text.text[position : text.chars_before(last)])
        forget = any(wish.directive.mode == pb.MODE_FORGET for wish in group)
        ids = tuple(format.encode("".join(pieces)))
        cuts[group[0].index] = CharCut(at + first, at + last, ids, forget=forget)
        for wish in group[1:]:
            cuts[wish.index] = CharCut(at + last, at + last, joined=True, forget=forget)
    return cuts
