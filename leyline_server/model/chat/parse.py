"""From the ids of an assistant's body to text, reasoning, calls and the parts that tile it. Never fails.

Calls are found by ids, so text that spells a marker is text. `BodyStream` gives the same text piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leyline_proto.chat_format import ParsedBody, ParsedCall
from leyline_proto.spans import CALL, MARKER, REASONING, TEXT, Part
from leyline_server.model.chat.arguments import read_call, unfence
from leyline_server.model.chat.layout import Layout
from leyline_server.model.chat.scan import Scanner, Segment, Zone
from leyline_server.model.tokenizer import TextTokenizer

_KIND = {Zone.TEXT: TEXT, Zone.GAP: TEXT, Zone.REASONING: REASONING, Zone.CALL: CALL}


def parse_body(ids: Sequence[int], layout: Layout, tokenizer: TextTokenizer) -> ParsedBody:
    """Reads a body. What a half call at the end leaves behind when it is dropped is a body as if it never began: the
    start of its section and the break before it are part of it."""
    scanner = Scanner(layout)
    for token_id in ids:
        scanner.push(token_id)
    segments = scanner.segments
    for segment in segments:
        if segment.zone is Zone.GAP and not tokenizer.decode(segment.ids).strip():
            segment.zone = Zone.BREAK
    half = _take_half_call(segments)
    texts = [tokenizer.decode(s.ids) for s in segments if s.zone in (Zone.TEXT, Zone.GAP)]
    return ParsedBody(
        text="".join(texts).removeprefix(layout.family.assistant.lead),
        reasoning="".join(tokenizer.decode(s.ids) for s in segments if s.zone is Zone.REASONING),
        parts=_parts(segments, half),
        calls=tuple(_read_call(s, layout, tokenizer) for s in segments if s.zone is Zone.CALL),
        closed=len(ids) > 0 and ids[-1] == layout.end,
        half_call=half,
    )


def _take_half_call(segments: list[Segment]) -> int:
    """Takes an unfinished call off the end. Its length in tokens."""
    zones = [segment.zone for segment in segments]
    count = 0
    if zones[-1:] == [Zone.CALL] and not segments[-1].closed:
        count = 1 + (zones[-2:-1] == [Zone.BREAK])
    if zones[: len(zones) - count][-1:] == [Zone.SECTION_START]:
        count += 1
    taken = segments[len(segments) - count :]
    del segments[len(segments) - count :]
    return sum(len(segment.ids) for segment in taken)


def _parts(segments: list[Segment], half_call: int) -> tuple[Part, ...]:
    kinds = [_KIND.get(segment.zone, MARKER) for segment in segments]
    lengths = [len(segment.ids) for segment in segments]
    if TEXT not in kinds:
        tail = (Zone.CALL, Zone.BREAK, Zone.SECTION_START, Zone.SECTION_END, Zone.END)
        at = next((i for i, segment in enumerate(segments) if segment.zone in tail), len(segments))
        kinds.insert(at, TEXT)
        lengths.insert(at, 0)
    parts: list[Part] = []
    for kind, length in zip(kinds, lengths, strict=True):
        if parts and parts[-1].kind == kind and kind in (TEXT, MARKER):
            parts[-1] = Part(kind, parts[-1].length + length)
        else:
            parts.append(Part(kind, length))
    if half_call:
        parts.append(Part(CALL, half_call))
    return tuple(parts)


def _read_call(segment: Segment, layout: Layout, tokenizer: TextTokenizer) -> ParsedCall:
    assert layout.calls is not None, "a scanner finds calls only where the layout has them"
    style = layout.family.calls
    body = segment.ids[1:-1] if segment.closed else segment.ids[1:]
    text = tokenizer.decode(body)
    if segment.error:
        return ParsedCall("", "", text, segment.error)
    separators = body.count(layout.calls.separator)
    if separators != 1:
        return ParsedCall("", "", text, f"the call has {separators} {style.separator}, not one")
    at = body.index(layout.calls.separator)
    head, tail = tokenizer.decode(body[:at]), tokenizer.decode(body[at + 1 :])
    if not style.kind:
        return read_call(head, tail, text)
    if head.strip() != style.kind:
        return ParsedCall("", "", text, f"the call is a {head.strip()!r}, not a {style.kind!r}")
    return read_call(*unfence(tail), text)


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What an id added for the reader: whole characters only. A call adds nothing, it comes when it is whole."""

    text: str = ""
    reasoning: str = ""


class BodyStream:
    """The text and reasoning of `parse_body`, as they come. One body, one thread."""

    def __init__(self, layout: Layout, tokenizer: TextTokenizer) -> None:
        self._scanner = Scanner(layout)
        self._detokenizer = tokenizer.detokenizer()
        self._lead = layout.family.assistant.lead
        self._current: Segment | None = None
        self._held = ""  # the blank start of a gap
        self._blank = True

    def push(self, token_id: int) -> StreamDelta:
        segment = self._scanner.push(token_id)
        text, reasoning = "", ""
        if segment is not self._current:
            rest = self.flush()
            text, reasoning = rest.text, rest.reasoning
            self._current = segment
        if segment.zone is Zone.REASONING:
            reasoning += self._detokenizer.push(token_id)
        elif segment.zone in (Zone.TEXT, Zone.GAP):
            self._held += self._detokenizer.push(token_id)
            if segment.zone is Zone.TEXT or not self._blank or self._held.strip():
                text += self._unled(self._held)
                self._held, self._blank = "", False
        return StreamDelta(text, reasoning)

    def flush(self) -> StreamDelta:
        """What the current segment still holds. Call it when the ids end."""
        rest = self._detokenizer.flush()
        segment, held, blank = self._current, self._held + rest, self._blank
        self._current, self._held, self._blank = None, "", True
        if segment is not None and segment.zone is Zone.REASONING:
            return StreamDelta(reasoning=rest)
        if blank and not held.strip():
            return StreamDelta()
        return StreamDelta(text=self._unled(held))

    def _unled(self, text: str) -> str:
        """`text` without the lead of the very first text."""
        if text:
            text, self._lead = text.removeprefix(self._lead), ""
        return text
