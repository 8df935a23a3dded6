"""Streams: whole characters only, many at once like one alone, and the same from asyncio."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import AsyncLeyline, FinishReason, errors
from tests.service.running import TIMEOUT_S, RunningServer, special
from tests.service.talk import Talk, encode, ids_of, text_of, until, user
from training.render import READ_FILE, SYSTEM_PROMPT

END = special("<|end|>")
WILD = "é漢🙂字👩‍🚀 ẞ\u0301 ok"


def test_no_delta_splits_a_character(small: RunningServer) -> None:
    talk = Talk(small, user("hello"))
    ids = [*encode(WILD), END]
    assert len(ids) > len(WILD)  # characters of several tokens
    for raw in (False, True):
        events = list(talk.stream(len(ids), force_token_ids=ids, raw=raw, stop_token_ids=[END]))
        texts = [event.delta.text for event in events if event.delta.token_ids]
        assert len(texts) == len(ids)
        assert not any("\ufffd" in text for text in texts)
        assert text_of(events).removesuffix("<|end|>") == WILD
        assert "" in texts  # a token in the middle of a character says nothing yet
    talk.close()


def test_a_character_that_is_never_finished(small: RunningServer) -> None:
    talk = Talk(small, user("hello"))
    whole = encode("x🙂")
    events = list(talk.stream(len(whole) - 1, force_token_ids=whole))
    assert text_of(events) == events[-1].done.message.text == "x\ufffd"
    again = list(talk.stream(2, force_token_ids=[whole[-1], END]))  # the message goes on, and the character with it
    assert again[-1].done.message.text == "x🙂"
    talk.close()


def test_events_come_in_their_order(small: RunningServer) -> None:
    talk = Talk(small, user("hello"))
    events = list(talk.stream(3, force_token_ids=encode("123")))
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "delta", "done"]
    assert events[0].started.num_tokens + 3 == events[-1].done.num_tokens
    usage = events[-1].done.usage
    assert (usage.generated, usage.context) == (3, events[0].started.num_tokens)
    assert 0 < usage.ttft_ms <= usage.total_ms
    talk.close()


def test_what_a_session_is_while_it_generates(small: RunningServer) -> None:
    """Tokens, pending ones and exact ones are of the same list: what is being said is in none of them."""
    talk = Talk(small, user("hello"))
    with small.hold(after=3):
        stream = talk.stream(9, force_token_ids=encode("123456789"))
        head = [next(stream) for _ in range(4)]
        state = talk.state
        assert (state.num_tokens, state.num_pending) == (head[0].started.num_tokens, 0)
        assert state.exact_upto == state.num_tokens == len(state.token_ids)
        (listed,) = [s for s in small.call(pb.ListSessionsRequest()).sessions if s.session_id == talk.id]
        assert (listed.num_tokens, listed.num_pending) == (state.num_tokens, 0)
    list(stream)
    assert talk.state.num_tokens == state.num_tokens + 9
    talk.close()


def test_tokens_are_sent_as_they_come(small: RunningServer) -> None:
    talk = Talk(small, user("hello"))
    with small.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        head = [next(stream) for _ in range(3)]
        assert text_of(head) == "12"
        assert talk.state.busy
    assert text_of([*head, *stream]) == "1234"
    talk.close()


QUESTIONS = [
    "What is port in a.ini?",
    "What is user in deep.ini and port in other.ini?",
    "Read log.txt: what is level?",
    "Tell me name in b.ini.",
    "I need host in hosts.ini.",
]
_numbers = count()


def ask(server: RunningServer, question: str) -> list[int]:
    """The greedy answer of the embedded model, as ids."""
    with server.client().session(tools=[READ_FILE], system=SYSTEM_PROMPT, messages=[question]) as session:
        with session.generate(max_tokens=24) as stream:
            ids = [token for delta in stream for token in delta.token_ids]
            reply = stream.final()
        assert reply.usage.generated == len(ids)
        session.close()
    return ids


def test_many_at_once_say_what_each_says_alone(tiny: RunningServer) -> None:
    alone = [ask(tiny, question) for question in QUESTIONS]
    before = tiny.stats()
    with tiny.hold(), ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = [pool.submit(ask, tiny, question) for question in QUESTIONS]
        until(lambda: tiny.stats().queued == len(QUESTIONS), "all of them in the queue")
        tiny.release()
        together = [answer.result(TIMEOUT_S) for answer in answers]
    assert together == alone
    after = tiny.stats()
    generated = sum(map(len, alone))
    assert after.steps - before.steps < generated  # they shared steps


def test_decode_goes_on_while_another_prefills(small: RunningServer) -> None:
    chunked = Talk(small, ids=[90 + next(_numbers), *range(200, 600)])
    talk = Talk(small, user("hello"))
    ids = encode("12345678901234567890")
    with small.hold(after=2):
        stream = talk.stream(20, force_token_ids=ids)
        next(stream)
        other = chunked.stream(2, raw=True, ignore_eos=True)
        until(lambda: small.stats().queued + small.stats().running == 2, "the other")
    assert ids_of(list(stream)) == ids
    assert len(ids_of(list(other))) == 2
    talk.close()
    chunked.close()


# ---------------------------------------------------------------- asyncio


def test_the_async_twin_says_the_same(tiny: RunningServer) -> None:
    async def twin(question: str) -> list[int]:
        async with (
            AsyncLeyline(target=tiny.address, timeout_s=TIMEOUT_S) as client,
            client.session(tools=[READ_FILE], system=SYSTEM_PROMPT, messages=[question]) as session,
        ):
            async with session.generate(max_tokens=24) as stream:
                ids = [token async for delta in stream for token in delta.token_ids]
                reply = await stream.final()
            assert reply.usage.generated == len(ids)
            await session.close()
            return ids

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(*(twin(question) for question in QUESTIONS[:2])))

    assert asyncio.run(both()) == [ask(tiny, question) for question in QUESTIONS[:2]]


def test_the_async_twins_agent_loop(small: RunningServer) -> None:
    from tests.service.test_tool_calls import says

    async def loop() -> None:
        async with AsyncLeyline(target=small.address, timeout_s=TIMEOUT_S) as client:
            session = await client.session(tools=[{"name": "read"}], messages=["look"])
            async with session.generate(force_token_ids=says("", ("read", "{}"))) as stream:
                reply = await stream.final()
            assert reply.finish_reason is FinishReason.TOOL_CALLS
            with pytest.raises(errors.UnansweredToolCall):
                await session.complete()
            await session.tool_result(reply.tool_calls[0], "seven", prefill=True)
            assert (await session.complete(max_tokens=2)).usage.computed == 1
            assert (await session.info()).turn == 2
            await session.close()
            with pytest.raises(errors.SessionNotFound):
                await session.info()

    asyncio.run(loop())


def test_a_cancelled_task_cancels_its_generate(small: RunningServer) -> None:
    talk = Talk(small, user("hello"))

    async def leave() -> None:
        async with AsyncLeyline(target=small.address, timeout_s=TIMEOUT_S) as client:
            session = await client.session(talk.id)
            stream = await session.generate(max_tokens=20, force_token_ids=encode("12345678901234567890"))
            await anext(stream)
            reading = asyncio.create_task(stream.final())
            await asyncio.sleep(0.1)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            engine = small.parts.engine
            while not any(r.cancelled for r in small.on_engine(lambda: list(engine._admission.running))):
                await asyncio.sleep(0.01)

    with small.hold(after=2):
        asyncio.run(leave())
    until(lambda: not talk.state.busy, "the end of the Generate")
    assert talk.state.messages[-1].text == "12"
    assert talk.append(user("go on")).messages[-1].role == pb.ROLE_USER
    talk.close()
