"""FORGET: what follows equals Hugging Face's forward of the edited text, and nothing of the span is left."""

from __future__ import annotations

import pytest
import torch

from leyline_server.lab.oracle import full_forward
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, worst

TOLERANCE = 1e-4
TEXT, R = random_ids(60), random_ids(30, seed=9)


def _fresh(reference, rig, sequence):
    return full_forward(reference, rig.engine.ids(sequence)[:-1])[-1:]


@pytest.mark.parametrize(
    ("start", "end", "ids"), [(0, 9, []), (20, 37, R[:3]), (20, 20, R[:7]), (50, 60, R[:2]), (0, 60, R)]
)
def test_equals_a_fresh_forward(loaded, unpatched, variant, start, end, ids):
    rig = Rig(loaded(variant), prefill_chunk=16)
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    (receipt,) = rig.engine.splice(sequence, [rig.edit(start, end, ids, forget=True)])
    assert (receipt.removed, receipt.inserted, receipt.kept) == (end - start, len(ids), 0)
    assert receipt.exact_upto == start
    assert not receipt.influence_remains
    rig.engine.append(sequence, R[:4])
    got = rig.logits(sequence)
    assert worst(got, _fresh(unpatched(variant), rig, sequence)) < TOLERANCE
    assert rig.engine.exact_upto(sequence) == rig.engine.length(sequence) - 1


def test_rows_equal_a_fresh_prefill(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant)), unpatched(variant), TEXT)
    pair.prefill()
    pair.forget(20, 37, R[:3])
    assert pair.error() < TOLERANCE
    fresh = Pair(Rig(loaded(variant)), unpatched(variant), pair.oracle.ids[:-1])
    fresh.oracle.compute()
    pair.oracle, length = fresh.oracle, len(pair.oracle.ids) - 1
    pair.rig.engine.truncate(pair.sequence, length)
    assert pair.row_error() < TOLERANCE


def test_behind_an_older_amortize_it_does_not_undo_that(loaded, unpatched, variant):
    """The oracle's FORGET: later rows are computed anew over an AMORTIZEd front that stays as it is."""
    pair = Pair(Rig(loaded(variant)), unpatched(variant), TEXT)
    pair.prefill()
    pair.amortize((10, 15, R[:1]))
    pair.forget(30, 36, R[1:3])
    assert pair.error() < TOLERANCE
    got = pair.rig.logits(pair.sequence)
    assert worst(got, _fresh(unpatched(variant), pair.rig, pair.sequence)) > 100 * TOLERANCE


def test_by_edit_id_after_earlier_amortizes(loaded, unpatched, variant):
    """`forgotten` names the edit, the start is where its span stood: all after it is exact again."""
    rig = Rig(loaded(variant))
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    first, second = rig.edit(30, 36, R[:2]), rig.edit(12, 20, R[2:5])
    rig.engine.splice(sequence, [first])
    rig.logits(sequence)
    rig.engine.splice(sequence, [second])
    rig.logits(sequence)
    wrong = rig.logits(rig.engine.fork(sequence))
    ids = rig.engine.ids(sequence)
    edits = [rig.edit(15, 15, forget=True, forgotten=(second.edit_id,), stale=(first.edit_id,))]
    (receipt,) = rig.engine.splice(sequence, edits)
    assert receipt.exact_upto == 15
    assert receipt.to_compute == len(ids) - 15
    assert rig.engine.ids(sequence) == ids, "the text stays"
    got = rig.logits(sequence)
    want = _fresh(unpatched(variant), rig, sequence)
    assert worst(got, want) < TOLERANCE
    assert worst(wrong, want) > 100 * TOLERANCE
    kept = rig.engine.cache.kept
    assert not kept.has((sequence, second.edit_id))
    assert (kept.get((sequence, first.edit_id))[1] == -1).all(), "its rows were computed from the forgotten text"


def test_slots_are_zeroed_with_the_last_reference(rig):
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    slots = rig.slots(sequence)
    (receipt,) = rig.engine.splice(sequence, [rig.edit(20, 30, R[:2], forget=True)])
    assert receipt.freed == 40
    _assert_zero(rig, slots[20:])
    _assert_zero(rig, slots[:20], zero=False)
    assert rig.engine.stats().cached == 0, "the tree holds nothing but the front, which the session holds too"


