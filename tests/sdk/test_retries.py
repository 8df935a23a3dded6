"""Lost replies: a retry acts once. What can't be retried is found out before the next call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Retry, clear, errors
from leyline_sdk.client import Leyline
from leyline_sdk.testing import FakeServer, FakeTransport, FlakyTransport
from leyline_sdk.transport import Metadata, ResponseStream

FAST = Retry(first_wait_s=0.001, max_wait_s=0.002)
NEVER = Retry(attempts=1)


def _flaky(fake: FakeServer, lose: list[bool], retry: Retry = FAST) -> Leyline:
    return fake.client(transport=FlakyTransport(FakeTransport(fake), lose), retry=retry)


def test_every_mutating_call_acts_once() -> None:
    fake = FakeServer(["hello", "again"])
    always = [True, False] * 100
    session = _flaky(fake, always).session("s", system="sys")
    session.append(["one", "two"])
    reply = session.complete()
    assert reply.text == "hello"
    (edit,) = session.edit(clear("m2")).applied_edits
    session.undo(edit.edit_id)
    child = session.fork("t")
    assert child.close() == 0
    mirror = session.transcript
    session.refresh()
    assert mirror == session.transcript
    assert [m.text for m in mirror] == ["sys", "one", "two", "hello"]
    assert session.info().version == 2
    assert [summary.id for summary in fake.client().sessions()] == ["s"]
    assert session.close() > 0


def test_retries_end() -> None:
    fake = FakeServer()
    with pytest.raises(errors.Unavailable):
        _flaky(fake, [False, False, *[True] * 10]).session("s").append("x")
    assert fake.calls.count("Append") == FAST.attempts


def test_after_an_unknown_outcome_the_session_looks() -> None:
    fake = FakeServer()
    session = _flaky(fake, [False, False, True], NEVER).session()
    with pytest.raises(errors.Unavailable):
        session.append("one")
    session.append("two")
    assert [m.text for m in session.transcript] == ["one", "two"]


class _Cut(FlakyTransport):
    """Loses a stream after its first events."""

    def __init__(self, fake: FakeServer, after: int) -> None:
        super().__init__(FakeTransport(fake), ())
        self.after = after

    def stream(self, method: str, request: pb.GenerateRequest, timeout_s: float, metadata: Metadata) -> ResponseStream:  # type: ignore[override]
        inner = super().stream(method, request, timeout_s, metadata)
        after = self.after

        class Cut:
            def __iter__(self) -> Iterator[pb.GenerateResponse]:
                return self

            def __next__(self) -> pb.GenerateResponse:
                nonlocal after
                after -= 1
                if after < 0:
                    inner.cancel()
                    raise errors.Unavailable("lost", status="UNAVAILABLE")
                return next(inner)

            def cancel(self) -> None:
                inner.cancel()

        return Cut()


def test_a_generate_is_never_retried_after_its_first_event() -> None:
    fake = FakeServer(["abcdef"])
    session = fake.client(transport=_Cut(fake, after=3), retry=FAST).session()
    session.append("hi")
    with pytest.raises(errors.Unavailable):
        session.complete()
    assert fake.calls.count("Generate") == 1
    session.append("go on")  # what was sent is kept
    assert [m.text for m in session.transcript] == ["hi", "ab", "go on"]


def test_busy_and_full_are_retried_when_asked() -> None:
    fake = FakeServer(["abc", "de"])
    client = fake.client(retry=Retry(attempts=3, first_wait_s=0.001, max_wait_s=0.001))
    one = client.session("s")
    one.append("hi")
    stream = one.generate()
    other = client.session("s")
    with pytest.raises(errors.SessionBusy) as busy:
        other.append("x")
    assert busy.value.retryable
    assert fake.calls.count("Append") == 2
    patient = fake.client(retry=Retry(attempts=3, first_wait_s=0.001, max_wait_s=0.001, on_busy=True)).session("s")
    with pytest.raises(errors.SessionBusy):
        patient.append("x")
    assert fake.calls.count("Append") == 5
    other.refresh()
    with pytest.raises(errors.StaleLength):
        other.append("x", wait=True)  # waits for the stream to end, and finds the session longer
    assert stream.final().text == "abc"


def test_a_request_id_with_another_body_is_refused() -> None:
    transport = FakeTransport(FakeServer())
    create = pb.CreateSessionRequest(request_id="r", session_id="a")
    assert transport.unary("CreateSession", create, 1.0, ()) == transport.unary("CreateSession", create, 1.0, ())
    create.session_id = "b"
    with pytest.raises(errors.RequestIdReused):
        transport.unary("CreateSession", create, 1.0, ())


def test_a_timeout_bounds_all_attempts() -> None:
    fake = FakeServer()
    client = _flaky(fake, [True] * 1000, Retry(attempts=1000, first_wait_s=0.02, max_wait_s=0.02))
    client._runner.config = type(client._runner.config)(timeout_s=0.1, retry=client._runner.config.retry)
    with pytest.raises(errors.Unavailable):
        client.sessions()
    assert 2 <= len(fake.calls) <= 6


def test_asyncio_does_all_this_too() -> None:
    async def run() -> None:
        fake = FakeServer(["abcdef", "done"])
        async with fake.async_client() as client, client.session("s", system="sys") as session:
            await session.append("hi")
            async with session.generate() as stream:
                async for text in stream.text:
                    assert text == "a"
                    break
            await session.append("more")
            assert session.transcript.messages[2].text == "a"
            reply = await session.complete()
            assert reply.text == "done"
            (edit,) = (await session.edit(clear("m2"))).applied_edits
            await session.undo(edit.edit_id)
            await session.prefill()
            child = await session.fork()
            assert (await child.info()).version == 2
            await child.close()
            stream = await session.generate()
            assert [delta.text async for delta in stream if delta.text] == ["o", "k"]
            assert (await stream.final()).text == "ok"
            mirror = session.transcript
            await session.refresh()
            assert mirror == session.transcript
            assert len(await client.sessions()) == 1
        assert len(fake.client().sessions()) == 1

    asyncio.run(run())


def test_a_cancelled_task_cancels_its_generate() -> None:
    async def run() -> None:
        fake = FakeServer(["abc"])
        session = await fake.async_client().session("s")
        await session.append("hi")
        stream = await session.generate()
        never = asyncio.get_running_loop().create_future()

        async def read() -> None:
            async with stream:
                await anext(stream)
                await never

        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (await session.info()).busy
        await session.append("next")

    asyncio.run(run())
