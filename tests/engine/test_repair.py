"""Repair: what is computed again behind an AMORTIZE's span, against the oracle of AMORTIZE and a fresh forward."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
import torch

from leyline_proto.repair import Repair
from leyline_server.engine.engine import EndReason
from leyline_server.lab.oracle import full_forward, second_latents
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, worst
from tests.engine.plain import failing

TOLERANCE = 5e-4  # an edit moves logits by hundreds of times that
LENGTH = 60
R = random_ids(40, seed=9)
EVERYTHING = Repair(share=1.0)


def amortize(pair: Pair, *cuts: Any, repair: Repair) -> Any:
    """In the engine alone: receipts."""
    return pair.rig.engine.splice(pair.sequence, [pair.rig.edit(*cut, repair=repair) for cut in cuts])


@pytest.mark.parametrize("first", [1, 7, 1000])
def test_the_first_behind_each_span(loaded, unpatched, variant, first):
    pair = Pair(Rig(loaded(variant), prefill_chunk=16), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    cuts = [(45, 50, R[:1]), (5, 9, R[1:8]), (30, 42, [])]
    receipts = amortize(pair, *cuts, repair=Repair(first=first))
    pair.oracle.amortize(*cuts)
    # Kept runs in the final list: behind [5, 9) -> 7 ids, behind [30, 42), behind [45, 50) -> 1 id.
    runs = [(12, 33), (33, 36), (37, 47)]
    for start, end in runs:
        pair.oracle.known[start : min(end, start + first)] = False
    assert [r.repaired for r in receipts] == [min(first, 10), min(first, 21), min(first, 3)]
    pair.append(random_ids(5, seed=3))
    assert receipts[0].to_compute + 5 == int((~pair.oracle.known).sum())
    assert pair.error(forced=random_ids(3, seed=4)) < TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_all_of_it_is_a_fresh_prefill(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    (receipt,) = amortize(pair, (20, 37, R[:4]), repair=EVERYTHING)
    assert (receipt.repaired, receipt.to_compute, receipt.kept, receipt.influence_remains) == (23, 27, 0, False)
    assert receipt.freed == 17 + 23
    got = pair.rig.logits(pair.sequence)
    ids = pair.rig.engine.ids(pair.sequence)
    assert worst(got, full_forward(unpatched(variant), ids[:-1])[-1:]) < TOLERANCE
    assert pair.rig.engine.exact_upto(pair.sequence) == len(ids) - 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("chunk", [64, 9])
def test_the_share_that_deviates_most(loaded, unpatched, variant, share, chunk):
    """Which rows those are, the plain model says: second-layer latents of the edited text against those stored."""
    pair = Pair(Rig(loaded(variant), prefill_chunk=chunk), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    (receipt,) = amortize(pair, (20, 37, R[:4]), repair=Repair(share=share))
    pair.oracle.amortize((20, 37, R[:4]))
    old, new = pair.oracle.c_kv[1, 24:], second_latents(unpatched(variant), pair.oracle.ids)[24:]
    deviation = (new - old).norm(dim=-1) / old.norm(dim=-1)
    most = deviation.topk(ceil(23 * share)).indices + 24
    assert (receipt.repaired, receipt.to_compute, receipt.kept) == (len(most), 4 + len(most), 23)
    pair.oracle.known[most] = False
    pair.append(random_ids(5, seed=3))
    assert pair.error(forced=random_ids(3, seed=4)) < TOLERANCE
    assert pair.row_error() < TOLERANCE
    pair.rig.close_all()


def test_the_dial_runs_from_amortize_to_a_fresh_prefill(loaded, unpatched, variant):
    """More repair is nearer to the fresh prefill, over several texts; none is AMORTIZE, bit for bit."""
    shares = [0.0, 0.3, 0.7, 1.0]
    errors = np.zeros(len(shares))
    for seed in range(4):
        for at, share in enumerate(shares):
            pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH, seed))
            pair.prefill()
            amortize(pair, (20, 37, R[:4]), repair=Repair(share=share))
            got = pair.rig.logits(pair.sequence)
            fresh = full_forward(unpatched(variant), pair.rig.engine.ids(pair.sequence)[:-1])[-1:]
            errors[at] += float((got - fresh).norm() / fresh.norm())
    assert errors[2] < 0.9 * errors[0]
    assert errors[3] < 1e-4
    plain = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    nothing = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    for one, more in ((plain, {}), (nothing, {"repair": Repair(first=0)})):
        one.prefill()
        one.rig.engine.splice(one.sequence, [one.rig.edit(20, 37, R[:4], **more)])
    assert torch.equal(plain.rig.logits(plain.sequence), nothing.rig.logits(nothing.sequence))


def test_what_is_chosen_does_not_depend_on_timing(loaded, unpatched):
    """Computed ahead of the next message or with it, after a cancel, or behind a second edit of the same call."""
    results = []
    for ahead in (False, True):
        pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
        pair.prefill()
        amortize(pair, (20, 37, R[:4]), repair=Repair(share=0.4))
        if ahead:
            pair.rig.prefill(pair.sequence)
        pair.append(random_ids(5, seed=3))
        if not ahead:
            run = pair.rig.generate(pair.sequence)
            run.request.cancel()
            pair.rig.run()
            assert run.end is EndReason.CANCELLED
        results.append(pair.rig.logits(pair.sequence))
    assert worst(*results) < TOLERANCE


def test_the_last_entry_is_chosen_from_whoever_asks_first(loaded, unpatched):
    """A Generate computes it anew in any case, which makes no room for another one."""
    chosen = 0
    for seed in range(12):
        results = []
        for ahead in (False, True):
            pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH, seed))
            pair.prefill()
            amortize(pair, (20, 37, R[:4]), repair=Repair(share=0.1))
            if ahead:
                before = pair.rig.slots(pair.sequence)[-1]
                pair.rig.prefill(pair.sequence)
                chosen += before != pair.rig.slots(pair.sequence)[-1]
            results.append(pair.rig.logits(pair.sequence))
        assert worst(*results) < TOLERANCE
    assert chosen, "no seed makes the last entry deviate most"


def test_the_report_counts_what_the_receipt_said(loaded, unpatched):
    pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    cuts = [(45, 50, R[:1]), (5, 9, R[1:8])]
    receipts = amortize(pair, *cuts, repair=Repair(share=0.25))
    assert [r.repaired for r in receipts] == [3, 9]
    assert receipts[0].to_compute == 8 + ceil((10 + 36) * 0.25)
    report = pair.rig.prefill(pair.sequence)
    assert report.computed == receipts[0].to_compute
    assert report.kept == LENGTH + 8 - 9 - report.computed
    assert pair.rig.prefill(pair.sequence).computed == 0, "nothing is in doubt any more"


def test_each_directive_has_its_own_share(loaded, unpatched):
    """Also of the same value, and where a later one reaches over an earlier one's: the larger share stays."""
    pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    cuts = [(start, start + 1, []) for start in (5, 8, 11, 14, 17, 20)]
    receipts = amortize(pair, *cuts, repair=Repair(share=0.1))
    assert [r.repaired for r in receipts] == [1, 1, 1, 1, 1, 4]
    assert {r.to_compute for r in receipts} == {9}
    (later,) = amortize(pair, (30, 31, []), repair=Repair(share=0.05))
    assert (later.repaired, later.to_compute) == (0, 9)
    (more,) = amortize(pair, (40, 40, R[:1]), repair=Repair(share=0.5))
    rows = pair.rig.engine.sequences[pair.sequence].rows
    assert more.to_compute == 1 + rows.num_to_repair == 1 + 5 + ceil(0.1 * 25) + ceil(0.5 * 13)
    assert more.repaired == rows.num_to_repair - 9
    assert pair.rig.prefill(pair.sequence).computed == more.to_compute


