"""Who may be answered from whose KV: exact prefixes within a tenant, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Edit, Policy, PolicyContext, clear, errors
from tests.contract.scene import READ, fresh
from tests.service.running import RunningServer
from tests.service.talk import Talk, span, until, user

_numbers = count()


def text(length: int = 60) -> list[int]:
    """Ids that no other test has."""
    return [100 + next(_numbers), *range(300, 299 + length)]


def prefix_hit(server: RunningServer, ids: Sequence[int], key: str = "") -> int:
    """How much of these ids a new session finds computed."""
    talk = Talk(server, ids=ids, key=key)
    report = talk.prefill()
    assert report.prefix_hit + report.kept + report.computed == len(ids)
    talk.close()
    return int(report.prefix_hit)


def test_an_exact_prefix_is_shared(small: RunningServer) -> None:
    ids = text()
    talk = Talk(small, ids=ids)
    talk.prefill()
    in_use = small.pool().in_use
    assert prefix_hit(small, ids) == len(ids) - 1  # logits come from evaluating the last token
    assert prefix_hit(small, [*ids[:30], 5, 6]) == 30
    assert prefix_hit(small, [5, *ids]) == 0
    assert small.pool().in_use == in_use
    talk.close()
    assert prefix_hit(small, ids) == len(ids) - 1  # it outlives the session that computed it


def test_an_amortized_tail_never_answers_another_session(small: RunningServer) -> None:
    ids = text()
    talk = Talk(small, ids=ids)
    talk.prefill()
    talk.edit(span(20, 30, token_ids=pb.TokenIds(ids=[7, 8])))
    talk.prefill()
    talk.generate(2, raw=True, force_token_ids=[9, 10])
    edited = list(talk.state.token_ids)
    assert edited == [*ids[:20], 7, 8, *ids[30:], 9, 10]
    assert prefix_hit(small, edited) == 22  # up to R, which was computed over exact text; the tail was not
    assert prefix_hit(small, ids) == len(ids) - 1  # the text as it was still answers
    talk.close()


def test_what_a_forget_computed_again_is_shared(small: RunningServer) -> None:
    ids = text()
    talk = Talk(small, ids=ids)
    talk.prefill()
    talk.edit(span(20, 30, token_ids=pb.TokenIds(ids=[7, 8]), mode=pb.MODE_FORGET))
    talk.prefill()
    edited = list(talk.state.token_ids)
    talk.close()
    assert prefix_hit(small, ids) == 20  # the forgotten text answers nobody
    assert prefix_hit(small, edited) == 51


@pytest.fixture
def house(serve: Callable[..., RunningServer]) -> RunningServer:
    """Two tenants; one of them with two keys."""
    return serve(api_keys={"ann": "a", "abe": "a", "bob": "b"}, max_context=400)


def test_tenants_share_nothing(house: RunningServer) -> None:
    ids = text()
    talk = Talk(house, ids=ids, key="ann")
    talk.prefill()
    assert prefix_hit(house, ids, "abe") == len(ids) - 1
    assert prefix_hit(house, ids, "bob") == 0
    assert prefix_hit(house, ids, "bob") == len(ids) - 1


def test_tenants_do_not_see_each_other(house: RunningServer) -> None:
    talk = Talk(house, user("hello"), key="ann")
    assert house.state(talk.id, "abe") == talk.state
    assert [s.session_id for s in house.call(pb.ListSessionsRequest(), "bob").sessions] == []
    with pytest.raises(errors.SessionNotFound):
        house.state(talk.id, "bob")
    with pytest.raises(errors.SessionNotFound):
        house.call(pb.CloseSessionRequest(request_id=fresh(), session_id=talk.id), "bob")
    same = pb.CreateSessionRequest(request_id=fresh(), session_id=talk.id)
    assert house.call(same, "bob").session.num_tokens == 0  # names are each tenant's own
    assert talk.state.num_tokens > 0


@pytest.mark.parametrize("key", ["", "eve", "annn", "an"])
def test_an_unknown_key(house: RunningServer, key: str) -> None:
    requests: list[Any] = [
        pb.GetServerInfoRequest(),
        pb.CreateSessionRequest(request_id="x"),
        pb.GetSessionRequest(session_id="x"),
        pb.ListSessionsRequest(),
        pb.AppendRequest(request_id="x"),
        pb.ApplyDirectivesRequest(request_id="x"),
        pb.UndoRequest(request_id="x"),
        pb.ForkSessionRequest(request_id="x"),
        pb.CloseSessionRequest(request_id="x"),
        pb.TokenizeRequest(text="x"),
        pb.DetokenizeRequest(ids=[1]),
    ]
    for request in requests:
        with pytest.raises(errors.Unauthenticated) as caught:
            house.call(request, key)
        assert caught.value.reason == "UNAUTHENTICATED"
    with pytest.raises(errors.Unauthenticated):
        list(house.stream(pb.GenerateRequest(request_id="x", session_id="x"), key))


def test_the_clients_key(house: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with house.client(api_key="ann").session() as session:
        assert session.info().num_tokens == 0
        session.close()
    monkeypatch.setenv("LEYLINE_API_KEY", "bob")
    assert house.client().sessions() == []
    monkeypatch.setenv("LEYLINE_API_KEY", "eve")
    with pytest.raises(errors.Unauthenticated):
        house.client().session()


# ---------------------------------------------------------------- resuming, eviction, expiry


class ClearResults(Policy):
    """Clears every tool result that is older than one turn and not cleared yet."""

    def plan(self, context: PolicyContext) -> list[Edit]:
        return [clear(m, "x") for m in context.tool_results if m.age > 1 and not m.edited]


def test_a_new_client_with_a_fresh_policy_edits_and_computes_nothing(small: RunningServer) -> None:
    first = small.client()
    session = first.session(fresh("resumed"), tools=[{"name": READ.name}], policies=[ClearResults()])
    calls = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}]
    session.append(["look", {"role": "assistant", "tool_calls": calls}])
    session.tool_result("c1", "a long, long result of the tool")
    for text_ in ("one", "two", "three"):
        session.append(text_)
        session.complete(max_tokens=2)
    assert session.info().version == 1
    session.prefill()
    before, rows = small.state(session.id), small.pool().rows_computed
    first.close()  # no close of the session: its client is gone

    again = small.client().session(session.id, policies=[ClearResults()])
    assert [m.id for m in again.transcript] == [m.message_id for m in before.messages]
    assert again.preview().applied_edits == ()
    result = again.prefill()
    assert result.applied_edits == ()
    assert result.cache is not None
    assert result.cache.computed == 0
    assert small.state(session.id) == before
    assert small.pool().rows_computed == rows
    reply = again.complete(max_tokens=2)
    assert reply.applied_edits == ()
    assert reply.usage.computed <= 1
    again.close()


def test_idle_sessions_give_way_and_say_so(serve: Callable[..., RunningServer]) -> None:
    server = serve(slots=128)
    old, *others = (Talk(server, ids=text(50)) for _ in range(3))
    old.prefill()
    old.edit(span(10, 12))
    assert old.state.exact_upto == 10
    for talk in others:
        talk.prefill()
    evicted = old.state
    assert (evicted.num_pending, evicted.num_tokens) == (48, 48)
    done = old.generate(1, raw=True, force_token_ids=[9])
    assert done.cache.reason == pb.CacheReport.REASON_EVICTED
    assert done.cache.prefix_hit + done.cache.kept + done.cache.computed == 48
    assert old.state.exact_upto == 48  # an evicted session becomes what FORGET would have made it
    assert all(talk.state.num_tokens == 50 for talk in others)


def test_idle_sessions_expire(serve: Callable[..., RunningServer]) -> None:
    server = serve(session_ttl=3600)
    lasting = Talk(server, user("hello"))
    short = server.call(pb.CreateSessionRequest(request_id=fresh(), ttl_s=0.2, messages=[user("hi")])).session
    lasting.prefill()
    until(lambda: len(server.call(pb.ListSessionsRequest()).sessions) == 1, "the session's end")
    with pytest.raises(errors.SessionNotFound):
        server.state(short.session_id)
    assert lasting.state.num_tokens > 0


def test_a_session_in_use_does_not_expire(serve: Callable[..., RunningServer]) -> None:
    server = serve(session_ttl=0.2)
    talk = Talk(server, user("hello"))
    with server.hold(after=1):
        stream = talk.stream(4, force_token_ids=[70, 71, 72, 73])
        next(stream)
        time.sleep(1.5)  # the server looks once a second
        assert talk.state.busy
    (*_, last) = stream
    assert last.done.usage.generated == 4
    until(lambda: not server.call(pb.ListSessionsRequest()).sessions, "the session's end")
    assert server.pool().in_use == 0
