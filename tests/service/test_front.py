"""The services beside the contract, what the server says of itself, and how it goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Retry, errors
from tests.contract.scene import fresh
from tests.service.running import TIMEOUT_S, RunningServer
from tests.service.talk import Talk, encode, user

SERVICE = "leyline.v1.Leyline"


def test_health(small: RunningServer) -> None:
    with grpc.insecure_channel(small.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", SERVICE):
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(small: RunningServer) -> None:
    with grpc.insecure_channel(small.address) as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = ask(iter(requests), timeout=TIMEOUT_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


def test_what_the_server_says_of_itself(tiny: RunningServer) -> None:
    info = tiny.client().server_info()
    assert (info.model, info.architecture, info.chat_format) == ("tiny", "deepseek_v2", "tiny")
    assert (info.dtype, info.device, info.rotary_layout) == ("float32", "cpu", "interleaved")
    assert info.server_version
    assert (info.limits.num_slots, info.limits.max_context, info.limits.sink_tokens) == (4096, 4096, 4)
    for name in ("APPEND", "AMORTIZE", "FORGET", "MESSAGES", "TOOLS", "REASONING"):
        assert (info.features[name].supported, info.features[name].reason) == (True, "")
    refused = info.features["CONSTRAINED_OUTPUT"]
    assert not refused.supported
    assert refused.reason
    pool = tiny.pool()
    assert pool.num_slots == pool.free + pool.in_use + pool.cached
    assert pool.num_slots >= 4096


def test_tokenize_there_and_back(small: RunningServer) -> None:
    client = small.client()
    for text in ("", "hello", "<|end|>", "é漢🙂", " a\n\tb "):
        ids = client.tokenize(text)
        assert client.detokenize(ids) == text


def test_sessions_are_listed_in_pages(serve: Callable[..., RunningServer]) -> None:
    server = serve()
    made = [Talk(server, user("hello")).id for _ in range(5)]
    seen: list[str] = []
    token, pages = "", 0
    while True:
        page = server.call(pb.ListSessionsRequest(page_size=2, page_token=token))
        seen += [s.session_id for s in page.sessions]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert (sorted(seen), pages) == (sorted(made), 3)
    summaries = server.client().sessions()
    assert all(s.num_tokens == s.num_pending > 0 and not s.busy and s.idle_s >= 0 for s in summaries)


def test_a_message_of_five_megabytes_passes(small: RunningServer) -> None:
    """4 MiB is gRPC's own limit; the contract's is 64."""
    with pytest.raises(errors.ContextExceeded) as caught:
        small.client().session().append_ids([1000] * 2_600_000)
    assert (caught.value.needed, caught.value.limit) == (2_600_000, 500)


def test_a_drain_lets_running_calls_end_and_takes_no_new_ones(serve: Callable[..., RunningServer]) -> None:
    server = serve(drain=30)
    talk = Talk(server, user("hello"))
    refused: list[errors.APIError] = []
    with server.hold(after=2):
        stream = talk.stream(6, force_token_ids=encode("123456"))
        head = [next(stream)]
        stopping = threading.Thread(target=lambda: server._run(server.server.stop()))
        stopping.start()
        while not server.parts.store.closing:
            stopping.join(0.01)
        stopping.join(0.3)
        for request in (pb.CreateSessionRequest(request_id=fresh()), talk.appending(user("x"))):
            with pytest.raises(errors.ShuttingDown) as caught:
                server.call(request)
            refused.append(caught.value)
        assert stopping.is_alive()
        server.release()
        events = [*head, *stream]
    assert events[-1].done.usage.generated == 6
    stopping.join(TIMEOUT_S)
    assert not stopping.is_alive()
    assert all(error.retryable for error in refused)
    server.server.stop = lambda: _nothing()  # type: ignore[method-assign]  # the fixture would stop it again
    server.check_integrity = lambda: None  # type: ignore[method-assign]


async def _nothing() -> None:
    pass


def test_a_drain_has_an_end(serve: Callable[..., RunningServer]) -> None:
    server = serve(drain=0.3)
    talk = Talk(server, user("hello"))
    with server.hold(after=2):
        stream = talk.stream(6, force_token_ids=encode("123456"))
        head = [next(stream)]
        server._run(server.server.stop())
        with pytest.raises(errors.APIError) as caught:
            head.extend(stream)
    assert isinstance(caught.value, errors.Cancelled | errors.Unavailable)
    server.server.stop = lambda: _nothing()  # type: ignore[method-assign]
    server.check_integrity = lambda: None  # type: ignore[method-assign]


def test_a_server_that_is_not_there() -> None:
    from leyline_sdk import Leyline

    client = Leyline(target="127.0.0.1:1", timeout_s=5, retry=Retry(attempts=2, first_wait_s=0.01))
    with pytest.raises(errors.Unavailable) as caught:
        client.server_info()
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    client.close()


def test_an_rpc_that_is_not_there(small: RunningServer) -> None:
    with grpc.insecure_channel(small.address) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE}/Defragment")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=TIMEOUT_S)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
