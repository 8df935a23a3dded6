"""What is exact is shared and restored; what is not never answers another session's request."""

from __future__ import annotations

import pytest
import torch

from leyline_server.engine.engine import MissReason
from leyline_server.lab.oracle import full_forward
from tests.engine.harness import NAMESPACE, Rig, random_ids
from tests.engine.pairs import Pair, worst

TOLERANCE = 1e-4
TEXT, R = random_ids(60), random_ids(30, seed=9)


def _amortized(rig, start=20, end=30, ids=R[:3]):
    """A session with text, an AMORTIZE, a message behind it and one generated token."""
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    edit = rig.edit(start, end, ids)
    rig.engine.splice(sequence, [edit])
    rig.engine.append(sequence, R[10:15])
    rig.logits(sequence)
    return sequence, edit


def test_an_amortized_tail_answers_no_other_session_and_its_exact_front_does(rig, reference):
    sequence, _ = _amortized(rig)
    assert rig.engine.exact_upto(sequence) == 23, "R was computed over an exact front"
    ids = rig.engine.ids(sequence)
    other = rig.open(ids)
    run = rig.generate(other)
    rig.run()
    assert run.report.prefix_hit == 23
    assert worst(run.logits, full_forward(reference, ids)[-1:]) < TOLERANCE
    # Now that an honest computation of the same text was published, it is hit to the last token but one.
    assert rig.prefill(rig.open(ids)).prefix_hit == len(ids) - 1
    # And the AMORTIZEd session still has its own rows.
    assert worst(rig.logits(sequence), full_forward(reference, ids)[-1:]) > 100 * TOLERANCE


def test_an_honest_copy_in_the_tree_does_not_change_an_edited_session(loaded, unpatched, variant):
    """Hits fill R and stop there: rows behind kept, inexact ones are computed over them, whoever was there before."""
    results = []
    for published in (False, True):
        pair = Pair(Rig(loaded(variant)), unpatched(variant), TEXT)
        pair.prefill()
        pair.amortize((20, 30, R[:3]))
        pair.append(R[10:15])
        if published:
            assert pair.rig.prefill(pair.rig.open(pair.oracle.ids)).prefix_hit == 20
        run = pair.rig.generate(pair.sequence)
        pair.rig.run()
        assert run.report.prefix_hit == (3 if published else 0)
        assert worst(run.logits, pair.oracle.logits()) < TOLERANCE
        results.append(run.logits)
    assert worst(*results) < TOLERANCE


def test_another_namespace_misses_and_the_same_one_hits(rig):
    rig.prefill(rig.open(TEXT))
    other_tenant, other_model = ("other", NAMESPACE[1]), (NAMESPACE[0], "other")
    assert rig.prefill(rig.open(TEXT, namespace=other_tenant)).prefix_hit == 0
    assert rig.prefill(rig.open(TEXT, namespace=other_model)).prefix_hit == 0
    assert rig.prefill(rig.open(TEXT)).prefix_hit == 59
    assert rig.prefill(rig.open(TEXT, namespace=other_tenant)).prefix_hit == 59


def test_undo_restores_exactness(loaded, unpatched, variant):
    rig = Rig(loaded(variant))
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    edits = [rig.edit(20, 30, R[:3]), rig.edit(40, 41, R[3:9])]
    rig.engine.splice(sequence, edits)
    assert rig.engine.exact_upto(sequence) == 20
    rig.prefill(sequence)
    assert rig.engine.exact_upto(sequence) == 23
    rig.engine.undo(sequence, edits[1].edit_id, at=33, inserted=6)
    restored = rig.engine.undo(sequence, edits[0].edit_id, at=20, inserted=3)
    assert (restored.restored, restored.with_kv) == (10, 10)
    assert rig.engine.ids(sequence) == TEXT
    assert rig.engine.exact_upto(sequence) == 60
    assert worst(rig.logits(sequence), full_forward(unpatched(variant), TEXT)[-1:]) < TOLERANCE


