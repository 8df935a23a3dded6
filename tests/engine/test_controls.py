"""Negatives of the oracle's tests: break one thing in how rows are moved, and the error is large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leyline_kernels import reference as kernels
from leyline_server.cache.slots import SlotTable
from leyline_server.edit.rows import Rows
from leyline_server.model.rotary_probe import RotaryProbe
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair

TOLERANCE = 1e-4
LARGE = 100 * TOLERANCE


def _error(model, reference, check=False) -> float:
    """The scenario: shifts of both signs, R computed with the next message."""
    pair = Pair(Rig(model, check=check), reference, random_ids(60))
    pair.prefill()
    pair.amortize((10, 18, random_ids(2, seed=1)), (40, 40, random_ids(11, seed=2)))
    pair.append(random_ids(5, seed=3))
    return pair.error(random_ids(3, seed=4))


def test_unbroken(loaded, unpatched, variant):
    assert _error(loaded(variant), unpatched(variant), check=True) < TOLERANCE


def test_rotation_off(loaded, unpatched, variant, monkeypatch):
    monkeypatch.setattr(Rows, "delta", lambda self, table: np.zeros(len(self), np.int32))
    assert _error(loaded(variant), unpatched(variant)) > LARGE


def test_the_other_layout(loaded, unpatched, variant):
    model = loaded(variant)
    other = {"interleaved": "halves", "halves": "interleaved"}[model.rotary.layout]
    broken = replace(model, rotary=RotaryProbe(other, model.rotary.inv_freq))
    assert _error(broken, unpatched(variant)) > LARGE


@pytest.mark.parametrize("variant", ["v2-moe-yarn", "v3-moe-yarn"])
def test_magnitude_applied_twice(loaded, unpatched, variant, monkeypatch):
    """YaRN's magnitude is in the stored key. Equal mscales would hide this."""
    magnitude = unpatched(variant).model.rotary_emb.attention_scaling
    assert abs(magnitude - 1) > 0.02
    turn = kernels.turn
    monkeypatch.setattr(kernels, "turn", lambda *args: turn(*args) * magnitude)
    assert _error(loaded(variant), unpatched(variant)) > LARGE


@pytest.mark.parametrize("off_by", [1, -1])
def test_a_shift_off_by_one(loaded, unpatched, variant, monkeypatch, off_by):
    allocate = SlotTable.allocate
    monkeypatch.setattr(SlotTable, "allocate", lambda table, positions: allocate(table, positions + off_by))
    assert _error(loaded(variant), unpatched(variant)) > LARGE


def test_frequencies_of_another_theta(loaded, unpatched, variant):
    model = loaded(variant)
    broken = replace(model, rotary=replace(model.rotary, inv_freq=model.rotary.inv_freq * 0.9))
    assert _error(broken, unpatched(variant)) > LARGE
