"""A FakeServer behind real gRPC, for tests of the gRPC transport alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import DOMAIN, Refusal
from leyline_sdk.grpc_transport import OPTIONS
from leyline_sdk.testing import FakeServer


def _abort(refusal: Refusal, context: grpc.ServicerContext) -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN, metadata=refusal.metadata))
    code = code_pb2.Code.Value(refusal.status.name)
    status = status_pb2.Status(code=code, message=refusal.message, details=[packed])
    context.abort_with_status(rpc_status.to_status(status))


def _unary(fake: FakeServer, method: str) -> Callable[..., Any]:
    def handle(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return fake.unary(method, request, tuple(context.invocation_metadata()))
        except Refusal as refusal:
            return _abort(refusal, context)

    return handle


def _generate(fake: FakeServer) -> Callable[..., Iterator[Any]]:
    def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            running = fake.generate(request, tuple(context.invocation_metadata()))
        except Refusal as refusal:
            _abort(refusal, context)
            return
        try:
            while (event := running.read()) is not None:
                yield event
        finally:
            running.cancel()

    return handle


@contextmanager
def serve(fake: FakeServer) -> Iterator[str]:
    """Its address, while the block runs."""
    service = pb.DESCRIPTOR.services_by_name["Leyline"]
    handlers = {}
    for method in service.methods:
        reader = getattr(pb, method.input_type.name).FromString
        writer = type(getattr(pb, method.output_type.name)()).SerializeToString
        if method.name == "Generate":
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(_generate(fake), reader, writer)
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_unary(fake, method.name), reader, writer)
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
