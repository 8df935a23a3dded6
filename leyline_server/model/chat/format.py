"""The one renderer: a `ChatFormat` that reads a family's declaration.

Renders one message at a time, from that message alone, and never sees the history again: so what is appended is
what a rendering of everything at once would have put there. Immutable; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ParsedBody, Rendered
from leyline_proto.refusal import Refusal
from leyline_proto.spans import CALL, MARKER, REASONING, TEXT, Part
from leyline_server.model.chat.arguments import compact, list_tools
from leyline_server.model.chat.layout import Layout
from leyline_server.model.chat.parse import BodyStream, parse_body
from leyline_server.model.tokenizer import TextTokenizer


class FamilyFormat:
    """A family over one vocabulary. `differences` are those that `verify` found from the checkpoint's template."""

    def __init__(
        self, layout: Layout, tokenizer: TextTokenizer, vocab_size: int, differences: Sequence[str] = ()
    ) -> None:
        self._layout = layout
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.differences = tuple(differences)

    @property
    def name(self) -> str:
        return self._layout.family.name

    @property
    def vocab_size(self) -> int:
        """The model's bound of ids."""
        return self._vocab_size

    @property
    def longest_token(self) -> int:
        return self._tokenizer.longest_token

    @property
    def stop_ids(self) -> frozenset[int]:
        """The end of a message, alone: in every family it follows the last call too, so that a message that ended
        has its end marker whichever way it ended."""
        return frozenset((self._layout.end,))

    @property
    def lacking(self) -> dict[str, str]:
        """What this vocabulary can't say: "TOOLS", "REASONING", each with the reason."""
        return dict(self._layout.lacking)

    def with_differences(self, differences: Sequence[str]) -> FamilyFormat:
        return FamilyFormat(self._layout, self._tokenizer, self._vocab_size, differences)

    # ------------------------------------------------------------ render

    def render(self, message: pb.Message, call_ids: Sequence[str], tools: Sequence[pb.Tool], first: bool) -> Rendered:
        """See `ChatFormat.render`. Tools without a system message get one without text, part of the first marker."""
        layout, family = self._layout, self._layout.family
        is_system = message.role == pb.ROLE_SYSTEM
        if message.role == pb.ROLE_TOOL or message.tool_calls or tools:
            self._need("TOOLS")
        if message.reasoning:
            self._need("REASONING")
        if message.role not in layout.frames:
            raise Refusal("INVALID_ARGUMENT", "a message needs a role", field="message.role")
        if is_system and not first and family.system_only_first:
            raise Refusal(
                "NOT_SUPPORTED",
                f"the {family.name} format has a system message only in front: elsewhere nothing would set it off",
                feature="SYSTEM_AFTER_FIRST",
            )
        frame = layout.frames[message.role]
        listing = self.encode(list_tools(tools, family.tools)) if tools else []
        out = _Pieces()
        out.add(MARKER, layout.begin if first else ())
        if listing and not is_system:
            system = layout.frames[pb.ROLE_SYSTEM]
            out.add(MARKER, (*system.open, *listing, *system.close))
        out.add(MARKER, frame.open)
        if message.reasoning and layout.reasoning is not None:
            out.add(MARKER, layout.reasoning[:1])
            out.add(REASONING, self.encode(message.reasoning))
            out.add(MARKER, layout.reasoning[1:])
        out.add(TEXT, self.encode(frame.lead + message.content) if message.content else ())
        if is_system:
            out.add(MARKER, listing)
        self._add_calls(out, message.tool_calls, call_ids)
        out.add(MARKER, frame.close)
        return out.rendered()

    def _add_calls(self, out: _Pieces, calls: Sequence[pb.ToolCall], call_ids: Sequence[str]) -> None:
        layout = self._layout.calls
        if layout is None or not calls:
            return
        section = layout.section or ()
        out.add(MARKER, section[:1])
        for index, (call, call_id) in enumerate(zip(calls, call_ids, strict=True)):
            out.add(MARKER, layout.between if index else ())
            out.add(CALL, self._call_ids(call.name, compact(call.arguments_json)), call_id)
        out.add(MARKER, section[1:])

    def _call_ids(self, name: str, arguments: str) -> list[int]:
        """One call with its delimiters. Raises INVALID_ARGUMENT when it would not be read back as it is."""
        layout, style = self._layout.calls, self._layout.family.calls
        assert layout is not None, "the caller has checked for TOOLS"
        head, tail = name, arguments
        if style.kind:
            head, tail = style.kind, name + style.fence[0] + arguments + style.fence[1]
        ids = [layout.open, *self.encode(head), layout.separator, *self.encode(tail), layout.close]
        (read,) = self.parse(ids).calls
        if read.error or (read.name, read.arguments_json) != (name, arguments):
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the {self.name} format can't hold a call of {name!r}: it would be read as one of {read.name!r}"
                + (f" ({read.error})" if read.error else ""),
                field="tool_calls",
            )
        return ids

    def open_assistant(self, first: bool) -> Rendered:
        out = _Pieces()
        out.add(MARKER, self._layout.begin if first else ())
        out.add(MARKER, self._layout.frames[pb.ROLE_ASSISTANT].open)
        return out.rendered()

    def close_assistant(self, parts: Sequence[Part] = ()) -> Rendered:
        """A body that ends with a call has its section of calls still open: it was cut short there."""
        out = _Pieces()
        calls = self._layout.calls
        if parts and parts[-1].kind == CALL and calls is not None and calls.section is not None:
            out.add(MARKER, calls.section[1:])
        out.add(MARKER, self._layout.frames[pb.ROLE_ASSISTANT].close)
        return out.rendered()

    def _need(self, feature: str) -> None:
        reason = self._layout.lacking.get(feature)
        if reason:
            raise Refusal("NOT_SUPPORTED", reason, feature=feature, why=reason)

    # ------------------------------------------------------------ read

    def parse(self, ids: Sequence[int]) -> ParsedBody:
        """See `ChatFormat.parse`."""
        return parse_body(ids, self._layout, self._tokenizer)

    def stream(self) -> BodyStream:
        """Reads a body while it is generated: push every id, then flush."""
        return BodyStream(self._layout, self._tokenizer)

    def content(self, role: pb.Role.ValueType, ids: Sequence[int]) -> str:
        """The text of a message's TEXT part, without the space that a plain-text marker has behind it."""
        return self.decode(ids).removeprefix(self.lead(role))

    def lead(self, role: pb.Role.ValueType) -> str:
        frame = self._layout.frames.get(role)
        return frame.lead if frame else ""

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class _Pieces:
    """Ids and the parts that tile them; neighbouring markers are one part."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._parts: list[Part] = []

    def add(self, kind: pb.PartKind.ValueType, ids: Iterable[int], call_id: str = "") -> None:
        before = len(self._ids)
        self._ids += ids
        length = len(self._ids) - before
        last = self._parts[-1] if self._parts else None
        if kind == MARKER and last is not None and last.kind == MARKER:
            self._parts[-1] = replace(last, length=last.length + length)
        elif length or kind == TEXT:
            self._parts.append(Part(kind, length, call_id))

    def rendered(self) -> Rendered:
        return Rendered(tuple(self._ids), tuple(self._parts))
