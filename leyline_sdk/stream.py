"""A running Generate without I/O: what each event means, for the session's mirror and for the reader.

Owns the state of a stream. `Stream` and `AsyncStream` feed it; it never waits.
"""

from __future__ import annotations

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors, operations
from leyline_sdk.calls import outcome_unknown
from leyline_sdk.core import SessionCore
from leyline_sdk.planning import Plan
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