def test_undo_keeps_what_was_appended_since_and_moves_it(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant)), unpatched(variant), TEXT)
    pair.prefill()
    edit = pair.rig.edit(20, 30, R[:3])
    pair.rig.engine.splice(pair.sequence, [edit])
    kept = pair.oracle.copy(20, 30)
    pair.oracle.amortize((20, 30, R[:3]))
    pair.append(R[10:15])
    assert pair.error() < TOLERANCE
    pair.rig.engine.undo(pair.sequence, edit.edit_id, at=20, inserted=3)
    pair.oracle.restore(kept, 20, 23)
    assert pair.rig.engine.ids(pair.sequence)[:60] == TEXT
    assert pair.rig.engine.exact_upto(pair.sequence) == 60
    assert pair.error() < TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_undo_after_the_kept_rows_were_evicted(loaded, unpatched):
    rig = Rig(loaded("v3-moe-yarn"), num_slots=70)
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    edit = rig.edit(20, 30, R[:3])
    rig.engine.splice(sequence, [edit])
    rig.logits(sequence)
    rig.engine.append(sequence, R[:16])
    rig.prefill(sequence)
    assert rig.engine.stats().cached == 0, "the kept rows gave way"
    restored = rig.engine.undo(sequence, edit.edit_id, at=20, inserted=3)
    assert (restored.restored, restored.with_kv) == (10, 0)
    rig.engine.truncate(sequence, 60)
    assert rig.engine.ids(sequence) == TEXT
    assert rig.engine.num_pending(sequence) == 10
    assert worst(rig.logits(sequence), full_forward(unpatched("v3-moe-yarn"), TEXT)[-1:]) < TOLERANCE


def test_a_fork_shares_slots_and_goes_its_own_way(rig, reference):
    sequence, edit = _amortized(rig)
    before = rig.engine.stats().in_use
    fork = rig.engine.fork(sequence)
    assert rig.engine.stats().in_use == before
    want = rig.logits(rig.engine.fork(sequence))
    rig.engine.splice(sequence, [rig.edit(5, 9, forget=True)])
    rig.logits(sequence)
    assert worst(rig.logits(fork), want) < TOLERANCE
    rig.engine.undo(fork, edit.edit_id, at=20, inserted=3)
    assert rig.engine.ids(fork)[:60] == TEXT
    assert rig.engine.exact_upto(fork) == 60
    rig.engine.truncate(fork, 60)
    assert worst(rig.logits(fork), full_forward(reference, TEXT)[-1:]) < TOLERANCE
    rig.close_all()


def test_an_evicted_session_becomes_what_forget_would_have_made_it(loaded, unpatched, variant):
    rig = Rig(loaded(variant), num_slots=100)
    sequence, _ = _amortized(rig)
    ids = rig.engine.ids(sequence)
    fresh = full_forward(unpatched(variant), ids)[-1:]
    big = rig.open(random_ids(90, seed=5))
    rig.prefill(big)
    assert rig.engine.num_pending(sequence) == len(ids)
    rig.engine.close(big)
    run = rig.generate(sequence)
    rig.run()
    assert run.report.reason is MissReason.EVICTED
    assert run.report.turned == 0
    assert worst(run.logits, fresh) < TOLERANCE
    again = rig.generate(sequence)
    rig.run()
    assert again.report.reason is not MissReason.EVICTED


def test_reasons(rig):
    sequence = rig.open(TEXT)
    assert rig.prefill(sequence).reason is MissReason.COLD
    rig.engine.append(sequence, R[:3])
    report = rig.prefill(sequence)
    assert (report.reason, report.kept, report.computed, report.first_divergence) == (MissReason.APPEND, 60, 3, 60)
    rig.engine.splice(sequence, [rig.edit(20, 30, R[:4])])
    report = rig.prefill(sequence)
    assert (report.reason, report.kept, report.turned, report.computed) == (MissReason.EDIT, 53, 33, 4)
    assert report.first_divergence == 20


@pytest.mark.parametrize("forget", [False, True])
def test_a_dry_run_says_what_would_happen_and_does_nothing(rig, forget):
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    rig.engine.fork(sequence)
    before, slots = rig.engine.stats(), rig.slots(sequence)
    edits = [rig.edit(40, 45, R[:1]), rig.edit(20, 30, R[1:4], forget=forget)]
    dry = rig.engine.splice(sequence, edits, dry_run=True)
    assert (rig.engine.ids(sequence), rig.slots(sequence).tolist()) == (TEXT, slots.tolist())
    assert rig.engine.stats() == before
    assert rig.engine.splice(sequence, edits) == dry


