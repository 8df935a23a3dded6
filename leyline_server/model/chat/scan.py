"""Sorts the ids of an assistant's body into segments, one id at a time, and never fails.

Owns the states of a body: text, reasoning, inside a call. Whoever reads a whole body and whoever streams one use the
same scanner, so that both see the same thing. Does not decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from leyline_server.model.chat.layout import Layout


class Zone(Enum):
    """What a segment is. GAP is text between the calls of a section; blank, it belongs to the format: a BREAK."""

    TEXT = auto()
    GAP = auto()
    BREAK = auto()
    REASONING = auto()
    CALL = auto()
    THINK = auto()  # the markers around reasoning
    SECTION_START = auto()
    SECTION_END = auto()
    END = auto()


@dataclass(slots=True)
class Segment:
    """Consecutive ids of one zone. A call ends with its close token, or its `error` says why it has none;
    neither, and the ids ended inside it."""

    zone: Zone
    ids: list[int] = field(default_factory=list)
    closed: bool = False
    error: str = ""


class Scanner:
    """The segments so far are in `segments`; the last may still grow. One body, one thread."""

    def __init__(self, layout: Layout) -> None:
        self.segments: list[Segment] = []
        self._layout = layout
        self._zone = Zone.TEXT
        self._in_section = False

    def push(self, token_id: int) -> Segment:
        """The segment that took this id."""
        calls, reasoning = self._layout.calls, self._layout.reasoning
        if token_id == self._layout.end:
            self._break_off("the message ends inside the call")
            self._zone, self._in_section = Zone.TEXT, False
            return self._marker(Zone.END, token_id)
        if calls is not None:
            if token_id == calls.open:
                self._break_off("another call begins inside it")
                self._zone = Zone.CALL
                return self._marker(Zone.CALL, token_id)
            if calls.section is not None and token_id in calls.section:
                self._break_off("the calls end inside it")
                self._in_section = token_id == calls.section[0]
                self._zone = Zone.GAP if self._in_section else Zone.TEXT
                return self._marker(Zone.SECTION_START if self._in_section else Zone.SECTION_END, token_id)
            if self._zone is Zone.CALL:
                call = self.segments[-1]
                call.ids.append(token_id)
                if token_id == calls.close:
                    call.closed = True
                    self._zone = Zone.GAP if self._in_section else Zone.TEXT
                return call
        if reasoning is not None:
            if token_id == reasoning[0] and self._zone is Zone.TEXT:
                self._zone = Zone.REASONING
                return self._marker(Zone.THINK, token_id)
            if token_id == reasoning[1] and self._zone is Zone.REASONING:
                self._zone = Zone.TEXT
                return self._marker(Zone.THINK, token_id)
        if not self.segments or self.segments[-1].zone is not self._zone:
            self.segments.append(Segment(self._zone))
        self.segments[-1].ids.append(token_id)
        return self.segments[-1]

    def _break_off(self, error: str) -> None:
        if self._zone is Zone.CALL:
            self.segments[-1].error = error

    def _marker(self, zone: Zone, token_id: int) -> Segment:
        self.segments.append(Segment(zone, [token_id]))
        return self.segments[-1]
