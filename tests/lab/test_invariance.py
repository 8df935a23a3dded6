"""Rows of the same token at two places, told from rows of other tokens."""

from __future__ import annotations

import pytest

from leyline_server.lab.invariance import ARMS, invariance
from leyline_server.lab.plots import draw_invariance
from tests.engine.harness import random_ids

C_KV, STORED, TURNED = ARMS
TEXTS = [random_ids(40, seed=seed) for seed in range(4)]
CONTEXTS = [random_ids(7, seed=8), random_ids(61, seed=9)]


@pytest.fixture(scope="module", params=["v2-moe-yarn", "v3-noqlora-dense"])
def lab(request, lab_of):
    return lab_of(request.param)


def values(figures):
    assert len({(f.case, f.arm) for f in figures}) == len(figures)
    return {(f.case, f.arm): f.value for f in figures}


def test_first_layer_rows_are_their_tokens_once_keys_are_turned(lab):
    found = values(invariance(lab, TEXTS, CONTEXTS))
    assert found["layer 0", C_KV] == 1
    assert found["layer 0", TURNED] == 1
    assert found["layer 0", STORED] < 0.95
    assert found["all layers", STORED] < found["all layers", TURNED]
    for layer in (1, 2):
        assert 0.5 < found[f"layer {layer}", C_KV] <= 1


def test_at_one_place_in_one_context_all_is_told(lab):
    for figure in invariance(lab, TEXTS, [CONTEXTS[0], CONTEXTS[0]]):
        assert (figure.value, figure.low, figure.high) == (1, 1, 1), figure


def test_another_context_of_the_same_length_leaves_keys_of_layer_0_as_they_are(lab):
    """Nothing is to be turned: what is told apart is context alone."""
    found = values(invariance(lab, TEXTS, [CONTEXTS[0], random_ids(7, seed=21)]))
    assert found["layer 0", STORED] == found["layer 0", TURNED] == found["layer 0", C_KV] == 1
    assert found["layer 2", STORED] == pytest.approx(found["layer 2", TURNED], abs=0.1)


def test_a_key_turned_by_too_little_is_told_less_well(lab, monkeypatch):
    from leyline_server.lab import invariance as module

    honest = module.turn
    monkeypatch.setattr(module, "turn", lambda k_pe, by, *how: honest(k_pe, by // 2, *how))
    assert values(invariance(lab, TEXTS, CONTEXTS))["layer 0", TURNED] < 0.99


def test_figures_count_pairs_and_cover_layers(lab):
    figures = invariance(lab, TEXTS, [*CONTEXTS, random_ids(30, seed=10)])
    per_layer = 2 * 3 * sum(map(len, TEXTS))  # of both kinds, three pairs of places
    assert {(f.case, f.n) for f in figures} == {
        ("all layers", 3 * per_layer),
        *((f"layer {layer}", per_layer) for layer in range(3)),
    }
    assert all(f.low <= f.value <= f.high for f in figures)
    assert figures == invariance(lab, TEXTS, [*CONTEXTS, random_ids(30, seed=10)])
    lab.engine.check_integrity()
    stats = lab.engine.stats()
    assert (stats.free, stats.in_use, stats.cached) == (stats.num_slots, 0, 0)


def test_bounds_are_named(lab):
    with pytest.raises(ValueError, match="1 contexts"):
        invariance(lab, TEXTS, CONTEXTS[:1])
    for texts in ([], [[5, 5, 5]]):
        with pytest.raises(ValueError, match="two different tokens"):
            invariance(lab, texts, CONTEXTS)


def test_the_picture_is_drawn_from_figures_alone(lab, tmp_path):
    pytest.importorskip("matplotlib")
    draw_invariance(tmp_path / "invariance.png", invariance(lab, TEXTS, CONTEXTS))
    assert (tmp_path / "invariance.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no figure of invariance"):
        draw_invariance(tmp_path / "none.png", [])
