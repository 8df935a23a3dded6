"""A Generate that is cut short: what was sent stays, the next Append closes it, a half call goes and is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk.grpc_transport import GrpcTransport
from tests.contract.scene import READ
from tests.service.running import TIMEOUT_S, RunningServer, call_ids, special
from tests.service.talk import Talk, cancelled, encode, ids_of, span, until, user


@pytest.fixture
def talk(small: RunningServer) -> Iterator[Talk]:
    talk = Talk(small, user("what is the answer to all of it?", "q"))
    yield talk
    talk.close()


def cut_short(talk: Talk, forced: list[int], after: int, **fields: Any) -> list[int]:
    """Cancels a Generate after so many tokens. What was sent."""
    with talk.server.hold(after):
        stream = talk.stream(len(forced) + 8, force_token_ids=forced, **fields)
        events = [next(stream)]
        while len(ids_of(events)) < after:
            events.append(next(stream))
        stream.cancel()
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the end of the Generate")
    return ids_of(events)


def test_what_was_sent_stays(talk: Talk) -> None:
    forced = encode("1234567")
    assert cut_short(talk, forced, after=3) == forced[:3]
    state = talk.state
    last = state.messages[-1]
    assert (last.role, last.text, last.open, state.turn) == (pb.ROLE_ASSISTANT, "123", True, 1)
    assert list(state.token_ids)[-3:] == forced[:3]


def test_the_next_append_closes_the_message(talk: Talk) -> None:
    cut_short(talk, encode("1234567"), after=3)
    answer = talk.append(user("go on"))
    closed, new = answer.messages
    assert (closed.open, new.role, answer.dropped_half_call) == (False, pb.ROLE_USER, "")
    ids = list(talk.state.token_ids)
    assert ids[closed.end - 1] == special("<|end|>")
    assert talk.state.messages[-2].text == "123"


def test_the_next_generate_goes_on_with_the_message(talk: Talk) -> None:
    cut_short(talk, encode("1234567"), after=3)
    opened = talk.state.messages[-1].message_id
    done = talk.generate(9, force_token_ids=[*encode("89"), special("<|end|>")])
    assert (done.message.message_id, done.message.text, done.message.open) == (opened, "12389", False)
    assert [m.message_id for m in talk.state.messages] == ["q", opened]


def test_a_half_tool_call_is_dropped_and_reported(talk: Talk) -> None:
    forced = [*encode("7"), *call_ids("read", '{"path":"a"}')]
    cut_short(talk, forced, after=4)
    assert not talk.state.unanswered_call_ids
    length = talk.state.num_tokens
    answer = talk.append(user("go on"))
    assert answer.dropped_half_call.startswith("<|call|>")
    closed = answer.messages[0]
    assert [p.kind for p in closed.parts if p.kind == pb.PART_KIND_CALL] == []
    assert closed.end == length - 3 + 1  # three tokens of the call went, the end marker came
    assert talk.state.messages[-2].text == "7"


def test_max_tokens_cuts_short_too(talk: Talk) -> None:
    done = talk.generate(3, force_token_ids=encode("1234"))
    assert (done.finish_reason, done.message.open, done.usage.generated) == (pb.FINISH_REASON_LENGTH, True, 3)
    assert len(talk.append(user("go on")).messages) == 2


def test_before_it_was_admitted_it_leaves_nothing(talk: Talk) -> None:
    talk.prefill()
    before = talk.state
    with talk.server.hold():
        stream = talk.stream(4, directives=[span(6, 8, text="x")])
        until(lambda: talk.server.stats().queued, "the request in the queue")
        stream.cancel()
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the end of the Generate")
    assert talk.state == before


def test_during_prefill_it_leaves_no_message(serve: Callable[..., RunningServer]) -> None:
    talk = Talk(serve(prefill_chunk=8), user("0123456789" * 4, "q"))
    before = talk.state
    with talk.server.hold(after=2):
        stream = talk.stream(4)
        next(stream)
        until(lambda: talk.state.num_pending == talk.state.num_tokens - 16, "the second step")
        stream.cancel()
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the end of the Generate")
    after = talk.state
    assert (after.messages, after.turn, after.version) == (before.messages, before.turn, before.version)
    assert after.num_pending == after.num_tokens - 16  # what was computed is not thrown away
    assert talk.generate(2, force_token_ids=encode("12")).usage.generated == 2


def test_a_client_that_is_gone(talk: Talk) -> None:
    transport = GrpcTransport(talk.server.address)
    request = talk.generating(20, force_token_ids=encode("12345678901234567890"))
    with talk.server.hold(after=2):
        stream = transport.stream("Generate", request, TIMEOUT_S, ())
        next(stream)
        transport.close()
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the end of the Generate")
    state = talk.state
    assert state.turn == 1
    assert 1 <= len(state.messages[-1].text) <= 3
    retried = list(talk.server.stream(request))  # the same request acts once: its answer is what it came to
    assert retried[-1].done.finish_reason == pb.FINISH_REASON_CANCELLED
    assert talk.state == state


def test_a_deadline_cancels(talk: Talk) -> None:
    with talk.server.hold(after=2):
        stream = talk.server.transport.stream("Generate", talk.generating(9, force_token_ids=encode("123")), 1.0, ())
        with pytest.raises(errors.DeadlineExceeded):
            list(stream)
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the end of the Generate")
    assert talk.state.messages[-1].text == "12"


def test_close_ends_a_running_generate(small: RunningServer) -> None:
    talk = Talk(small, user("what is the answer?"))
    in_use = small.pool().in_use
    freed: list[int] = []
    with small.hold(after=2):
        stream = talk.stream(9, force_token_ids=encode("123456789"))
        next(stream)
        thread = threading.Thread(target=lambda: freed.append(talk.close()))
        thread.start()
        until(lambda: cancelled(talk), "the cancellation")
    (*_, last) = stream
    thread.join(TIMEOUT_S)
    assert last.done.finish_reason == pb.FINISH_REASON_CANCELLED
    assert freed[0] > 0
    assert small.pool().in_use == in_use
    with pytest.raises(errors.SessionNotFound):
        _ = talk.state


def test_close_ends_a_prefill(serve: Callable[..., RunningServer]) -> None:
    server = serve(prefill_chunk=8)
    talk = Talk(server, user("0123456789" * 4))
    raised: list[errors.APIError] = []

    def prefill() -> None:
        try:
            talk.prefill()
        except errors.APIError as error:
            raised.append(error)

    with server.hold(after=2):
        thread = threading.Thread(target=prefill)
        thread.start()
        until(lambda: server.stats().running, "the prefill")
        closing = threading.Thread(target=talk.close)
        closing.start()
        until(lambda: cancelled(talk), "the cancellation")
    thread.join(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert [type(error) for error in raised] == [errors.Cancelled]
    assert server.pool().in_use == 0


def test_the_sdk_mirror_after_a_stream_that_was_left(small: RunningServer) -> None:
    with small.client().session(messages=["hello"], tools=[{"name": READ.name}]) as session:
        with session.generate(max_tokens=30, force_token_ids=encode("123456789012345678901234567890")) as stream:
            next(stream)
        with pytest.raises(errors.Cancelled):
            stream.final()
        session.append("and now")  # closes what is there
        session.refresh()
        state = small.state(session.id)
        assert [m.id for m in session.transcript] == [m.message_id for m in state.messages]
        assert [m.role for m in session.transcript] in (["user", "assistant", "user"], ["user", "user"])
        session.close()
