"""The same request_id acts once, whatever became of the first answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Leyline, errors, replace_content
from leyline_sdk.grpc_transport import GrpcTransport
from leyline_sdk.testing import FlakyTransport
from tests.contract.scene import fresh
from tests.service.running import RunningServer
from tests.service.talk import Talk, encode, ids_of, span, until, user

QUESTION = user("what is the answer to all of it?", "q")


@pytest.fixture
def talk(small: RunningServer) -> Any:
    talk = Talk(small, QUESTION)
    yield talk
    talk.close()


REQUESTS: dict[str, Callable[[Talk], Any]] = {
    "append": lambda t: t.appending(user("more")),
    "append and prefill": lambda t: t.appending(user("more"), prefill=True, directives=[span(6, 7)]),
    "edit": lambda t: t.editing(span(6, 8, text="x")),
    "edit and prefill": lambda t: t.editing(span(6, 8, mode=pb.MODE_FORGET), prefill=True),
    "undo": lambda t: pb.UndoRequest(
        request_id=fresh(), session_id=t.id, edit_id=t.edit(span(5, 6)).receipts[0].edit_id
    ),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_unary_call_twice(talk: Talk, case: str) -> None:
    request = REQUESTS[case](talk)
    first = talk.call(request)
    after, rows = talk.state, talk.server.pool().rows_computed
    assert talk.call(request) == first
    assert talk.state == after
    assert talk.server.pool().rows_computed == rows


def test_create_and_fork_twice(talk: Talk) -> None:
    for request in (
        pb.CreateSessionRequest(request_id=fresh(), messages=[QUESTION]),
        pb.ForkSessionRequest(request_id=fresh(), session_id=talk.id),
    ):
        first = talk.call(request)
        before = len(talk.call(pb.ListSessionsRequest()).sessions)
        again = talk.call(request)
        assert again == first
        assert len(talk.call(pb.ListSessionsRequest()).sessions) == before
        talk.call(pb.CloseSessionRequest(request_id=fresh(), session_id=first.session.session_id))


def test_close_twice(small: RunningServer) -> None:
    talk = Talk(small, QUESTION)
    talk.prefill()
    request = pb.CloseSessionRequest(request_id=fresh(), session_id=talk.id)
    first = talk.call(request)
    assert first.freed > 0
    assert talk.call(request) == first


def test_a_generate_twice_gives_the_same_tokens_and_acts_once(talk: Talk) -> None:
    request = talk.generating(6, sampling=pb.Sampling(temperature=1.0))
    first = list(talk.server.stream(request))
    after, rows = talk.state, talk.server.pool().rows_computed
    again = list(talk.server.stream(request))
    # A replay has the deltas of the first in one.
    assert (again[0], again[-1], ids_of(again)) == (first[0], first[-1], ids_of(first))
    assert "".join(e.delta.text for e in again) == "".join(e.delta.text for e in first)
    assert len(ids_of(first)) == first[-1].done.usage.generated
    assert (talk.state, talk.server.pool().rows_computed, talk.state.turn) == (after, rows, 1)


def test_a_retry_reads_along_while_the_first_runs(talk: Talk) -> None:
    request = talk.generating(6, force_token_ids=encode("1234567")[:6])
    with talk.server.hold(after=2):
        first = talk.server.stream(request)
        head = [next(first)]
        second = talk.server.stream(request)
        assert next(second) == head[0]
        talk.server.release()
        events = [*head, *first]
        assert [head[0], *second] == events
    assert talk.state.turn == 1


def test_a_reader_that_leaves_does_not_stop_the_first(talk: Talk) -> None:
    request = talk.generating(6, force_token_ids=encode("123456"))
    with talk.server.hold(after=2):
        first = talk.server.stream(request)
        next(first)
        second = talk.server.stream(request)
        next(second)
        second.cancel()
        talk.server.release()
        (*_, last) = first
    assert (last.done.finish_reason, last.done.usage.generated) == (pb.FINISH_REASON_LENGTH, 6)


def test_a_dry_run_is_not_remembered(talk: Talk) -> None:
    request = talk.editing(span(6, 8, text="x"), dry_run=True)
    talk.call(request)
    request.dry_run = False
    assert talk.call(request).receipts[0].edit_id == "e1"


def test_another_tenant_has_request_ids_of_its_own(serve: Callable[..., RunningServer]) -> None:
    server = serve(api_keys={"ka": "a", "kb": "b"})
    request = pb.CreateSessionRequest(request_id="same", session_id="s")
    assert server.call(request, "ka").session.session_id == "s"
    other = pb.CreateSessionRequest(request_id="same", session_id="t")
    assert server.call(other, "kb").session.session_id == "t"
    with pytest.raises(errors.RequestIdReused):
        server.call(other, "ka")


def test_old_request_ids_are_forgotten(serve: Callable[..., RunningServer]) -> None:
    talk = Talk(serve(remembered_requests=2), QUESTION)
    request = talk.appending(user("one"))
    talk.call(request)
    for _ in range(2):
        talk.append(user("two"))
    talk.call(request)  # so long ago that it acts again: the bound is documented
    assert len(talk.state.messages) == 5


# ---------------------------------------------------------------- through the SDK


def losing(server: RunningServer, *lost: bool) -> Leyline:
    """A client that loses the replies of these calls; the first two are GetServerInfo and CreateSession."""
    return Leyline(transport=FlakyTransport(GrpcTransport(server.address), [False, False, *lost]), timeout_s=60)


def test_a_lost_reply_and_a_retry_act_once(small: RunningServer) -> None:
    with losing(small, *[True, False] * 4) as client:
        session = client.session(messages=["what is the answer?"])
        session.append("more")
        assert [m.text for m in session.transcript] == ["what is the answer?", "more"]
        session.edit(replace_content(session.transcript.messages[1], "less"))
        reply = session.complete(max_tokens=5, temperature=1.0)
        child = session.fork()
        state = small.state(session.id)
        assert (state.version, state.turn, len(state.messages)) == (1, 1, 3)
        assert (reply.text, reply.message_id) == (state.messages[-1].text, state.messages[-1].message_id)
        assert child.info().num_tokens == state.num_tokens
        child.close()
        session.close()


def test_a_lost_creation_leaves_one_session(small: RunningServer) -> None:
    before = {s.id for s in small.client().sessions()}
    client = Leyline(transport=FlakyTransport(GrpcTransport(small.address), [False, True]), timeout_s=60)
    session = client.session()
    assert {s.id for s in small.client().sessions()} - before == {session.id}
    session.close()
    client.close()


def test_a_refused_call_is_not_remembered(talk: Talk) -> None:
    with talk.server.hold(after=1):
        stream = talk.stream(3)
        next(stream)
        request = talk.appending(user("more"))
        with pytest.raises(errors.SessionBusy):
            talk.call(request)
        talk.server.release()
        list(stream)
    until(lambda: not talk.state.busy, "the end of the Generate")
    assert talk.call(request).messages[-1].role == pb.ROLE_USER
