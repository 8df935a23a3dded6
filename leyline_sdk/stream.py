"""A running Generate: what each event means for the session's mirror and for the reader, and the two that read it.

Owns the state of a stream (`StreamCore`, without I/O), and the waiting: `Stream` for threads, `AsyncStream`, its twin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors, operations
from leyline_sdk.calls import outcome_unknown
from leyline_sdk.core import SessionCore
from leyline_sdk.planning import Plan
from leyline_sdk.runner import AsyncRunner, Runner
from leyline_sdk.transport import AsyncResponseStream, ResponseStream
from leyline_sdk.types import Delta, Reply
from leyline_sdk.wire import reply_from_pb


class StreamCore:
    """Made before the stream is opened. `reply` is there once the last event was fed."""

    def __init__(self, core: SessionCore, request: pb.GenerateRequest, todo: Plan) -> None:
        self.request = request
        self.reply: Reply | None = None
        self.over = False  # nothing more will come
        self._core = core
        self._todo = todo
        core.streaming = True

    def feed(self, event: pb.GenerateResponse) -> Delta | None:
        """What the reader gets of an event, if anything."""
        kind = event.WhichOneof("event")
        if kind == "delta":
            return Delta(event.delta.text, event.delta.reasoning, tuple(event.delta.token_ids))
        if kind == "started":
            started = event.started
            applied = self._core.absorb(self._todo, started.receipts, started.edited, started.version)
            self._core.report(applied)
        elif kind == "done":
            self.over = True
            self._core.streaming = False
            operations.generated(self._core, event.done)
            applied_edits = tuple(self._core.unreported)
            self._core.unreported.clear()
            self.reply = reply_from_pb(event.done, applied_edits)
        return None

    def refused(self, error: BaseException) -> None:
        """The stream could not be opened, or broke."""
        self.over = True
        self._core.streaming = False
        if not isinstance(error, errors.APIError) or outcome_unknown(error):
            self._core.lost()

    def leave(self) -> bool:
        """The reader wants no more. Whether the transport has to be told."""
        if self.over:
            return False
        self.over = True
        self._core.lost()
        return True

    def cut_short(self) -> errors.APIError:
        """The error of a stream that ended without its last event."""
        return errors.Unavailable(
            "the stream ended before its last event", status="UNAVAILABLE", request_id=self.request.request_id
        )

    def final(self) -> Reply:
        """The reply. Raises Cancelled when the stream was left before its end."""
        if self.reply is None:
            raise errors.Cancelled(
                "the stream was left before its end; what was sent stays in the session",
                status="CANCELLED",
                reason="CANCELLED",
                request_id=self.request.request_id,
            )
        return self.reply


class Stream(Iterator[Delta]):
    """A running Generate. Iterating yields a `Delta` (text, reasoning, token_ids) for each token or few, `text` their
    texts (str). Leaving its `with` block early cancels it."""

    def __init__(self, core: StreamCore, runner: Runner, timeout_s: float | None) -> None:
        self._core = core
        self._source: ResponseStream | None = None
        try:
            self._source, first = runner.open(core.request, timeout_s)
            core.feed(first)
        except BaseException as error:
            core.refused(error)
            self._stop()
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __next__(self) -> Delta:
        while not self._core.over and self._source is not None:
            try:
                delta = self._core.feed(next(self._source))
            except BaseException as error:
                self._core.refused(error)
                self._stop()
                if isinstance(error, StopIteration):
                    raise self._core.cut_short() from None
                raise
            if delta is not None:
                return delta
        raise StopIteration

    @property
    def text(self) -> Iterator[str]:
        """The message's text, piece by piece, whole characters only."""
        return (delta.text for delta in self if delta.text)

    def final(self) -> Reply:
        """Reads to the end. Raises Cancelled when the stream was left before it."""
        for _ in self:
            pass
        return self._core.final()

    def cancel(self) -> None:
        """Stops the Generate, if it still runs. What was sent stays in the session, which the session's next call, or
        `refresh()`, fetches: calls that were complete by then stand in `session.unanswered` and want results."""
        if self._core.leave():
            self._stop()

    def _stop(self) -> None:
        if self._source is not None:
            self._source.cancel()


class AsyncStream(AsyncIterator[Delta]):
    """The twin of `Stream`. A task that is cancelled while it reads cancels the Generate."""

    def __init__(self, core: StreamCore) -> None:
        self._core = core
        self._source: AsyncResponseStream | None = None

    @classmethod
    async def open(cls, core: StreamCore, runner: AsyncRunner, timeout_s: float | None) -> AsyncStream:
        """Returns once the server has admitted the call."""
        stream = cls(core)
        try:
            stream._source, first = await runner.open(core.request, timeout_s)
            core.feed(first)
        except BaseException as error:
            core.refused(error)
            stream._stop()
            raise
        return stream

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __anext__(self) -> Delta:
        while not self._core.over and self._source is not None:
            try:
                delta = self._core.feed(await anext(self._source))
            except BaseException as error:
                self._core.refused(error)
                self._stop()
                if isinstance(error, StopAsyncIteration):
                    raise self._core.cut_short() from None
                raise
            if delta is not None:
                return delta
        raise StopAsyncIteration

    @property
    def text(self) -> AsyncIterator[str]:
        return (delta.text async for delta in self if delta.text)

    async def final(self) -> Reply:
        async for _ in self:
            pass
        return self._core.final()

    def cancel(self) -> None:
        if self._core.leave():
            self._stop()

    def _stop(self) -> None:
        if self._source is not None:
            self._source.cancel()
