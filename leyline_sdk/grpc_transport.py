"""The transport over gRPC, and how a gRPC error becomes a typed one.

Owns the channel: keepalive, message limits, credentials. It does not retry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.protobuf.message import Message as Proto
from google.rpc import error_details_pb2
from grpc_status import rpc_status  # type: ignore[import-untyped]

from leyline_proto import leyline_pb2 as pb
from leyline_sdk.error_table import api_error, request_id_of
from leyline_sdk.errors import APIError
from leyline_sdk.transport import Metadata

MAX_MESSAGE_BYTES: Final = 64 << 20
OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.enable_retries", 0),  # the SDK retries; twice would multiply
]
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Leyline"]
_DOMAIN: Final = "leyline"


def _codec(method: str) -> tuple[str, Callable[[bytes], Proto]]:
    """The rpc's full path and what reads its answers."""
    name = _SERVICE.methods_by_name[method].output_type.name
    return f"/{_SERVICE.full_name}/{method}", getattr(pb, name).FromString


def typed(error: grpc.RpcError, request: Proto) -> APIError:
    """The typed error of a gRPC one, by its ErrorInfo where there is one. Set the gRPC error as its cause."""
    call = cast(grpc.Call, error)
    reason, metadata = "", dict[str, str]()
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that disagree with the status line: a proxy rewrote one of them
        status = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == _DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
    return api_error(
        call.code().name,
        call.details() or call.code().name,
        reason=reason,
        metadata=metadata,
        request_id=request_id_of(request),
    )


class _Calls:
    """The channel's callables by method, made once."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._made: dict[tuple[str, str], Any] = {}

    def get(self, kind: str, method: str) -> Any:
        """`kind` is the channel's own name for it: "unary_unary" or "unary_stream"."""
        if (kind, method) not in self._made:
            path, reader = _codec(method)
            make = getattr(self._channel, kind)
            self._made[kind, method] = make(
                path, request_serializer=lambda request: request.SerializeToString(), response_deserializer=reader
            )
        return self._made[kind, method]


class GrpcTransport:
    """A `Transport` over one channel. Thread-safe.

    Args:
        target: "host:port", or any other gRPC target.
        credentials: for TLS; None speaks plain text.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, OPTIONS)
        self._calls = _Calls(self._channel)

    def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto:
        try:
            answer: Proto = self._calls.get("unary_unary", method)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise typed(error, request) from error
        return answer

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> _GrpcStream:
        return _GrpcStream(
            self._calls.get("unary_stream", method)(request, timeout=timeout_s, metadata=metadata), request
        )

    def close(self) -> None:
        self._channel.close()


class _GrpcStream:
    def __init__(self, call: Any, request: Proto) -> None:
        self._call = call
        self._request = request

    def __iter__(self) -> _GrpcStream:
        return self

    def __next__(self) -> pb.GenerateResponse:
        try:
            return cast(pb.GenerateResponse, next(self._call))
        except grpc.RpcError as error:
            raise typed(error, self._request) from error

    def cancel(self) -> None:
        self._call.cancel()


class AsyncGrpcTransport:
    """As GrpcTransport, for one event loop: the channel is made at the first call."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._target = target
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._calls: _Calls | None = None

    def _get(self, kind: str, method: str) -> Any:
        if self._calls is None:
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._target, OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self._target, self._credentials, OPTIONS)
            self._calls = _Calls(self._channel)
        return self._calls.get(kind, method)

    async def unary(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> Proto:
        try:
            answer: Proto = await self._get("unary_unary", method)(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise typed(error, request) from error
        return answer

    def stream(self, method: str, request: Proto, timeout_s: float, metadata: Metadata) -> _AsyncGrpcStream:
        return _AsyncGrpcStream(
            self._get("unary_stream", method)(request, timeout=timeout_s, metadata=metadata), request
        )

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class _AsyncGrpcStream:
    def __init__(self, call: Any, request: Proto) -> None:
        self._call = call
        self._events = aiter(call)
        self._request = request

    def __aiter__(self) -> _AsyncGrpcStream:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        try:
            return cast(pb.GenerateResponse, await anext(self._events))
        except grpc.RpcError as error:
            raise typed(error, self._request) from error

    def cancel(self) -> None:
        self._call.cancel()
