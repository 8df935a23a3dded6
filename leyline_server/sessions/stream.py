"""The events of one Generate, and where in its text to stop.

`EventStream` is written by the engine's thread and read by any number of readers on another; a retry with the same
request_id reads the same stream from its start. `StopStrings` holds text back while it may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leyline_proto import leyline_pb2 as pb


class EventStream:
    """A list of events that only grows, then ends. Readers poll by index after a wake-up."""

    def __init__(self) -> None:
        self._events: list[pb.GenerateResponse] = []
        self._readers: list[Callable[[], None]] = []
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
        self.error, self.ended = error, True
        self._wake()

    def subscribe(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the engine's thread after every change; it must not block."""
        self._readers.append(wake)

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        self._readers.remove(wake)

    def read(self, start: int) -> tuple[Sequence[pb.GenerateResponse], bool]:
        """(events from `start` on, whether that is all there will be)."""
        ended = self.ended  # before the slice: what comes in between is read next time
        return self._events[start:], ended

    def _wake(self) -> None:
        for wake in tuple(self._readers):
            wake()


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
