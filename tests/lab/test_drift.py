"""Chained edits: the engine's keys err as little after many as after one, those of an eager engine ever more."""

from __future__ import annotations

import pytest
import torch

from leyline_server.edit.rows import Rows
from leyline_server.lab.drift import FORCED, EditedSession, drift, exact_keys
from leyline_server.lab.laboratory import LabError
from leyline_server.lab.oracle import turn
from leyline_server.lab.plots import draw_drift
from tests.engine.harness import random_ids

IDS = random_ids(160, seed=5)
FP32 = 2e-6  # relative error of fp32 turning by up to some 20 positions
ERROR, KL = "error of keys", "KL of logits"


@pytest.fixture(scope="module", params=["v2-moe-yarn", "v3-noqlora-dense"])
def lab(request, lab_of):
    return lab_of(request.param)


def values(figures):
    assert len({(f.case, f.arm, f.metric) for f in figures}) == len(figures)
    return {(f.case, f.arm, f.metric): f.value for f in figures}


def test_only_what_is_stored_again_drifts(lab):
    found = values(drift(lab, IDS, (1, 10, 100)))
    for case in ("1 edit", "10 edits", "100 edits"):
        assert found[case, "rounded once", ERROR] < 1e-7
        assert found[case, "leyline", ERROR] < FP32
        assert found[case, "leyline", KL] < 1e-8
        assert found[case, "eager, bf16", KL] > 100 * found[case, "leyline", KL]
    # Each edit rounds once more, at random: the errors add up as their squares do.
    first, tenth, last = (found[case, "eager, bf16", ERROR] for case in ("1 edit", "10 edits", "100 edits"))
    assert 1e-3 < first < 3e-3
    assert 1.5 * first < tenth < 3.2 * first
    assert 2 * tenth < last < 4 * tenth
    assert found["1 edit", "eager, fp32", ERROR] < found["100 edits", "eager, fp32", ERROR] < 1e-3 * last
    assert found["100 edits", "eager, bf16", KL] > 3 * found["1 edit", "eager, bf16", KL]


def test_nothing_is_left_behind(lab):
    drift(lab, IDS, (1, 3))
    lab.engine.check_integrity()
    stats = lab.engine.stats()
    assert (stats.free, stats.in_use, stats.cached) == (stats.num_slots, 0, 0)


def test_a_seed_gives_the_same_figures(lab):
    assert drift(lab, IDS, (2,), seed=3) == drift(lab, IDS, (2,), seed=3)
    assert drift(lab, IDS, (2,), seed=3) != drift(lab, IDS, (2,), seed=4)


def test_a_shift_off_by_one_shows(lab, monkeypatch):
    right = values(drift(lab, IDS, (5,)))
    honest = Rows.delta
    monkeypatch.setattr(Rows, "delta", lambda rows, table: (delta := honest(rows, table)) + (delta != 0))
    wrong = values(drift(lab, IDS, (5,)))
    assert wrong["5 edits", "leyline", ERROR] > 0.1
    assert wrong["5 edits", "leyline", KL] > 1e-3
    assert wrong["5 edits", "leyline", KL] > 1e4 * right["5 edits", "leyline", KL]
    assert wrong["5 edits", "eager, bf16", ERROR] == right["5 edits", "eager, bf16", ERROR]


def test_edits_move_the_tail_and_leave_its_stored_keys_alone(lab):
    with lab.bench():
        session = EditedSession(lab, IDS[:-FORCED], seed=0)
        tail = IDS[session.tail_at : -FORCED]
        slots = session.rows.slots[session.tail_at :].copy()
        shifts = set()
        for _ in range(50):
            before = session.tail_at
            by = session.edit()
            assert session.tail_at == before + by
            assert session.rows.ids[session.tail_at :].tolist() == tail
            shifts.add(session.shift)
        assert 0 not in shifts
        assert min(shifts) < 0 < max(shifts)
        assert (session.rows.slots[session.tail_at :] == slots).all()
        stored = lab.engine.cache.pool.k_pe[:, torch.from_numpy(slots).long()]
        assert torch.equal(stored, session.computed)
        lab.prefill(session.sequence)
        exact = exact_keys(lab, session.rows)[:, session.tail_at :]
        assert torch.equal(exact, turn(lab.model.model, session.computed.double(), session.shift))


def test_in_bf16_the_engine_errs_by_one_rounding(lab_of):
    found = values(drift(lab_of("v2-qlora-dense", torch.bfloat16), IDS, (1, 100)))
    for case in ("1 edit", "100 edits"):
        assert found[case, "leyline", ERROR] == pytest.approx(found[case, "rounded once", ERROR], rel=0.02)
    # What was stored in bf16 is rounded once by the first edit, as it is when attention reads it.
    assert found["1 edit", "eager, bf16", ERROR] == pytest.approx(found["1 edit", "leyline", ERROR], rel=0.02)
    assert found["100 edits", "eager, bf16", ERROR] > 5 * found["100 edits", "leyline", ERROR]
    assert found["100 edits", "eager, fp32", ERROR] < 1e-5


def test_bounds_are_named(lab, lab_of):
    with pytest.raises(ValueError, match="100 tokens is too short: at least 128"):
        drift(lab, IDS[:100])
    small = lab_of("v2-qlora-dense", num_slots=200)
    with pytest.raises(LabError, match="pool is too small"):
        drift(small, IDS, (1,))
    small.engine.check_integrity()


def test_the_picture_is_drawn_from_figures_alone(lab, tmp_path):
    pytest.importorskip("matplotlib")
    figures = drift(lab, IDS, (1, 4))
    draw_drift(tmp_path / "drift.png", figures)
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no figure of drift"):
        draw_drift(tmp_path / "none.png", [])