def test_what_an_undo_makes_exact_again_is_not_repaired(loaded, unpatched):
    pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    edit = pair.rig.edit(20, 37, R[:4], repair=Repair(share=0.5))
    pair.rig.engine.splice(pair.sequence, [edit])
    pair.rig.engine.undo(pair.sequence, edit.edit_id, 20, 4)
    assert pair.rig.engine.exact_upto(pair.sequence) == LENGTH
    assert pair.rig.prefill(pair.sequence).computed == 0


def test_a_fork_and_its_origin_repair_each_their_own(loaded, unpatched):
    """Rows are shared and never written: the origin, without an edit, answers as before."""
    pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    engine = pair.rig.engine
    edited = engine.fork(pair.sequence)
    engine.splice(edited, [pair.rig.edit(20, 37, R[:4], repair=Repair(share=0.4))])
    twin = engine.fork(edited)
    first, second = pair.rig.logits(edited), pair.rig.logits(twin)
    assert worst(first, second) < TOLERANCE
    assert pair.error() < TOLERANCE
    pair.rig.close_all()


def test_both_run_at_once_in_a_pool_that_just_holds_them(loaded, unpatched):
    """A repair of rows that a running request holds needs slots of its own: it waits for them, and is never refused."""
    rig = Rig(loaded("v2-moe-yarn"), num_slots=72)
    pair = Pair(rig, unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    twin = rig.engine.fork(pair.sequence)
    for sequence in (pair.sequence, twin):
        rig.engine.splice(sequence, [rig.edit(10, 12, R[:2], repair=Repair(share=0.2))])
    runs = [rig.generate(sequence, 2) for sequence in (pair.sequence, twin)]
    rig.run()
    assert [run.end for run in runs] == [EndReason.LENGTH] * 2
    assert worst(runs[0].logits, runs[1].logits) < TOLERANCE


def test_a_text_that_fills_the_pool_can_be_repaired(loaded, unpatched):
    rig = Rig(loaded("v2-moe-yarn"), num_slots=LENGTH)
    pair = Pair(rig, unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    amortize(pair, (20, 24, R[:4]), repair=Repair(share=0.5))
    report = rig.prefill(pair.sequence)
    assert report.computed == 4 + 18
    rig.close_all()


def test_a_model_that_fails_while_it_measures_changes_nothing(loaded, unpatched):
    model = loaded("v2-moe-yarn")
    pair = Pair(Rig(model), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    amortize(pair, (20, 37, R[:4]), repair=Repair(share=0.4))
    before = pair.rig.engine.sequences[pair.sequence].rows, pair.rig.engine.stats().in_use
    with failing(model.model.model.layers[0].mlp, 1):
        run = pair.rig.compute(pair.sequence)
        pair.rig.run()
    assert run.end is EndReason.FAILED
    rows = pair.rig.engine.sequences[pair.sequence].rows
    assert np.array_equal(rows.slots, before[0].slots)
    assert pair.rig.engine.stats().in_use == before[1]
    assert pair.rig.prefill(pair.sequence).computed == 4 + ceil(23 * 0.4)
    pair.rig.close_all()


def test_a_rollback_brings_doubt_back_and_an_eviction_ends_it(loaded, unpatched):
    rig = Rig(loaded("v2-moe-yarn"), num_slots=100)
    pair = Pair(rig, unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    amortize(pair, (20, 37, R[:4]), repair=Repair(share=0.4))
    engine = rig.engine
    checkpoint = engine.checkpoint(pair.sequence)
    rig.prefill(pair.sequence)
    engine.rollback(pair.sequence, checkpoint)
    assert engine.sequences[pair.sequence].rows.num_to_repair == 10
    other = rig.open(random_ids(95, seed=5))
    rig.prefill(other)
    engine.close(other)
    assert engine.sequences[pair.sequence].rows.num_to_repair == 0, "it has no rows left to doubt"
    got = rig.logits(pair.sequence)
    ids = engine.ids(pair.sequence)
    assert worst(got, full_forward(unpatched("v2-moe-yarn"), ids[:-1])[-1:]) < TOLERANCE


def test_undo_brings_the_span_back_and_leaves_what_was_computed(loaded, unpatched):
    pair = Pair(Rig(loaded("v2-moe-yarn")), unpatched("v2-moe-yarn"), random_ids(LENGTH))
    pair.prefill()
    copied = pair.oracle.copy(20, 37)
    edit = pair.rig.edit(20, 37, R[:4], repair=Repair(first=6))
    pair.rig.engine.splice(pair.sequence, [edit])
    pair.oracle.amortize((20, 37, R[:4]))
    pair.oracle.known[24:30] = False
    pair.prefill()
    pair.rig.engine.undo(pair.sequence, edit.edit_id, 20, 4)
    pair.oracle.restore(copied, 20, 24)
    assert pair.error(forced=random_ids(3, seed=4)) < TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_a_model_of_one_layer_has_no_deviations(loaded):
    rig = Rig(loaded("v2-moe-yarn", layers=1))
    assert "second" in rig.engine.repair_share_refused
    assert Rig(loaded("v2-moe-yarn")).engine.repair_share_refused == ""