def test_a_fork_keeps_what_it_holds_and_is_named(rig, reference):
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    fork = rig.engine.fork(sequence)
    other = rig.open(TEXT[:25] + R)
    rig.prefill(other)
    stranger = rig.open(TEXT, namespace=("someone else", "digest"))
    rig.prefill(stranger)
    slots = rig.slots(sequence)
    (receipt,) = rig.engine.splice(sequence, [rig.edit(20, 30, (), forget=True)])
    assert receipt.held_elsewhere == (fork, other)
    assert receipt.freed == 0
    _assert_zero(rig, slots, zero=False)
    assert worst(rig.logits(fork), full_forward(reference, TEXT)[-1:]) < TOLERANCE
    rig.engine.close(fork)  # it has published its text again, as it may
    rig.engine.close(other)
    _assert_zero(rig, slots[:-1], zero=False)
    rig.engine.cache.clear_caches()
    _assert_zero(rig, slots[20:])
    _assert_zero(rig, slots[:20], zero=False)


def test_the_tree_loses_the_span_and_keeps_the_front(rig):
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    hits = {}
    for name in ("before", "after"):
        if name == "after":
            rig.engine.splice(sequence, [rig.edit(20, 30, (), forget=True)])
        other = rig.open(TEXT)
        hits[name] = rig.prefill(other).prefix_hit
        rig.engine.close(other)
        rig.engine.splice(sequence, [])
    assert hits == {"before": 59, "after": 20}


def test_the_tree_loses_what_an_evicted_session_published(loaded):
    """The session's own rows fell back to pending; the tree still has its text."""
    rig = Rig(loaded("v2-qlora-dense"), num_slots=100)
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    big = rig.open(random_ids(60, seed=5), namespace=("someone else", "digest"))
    rig.prefill(big)
    assert rig.engine.num_pending(sequence) == 60
    assert rig.engine.stats().cached > 30
    rig.engine.splice(sequence, [rig.edit(20, 30, (), forget=True)])
    assert rig.prefill(rig.open(TEXT)).prefix_hit == 20


def test_the_tree_loses_what_was_published_before_an_earlier_edit_and_an_eviction(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=120)
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    rig.engine.splice(sequence, [rig.edit(5, 8)])
    other = rig.open(TEXT)
    assert rig.prefill(other).prefix_hit == 59
    rig.prefill(rig.open(random_ids(60, seed=5), namespace=("someone else", "digest")))
    assert rig.engine.num_pending(sequence) == 57
    assert rig.prefill(rig.open(TEXT)).prefix_hit == 59
    (receipt,) = rig.engine.splice(sequence, [rig.edit(17, 27, (), forget=True)])
    assert receipt.held_elsewhere, "by the text: these sessions computed it again"
    assert rig.prefill(rig.open(TEXT)).prefix_hit <= 20


def test_rows_kept_for_undo_go_too(rig):
    """A FORGET in the same call as an AMORTIZE behind it: what that keeps was computed from the forgotten span."""
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    slots = rig.slots(sequence)
    older = rig.edit(40, 45, R[:1])
    rig.engine.splice(sequence, [older])
    newer = rig.edit(46, 50, R[:1])
    edits = [rig.edit(20, 30, (), forget=True, stale=(older.edit_id, newer.edit_id)), newer]
    rig.engine.splice(sequence, edits)
    _assert_zero(rig, slots[20:])
    restored = rig.engine.undo(sequence, newer.edit_id, at=36, inserted=1)
    assert (restored.restored, restored.with_kv) == (4, 0)


def test_chained_with_amortize_it_still_equals_the_oracle(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant), prefill_chunk=16), unpatched(variant), TEXT)
    pair.prefill()
    for i in range(8):
        pair.amortize((30 + i, 33 + i, R[i : i + 5]))
        pair.forget(40 - i, 42 - i, R[i : i + 1])
        pair.append(R[:2])
        assert pair.error() < TOLERANCE
    assert pair.row_error() < TOLERANCE


def _assert_zero(rig, slots, zero=True):
    index = torch.as_tensor(slots).long()
    pool = rig.engine.cache.pool
    assert ((pool.c_kv[:, index] == 0).all() and (pool.k_pe[:, index] == 0).all()) == zero
    if not zero:
        assert (pool.c_kv[:, index] != 0).any(-1).all()
