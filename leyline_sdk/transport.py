"""The one seam between the SDK and a server: a call by name, a stream by name, close.

Owns the interface alone. `grpc_transport` implements it over gRPC, `leyline_sdk.testing` in memory. Every
implementation raises `APIError`s and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb

Metadata = tuple[tuple[str, str], ...]


class ResponseStream(Iterator[pb.GenerateResponse], Protocol):
    """Events of one Generate. Iterating raises the stream's error, if it had one."""

    def cancel(self) -> None:
        """Tells the server to stop. Idempotent, and harmless after the end."""
        ...


class AsyncResponseStream(Protocol):
    """As ResponseStream."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]: ...

    async def __anext__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> None: ...


class Transport(Protocol):
    """Calls a server. `method` is the rpc's bare name, `timeout_s` the seconds that the call may take."""

    def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto: ...

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> ResponseStream: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """As Transport."""

    async def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto: ...

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> AsyncResponseStream: ...

    async def close(self) -> None: ...
