"""The gRPC transport, sync and asyncio, over a real socket."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from leyline_sdk import AsyncLeyline, Leyline, Retry, errors
from leyline_sdk.testing import FakeServer

_spec = importlib.util.spec_from_file_location("grpc_adapter", Path(__file__).with_name("grpc_adapter.py"))
assert _spec is not None
assert _spec.loader is not None
_adapter = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_adapter)

NEVER = Retry(attempts=1)


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer(["hello", "x" * 200_000], api_keys={"key": "me"}, max_context=3_000_000, num_slots=3_000_000)


@pytest.fixture
def target(fake: FakeServer) -> Iterator[str]:
    with _adapter.serve(fake) as address:
        yield address


def _idle(fake: FakeServer) -> None:
    for _ in range(200):
        if not any(session.busy for session in fake.sessions.values()):
            return
        time.sleep(0.02)
    raise AssertionError("the server never heard of the cancellation")


def test_a_session(fake: FakeServer, target: str) -> None:
    with Leyline(target=target, api_key="key") as client, client.session("s", system="sys") as session:
        session.append("hi")
        assert session.complete().text == "hello"
        with session.generate() as stream:
            next(stream)
        _idle(fake)
        session.append("on")
        mirror = session.transcript
        session.refresh()
        assert mirror == session.transcript


def test_errors_are_typed(target: str) -> None:
    with Leyline(target=target, api_key="key") as client:
        session = client.session()
        with pytest.raises(errors.EmptySession):
            session.complete()
        with pytest.raises(errors.UnknownMessage) as unknown:
            session.edit(errors_edit())
        assert isinstance(unknown.value.__cause__, grpc.RpcError)
        assert unknown.value.request_id
        assert unknown.value.metadata == {"message_id": "nobody"}
    with Leyline(target=target) as client, pytest.raises(errors.Unauthenticated):
        client.server_info()


def errors_edit():  # type: ignore[no-untyped-def]
    from leyline_sdk import clear

    return clear("nobody")


def test_nobody_there() -> None:
    with Leyline(target="127.0.0.1:1", retry=NEVER) as client, pytest.raises(errors.Unavailable) as gone:
        client.server_info()
    assert isinstance(gone.value.__cause__, grpc.RpcError)


def test_a_deadline(fake: FakeServer, target: str) -> None:
    with Leyline(target=target, api_key="key", timeout_s=0.2, retry=NEVER) as client:
        with fake.lock, pytest.raises(errors.DeadlineExceeded):
            client.server_info()
        client.server_info()


def test_a_million_ids_pass(target: str) -> None:
    with Leyline(target=target, api_key="key") as client, client.session() as session:
        session.append_ids([200] * 1_100_000)
        assert len(session.info(token_ids=True).token_ids) == 1_100_000


def test_asyncio(fake: FakeServer, target: str) -> None:
    async def run() -> None:
        async with AsyncLeyline(target=target, api_key="key") as client, client.session("s") as session:
            with pytest.raises(errors.EmptySession) as empty:
                await session.complete()
            assert isinstance(empty.value.__cause__, grpc.RpcError)
            await session.append("hi")
            async with session.generate() as stream:
                assert "".join([text async for text in stream.text]) == "hello"
            async with session.generate() as stream:
                await anext(stream)
            await asyncio.to_thread(_idle, fake)
            await session.append("on")
            with pytest.raises(errors.UnknownMessage):
                await session.edit(errors_edit())
        async with AsyncLeyline(target="127.0.0.1:1", retry=NEVER) as client:
            with pytest.raises(errors.Unavailable):
                await client.server_info()

    asyncio.run(run())
