"""What is computed when, and whether receipts and reports add up: counted where the model is called."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leyline_proto import leyline_pb2 as pb
from tests.service.running import RunningServer
from tests.service.talk import Talk, encode, span, user

Reason = pb.CacheReport


@pytest.fixture
def talk(small: RunningServer) -> Iterator[Talk]:
    """Sixty tokens without a role, which no other test has; nothing computed."""
    talk = Talk(small, ids=[100 + next(_numbers), *range(200, 259)])
    yield talk
    talk.close()


_numbers = iter(range(1000))


def rows(talk: Talk) -> int:
    return int(talk.server.pool().rows_computed)


def steps(talk: Talk) -> int:
    return int(talk.server.stats().steps)


def adds_up(report: pb.CacheReport, entries: int) -> None:
    assert report.prefix_hit + report.content_hit + report.kept + report.computed == entries, report


def test_append_and_edit_compute_nothing(talk: Talk) -> None:
    before = rows(talk)
    talk.append(ids=[70, 71])
    talk.edit(span(10, 12, text="x"))
    talk.edit(span(20, 22, mode=pb.MODE_FORGET))
    assert rows(talk) == before
    state = talk.state
    assert state.num_pending == state.num_tokens


def test_r_and_the_next_message_go_in_one_pass(talk: Talk) -> None:
    talk.prefill()
    receipt = talk.edit(span(10, 15, token_ids=pb.TokenIds(ids=[70, 71, 72]))).receipts[0]
    talk.append(user("1234"))
    pending = talk.state.num_pending
    before, first = rows(talk), steps(talk)
    done = talk.generate(1, force_token_ids=encode("5"))
    opened = 1  # the assistant's marker
    assert done.cache.computed == rows(talk) - before == pending + opened
    assert pending == receipt.inserted + len(encode("1234")) + 2
    assert steps(talk) == first + 1
    assert done.cache.first_divergence == 10
    assert done.usage.computed == done.cache.computed


def test_prefill_computes_while_the_agent_waits(talk: Talk) -> None:
    answer = talk.append(user("1234"), prefill=True, directives=[span(10, 15, text="7")])
    assert answer.HasField("cache")
    assert answer.cache.computed == answer.num_tokens == 60 - 5 + 1 + 4 + 2
    adds_up(answer.cache, answer.num_tokens)
    before = rows(talk)
    done = talk.generate(1, force_token_ids=encode("5"))
    assert (rows(talk) - before, done.cache.computed, done.cache.kept) == (1, 1, answer.num_tokens)
    assert done.usage.context == answer.num_tokens + 1


def test_prefill_of_nothing_computes_nothing(talk: Talk) -> None:
    assert talk.prefill().reason == Reason.REASON_COLD
    before = rows(talk)
    report = talk.prefill()
    assert (report.computed, report.kept, report.reason, report.HasField("first_divergence")) == (
        0,
        60,
        Reason.REASON_APPEND,
        False,
    )
    assert rows(talk) == before
    assert talk.call(talk.editing(prefill=True)).version == 0


def test_a_generate_evaluates_the_last_token_again(talk: Talk) -> None:
    talk.prefill()
    done = talk.generate(1, raw=True, force_token_ids=[80])
    assert (done.cache.computed, done.cache.kept, done.cache.first_divergence) == (1, 59, 59)
    adds_up(done.cache, 60)


def test_an_amortize_keeps_what_follows_and_turns_it(talk: Talk) -> None:
    talk.prefill()
    pool = talk.server.pool()
    receipt = talk.edit(span(10, 20, token_ids=pb.TokenIds(ids=[70, 71]))).receipts[0]
    assert (receipt.at, receipt.removed, receipt.inserted, receipt.shift) == (10, 10, 2, -8)
    assert (receipt.kept, receipt.turned, receipt.to_compute) == (40, 40, 2)
    assert (receipt.exact_upto, receipt.influence_remains, list(receipt.held_elsewhere)) == (10, True, [])
    after = talk.server.pool()
    assert pool.in_use - after.in_use == receipt.freed == 10
    assert after.cached - pool.cached == 10  # kept for undo
    state = talk.state
    assert (state.num_pending, state.exact_upto) == (2, 10)
    report = talk.prefill()
    assert (report.computed, report.kept, report.turned, report.reason) == (2, 50, 40, Reason.REASON_EDIT)
    adds_up(report, 52)
    assert talk.state.exact_upto == 12  # R was computed over what is exact; what follows it was not


def test_an_r_of_equal_length_turns_nothing(talk: Talk) -> None:
    talk.prefill()
    receipt = talk.edit(span(10, 12, token_ids=pb.TokenIds(ids=[70, 71]))).receipts[0]
    assert (receipt.shift, receipt.kept, receipt.turned) == (0, 48, 0)
    assert talk.prefill().turned == 0


def test_shifts_that_cancel_out_turn_nothing_again(talk: Talk) -> None:
    talk.prefill()
    talk.edit(span(10, 12))
    assert talk.prefill().turned == 48
    talk.edit(span(15, 15, token_ids=pb.TokenIds(ids=[70, 71])))
    report = talk.prefill()
    assert report.turned == 5  # only what stands between the two edits is off its place
    adds_up(report, 60)


def test_several_directives_count_as_one_change(talk: Talk) -> None:
    talk.prefill()
    first, second = talk.edit(span(10, 12, text="1"), span(30, 35)).receipts
    assert (first.at, second.at) == (10, 29)
    assert (first.kept, second.kept) == (48 - 5, 25)
    assert (first.turned, second.turned) == (43, 25)
    assert first.to_compute == second.to_compute == 1
    assert first.freed + second.freed == 7
    assert [first.edit_id, second.edit_id] == ["e1.1", "e1.2"]


def test_a_forget_computes_what_follows_again(talk: Talk) -> None:
    talk.prefill()
    in_use = talk.server.pool().in_use
    receipt = talk.edit(span(10, 20, text="1", mode=pb.MODE_FORGET)).receipts[0]
    assert (receipt.kept, receipt.turned, receipt.to_compute, receipt.influence_remains) == (0, 0, 41, False)
    assert in_use - talk.server.pool().in_use == receipt.freed == 50
    before = rows(talk)
    report = talk.prefill()
    assert rows(talk) - before == report.computed == 41
    adds_up(report, 51)
    assert talk.state.exact_upto == 51


def test_forget_says_who_else_holds_it(talk: Talk) -> None:
    talk.prefill()
    child = talk.call(pb.ForkSessionRequest(request_id=f"fork-{talk.id}", session_id=talk.id)).session.session_id
    receipt = talk.edit(span(10, 20, mode=pb.MODE_FORGET)).receipts[0]
    assert list(receipt.held_elsewhere) == [child]
    assert receipt.freed == 0
    talk.call(pb.CloseSessionRequest(request_id=f"close-{child}", session_id=child))


def test_forget_by_edit_id_ends_the_influence(talk: Talk) -> None:
    talk.prefill()
    edit_id = talk.edit(span(10, 20)).receipts[0].edit_id
    talk.prefill()
    assert talk.state.exact_upto == 10
    receipt = talk.edit(pb.Directive(edit_id=edit_id, mode=pb.MODE_FORGET)).receipts[0]
    assert (receipt.removed, receipt.to_compute, receipt.at) == (0, 40, 10)
    talk.prefill()
    assert talk.state.exact_upto == 50


def test_undo_brings_the_kv_back(talk: Talk) -> None:
    talk.prefill()
    edit_id = talk.edit(span(10, 20, text="1")).receipts[0].edit_id
    before = rows(talk)
    talk.append(ids=[90])
    undone = talk.call(pb.UndoRequest(request_id=f"undo-{talk.id}", session_id=talk.id, edit_id=edit_id))
    assert (undone.restored, undone.restored_with_kv, undone.num_tokens, undone.version) == (10, 10, 61, 2)
    assert rows(talk) == before
    assert undone.exact_upto == 60  # everything stands as it was written
    report = talk.prefill()
    assert (report.computed, report.turned) == (1, 0)


def test_a_fork_computes_nothing(talk: Talk) -> None:
    talk.prefill()
    pool = talk.server.pool()
    fork = talk.call(pb.ForkSessionRequest(request_id=f"fork-{talk.id}", session_id=talk.id)).session
    after = talk.server.pool()
    assert (after.in_use, after.rows_computed) == (pool.in_use, pool.rows_computed)
    assert (fork.num_pending, fork.num_tokens) == (0, 60)
    talk.call(pb.CloseSessionRequest(request_id=f"close-{talk.id}", session_id=fork.session_id))
    assert talk.server.pool().in_use == pool.in_use
