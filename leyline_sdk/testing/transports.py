"""Transports to a FakeServer, and one that loses replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_sdk.error_table import api_error, request_id_of
from leyline_sdk.errors import APIError
from leyline_sdk.transport import Metadata, ResponseStream, Transport

if TYPE_CHECKING:
    from leyline_sdk.testing.generating import Generating
    from leyline_sdk.testing.server import FakeServer


def _typed(refusal: Refusal, request: Proto) -> APIError:
    return api_error(
        refusal.status.name,
        refusal.message,
        reason=refusal.reason,
        metadata=refusal.metadata,
        request_id=request_id_of(request),
    )


def _copied(message: Proto) -> Proto:
    """As it would arrive: nothing is shared between the two sides."""
    return type(message).FromString(message.SerializeToString())


class FakeTransport:
    """A `Transport`."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto:
        try:
            return _copied(self._server.unary(method, _copied(request), metadata))
        except Refusal as refusal:
            raise _typed(refusal, request) from refusal

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> FakeStream:
        return FakeStream(self._server, request, metadata)

    def close(self) -> None:
        pass


class FakeStream:
    """A `ResponseStream`. As over gRPC, a refusal comes with the first event."""

    def __init__(self, server: FakeServer, request: Proto, metadata: Metadata) -> None:
        self._server = server
        self._request = request
        self._metadata = metadata
        self._running: Generating | None = None
        self._cancelled = False

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> pb.GenerateResponse:
        if self._cancelled:
            raise api_error("CANCELLED", "the stream was cancelled", request_id=request_id_of(self._request))
        try:
            if self._running is None:
                self._running = self._server.generate(
                    pb.GenerateRequest.FromString(self._request.SerializeToString()), self._metadata
                )
            with self._server.lock:
                event = self._running.read()
        except Refusal as refusal:
            raise _typed(refusal, self._request) from refusal
        if event is None:
            raise StopIteration
        return pb.GenerateResponse.FromString(event.SerializeToString())

    def cancel(self) -> None:
        self._cancelled = True
        if self._running is not None:
            with self._server.lock:
                self._running.cancel()


class AsyncFakeTransport:
    """An `AsyncTransport`."""

    def __init__(self, server: FakeServer) -> None:
        self._sync = FakeTransport(server)

    async def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto:
        return self._sync.unary(method, request, timeout_s, metadata)

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> AsyncFakeStream:
        return AsyncFakeStream(self._sync.stream(method, request, timeout_s, metadata))

    async def close(self) -> None:
        pass


class AsyncFakeStream:
    """An `AsyncResponseStream`."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncFakeStream:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        self._stream.cancel()


class FlakyTransport:
    """Loses replies: the server acts, and the caller hears Unavailable.

    Args:
        lose: for each call in turn whether its reply is lost; then none is.
    """

    def __init__(self, inner: Transport, lose: Iterable[bool]) -> None:
        self._inner = inner
        self._lose = iter(lose)

    def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto:
        answer = self._inner.unary(method, request, timeout_s, metadata)
        if next(self._lose, False):
            raise _lost(request)
        return answer

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> ResponseStream:
        stream = self._inner.stream(method, request, timeout_s, metadata)
        if next(self._lose, False):
            for _ in stream:
                pass
            raise _lost(request)
        return stream

    def close(self) -> None:
        self._inner.close()


def _lost(request: Proto) -> APIError:
    return api_error("UNAVAILABLE", "the reply was lost", request_id=request_id_of(request))