def test_receipts_count_what_happened(rig):
    sequence = rig.open(TEXT)
    rig.prefill(sequence)
    before = rig.engine.stats().in_use
    late, early = rig.engine.splice(sequence, [rig.edit(40, 45, R[:1]), rig.edit(20, 30, R[1:4])])
    assert (early.at, early.removed, early.inserted, early.kept, early.turned) == (20, 10, 3, 25, 25)
    assert (late.at, late.removed, late.inserted, late.kept, late.turned) == (33, 5, 1, 15, 15)
    assert early.to_compute == late.to_compute == 4
    assert early.exact_upto == late.exact_upto == 20
    assert early.influence_remains
    assert late.influence_remains
    assert early.freed + late.freed == before - rig.engine.stats().in_use == 15


def test_nothing_is_computed_unasked(rig):
    """The result of an edit never depends on timing: idle steps compute nothing."""
    sequence = rig.open(TEXT)
    for _ in range(3):
        assert not rig.step()
    rig.prefill(sequence)
    rig.engine.splice(sequence, [rig.edit(20, 30, R[:3])])
    computed = rig.engine.stats().rows_computed
    for _ in range(3):
        assert not rig.step()
    assert (rig.engine.stats().rows_computed, rig.engine.num_pending(sequence)) == (computed, 3)


def test_generate_computes_the_last_token_against_the_list_as_it_is(rig, reference):
    pair = Pair(rig, reference, TEXT)
    pair.prefill()
    stale = rig.logits(rig.engine.fork(pair.sequence))
    pair.amortize((20, 30, R[:3]))
    pair.prefill()
    run = rig.generate(pair.sequence)
    rig.run()
    assert (run.report.kept, run.report.computed) == (52, 1)
    assert worst(run.logits, pair.oracle.logits()) < TOLERANCE
    assert worst(run.logits, stale) > 100 * TOLERANCE


def test_idle_and_loaded_engine_give_the_same_logits(loaded, variant):
    """The same operations: alone in one chunk, and in small chunks beside four others."""
    results = []
    for load in (0, 4):
        rig = Rig(loaded(variant), num_slots=1024, prefill_chunk=11 if load else 512)
        noise = [rig.open(random_ids(40, seed=20 + i)) for i in range(load)]

        def logits(sequence, forced, rig=rig, noise=noise):
            for other in noise:
                if rig.engine.sequences[other].request is None:
                    rig.engine.splice(other, [rig.edit(5, 9, R[:2])])
                    rig.generate(other, 9)
            run = rig.generate(sequence, len(forced), forced)
            while run.end is None:
                rig.step()
            return run.logits

        sequence = rig.open(TEXT)
        got = [logits(sequence, R[:4])]
        rig.engine.splice(sequence, [rig.edit(20, 30, R[:3]), rig.edit(44, 44, R[5:12])])
        got.append(logits(sequence, R[4:8]))
        rig.engine.splice(sequence, [rig.edit(30, 33, forget=True)])
        got.append(logits(sequence, R[8:12]))
        results.append(torch.cat(got))
    assert worst(*results) < TOLERANCE


def test_rollback_to_a_checkpoint(rig, reference):
    sequence, older = _amortized(rig)
    ids, slots, exact = rig.engine.ids(sequence), rig.slots(sequence), rig.engine.exact_upto(sequence)
    want = rig.logits(rig.engine.fork(sequence))
    for edit in (rig.edit(5, 9, R[:2]), rig.edit(20, 23, forget=True, forgotten=(older.edit_id,))):
        checkpoint = rig.engine.checkpoint(sequence)
        rig.engine.splice(sequence, [edit])
        rig.engine.append(sequence, R[:3])
        rig.engine.rollback(sequence, checkpoint)
        rig.engine.check_integrity()
        assert rig.engine.ids(sequence) == ids
        assert rig.slots(sequence).tolist() == slots.tolist()
        assert rig.engine.exact_upto(sequence) == exact
        assert worst(rig.logits(rig.engine.fork(sequence)), want) < TOLERANCE
    checkpoint = rig.engine.checkpoint(sequence)
    rig.engine.discard(checkpoint)
    rig.engine.undo(sequence, older.edit_id, at=20, inserted=3)
    assert rig.engine.ids(sequence)[:60] == TEXT
    rig.close_all()
