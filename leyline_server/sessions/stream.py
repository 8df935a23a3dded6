"""The events of one Generate, and where in its text to stop.

`EventStream` is written by the engine's thread and read by any number of readers on another; a retry with the same
request_id reads the same stream from its start. `StopStrings` holds text back while it may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from leyline_proto import leyline_pb2 as pb

_BEHIND: Final = 16  # events


class Reader:
    """One reader's place in a stream. Lives on the reader's thread."""

    def __init__(self, stream: EventStream, events: list[pb.GenerateResponse]) -> None:
        self._stream, self._events, self._sent = stream, events, 0

    def read(self) -> tuple[Sequence[pb.GenerateResponse], bool]:
        """(events since the last read, whether the stream has ended and these are all). A reader that is far
        behind gets the text it missed as one delta: so it catches up."""
        ended = self._stream.ended  # before the slice: what comes in between is read next time
        fresh = self._events[self._sent :]
        self._sent += len(fresh)
        return (_joined(fresh) if len(fresh) > _BEHIND else fresh), ended


class EventStream:
    """A list of events that only grows, then ends. What is remembered of it afterwards for retries is small."""

    def __init__(self) -> None:
        self._events: list[pb.GenerateResponse] = []
        self._wakes: list[Callable[[], None]] = []
        self._stop: Callable[[], None] | None = None
        self._claimed = False
        self.cancelled = False
        self.error: Exception | None = None
        self.ended = False

    def runs(self, stop: Callable[[], None]) -> None:
        """The Generate has begun; `stop` cancels it."""
        self._stop = stop

    def claim(self) -> bool:
        """True for the first reader: when that one leaves, the Generate is cancelled. A retry only reads along."""
        first, self._claimed = not self._claimed, True
        return first

    def cancel(self) -> None:
        """Ends the Generate early, also while it waits for its session. On the engine's thread."""
        self.cancelled = True
        if self._stop is not None:
            self._stop()

    def put(self, event: pb.GenerateResponse) -> None:
        self._events.append(event)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more events. Those that were read already stay with their readers; a later one gets the text as one."""
        self.error, self.ended = error, True
        self._stop = None
        self._wake()
        self._events = _joined(self._events)

    def scrub(self) -> None:
        """Forgets the text of an ended stream: a FORGET, or the end of its session, leaves none to be replayed."""
        if self.ended:
            self._events = [event for event in self._events if event.WhichOneof("event") != "delta"]
            for event in self._events:
                if event.WhichOneof("event") == "done":
                    event.done.message.Clear()
                    del event.done.invalid_tool_calls[:]

    def subscribe(self, wake: Callable[[], None]) -> Reader:
        """`wake` is called on the engine's thread after every change; it must not block."""
        self._wakes.append(wake)
        return Reader(self, self._events)

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        self._wakes.remove(wake)

    def _wake(self) -> None:
        for wake in tuple(self._wakes):
            wake()


def _joined(events: Sequence[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """The same events with deltas that follow each other in one, as copies."""
    out: list[pb.GenerateResponse] = []
    for is_delta, group in groupby(events, lambda event: event.WhichOneof("event") == "delta"):
        if not is_delta:
            out += map(_copy_of, group)
            continue
        deltas = [event.delta for event in group]
        joined = pb.Delta(text="".join(d.text for d in deltas), reasoning="".join(d.reasoning for d in deltas))
        for delta in deltas:
            joined.token_ids.extend(delta.token_ids)
        out.append(pb.GenerateResponse(delta=joined))
    return out


def _copy_of(event: pb.GenerateResponse) -> pb.GenerateResponse:
    copy = pb.GenerateResponse()
    copy.CopyFrom(event)
    return copy


class StopStrings:
    """Finds the first stop string in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def push(self, text: str) -> str:
        """The text that can be shown now. Once `found` is set there is no more."""
        self._held += text
        hits = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if hits:
            index, self.found = min(hits)
            shown, self._held = self._held[:index], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
