"""AMORTIZE against its oracle: Hugging Face's model over a `DynamicCache` edited in plain torch."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from leyline_server.lab.oracle import full_forward, turn
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, worst

TOLERANCE = 1e-4
LENGTH = 60
R = random_ids(40, seed=9)

CUTS = {
    "insert first": [(0, 0, R[:5])],
    "insert middle": [(20, 20, R[:5])],
    "insert last": [(LENGTH, LENGTH, R[:5])],
    "delete first": [(0, 9, [])],
    "delete middle": [(20, 37, [])],
    "delete last": [(50, LENGTH, [])],
    "replace first, shorter": [(0, 9, R[:2])],
    "replace middle, shorter": [(20, 37, R[:1])],
    "replace middle, longer": [(20, 23, R[:17])],
    "replace middle, same length": [(20, 23, R[:3])],
    "replace last": [(50, LENGTH, R[:3])],
    "replace all but the last": [(0, LENGTH - 1, R[:4])],
    "several, both signs": [(45, 50, R[:1]), (5, 9, R[1:20]), (20, 20, R[20:23]), (30, 42, [])],
    "several, touching": [(10, 14, R[:2]), (14, 20, R[2:9]), (20, 20, R[9:11])],
    "several, no net shift": [(10, 14, []), (30, 30, R[:4])],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_one_call(loaded, unpatched, variant, cuts):
    pair = Pair(Rig(loaded(variant), prefill_chunk=16), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize(*cuts)
    message = random_ids(7, seed=3)
    pair.append(message)
    assert pair.error(forced=random_ids(3, seed=4)) < TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_the_edit_matters(loaded, unpatched, variant):
    """The oracle is not a fresh prefill, nor the unedited text: the tests above can tell them apart."""
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize((20, 37, R[:1]))
    got = pair.rig.logits(pair.sequence)
    assert worst(got, full_forward(unpatched(variant), pair.oracle.ids)[-1:]) > 1000 * TOLERANCE
    assert worst(got, full_forward(unpatched(variant), random_ids(LENGTH))[-1:]) > 1000 * TOLERANCE


def test_replacement_is_computed_in_the_pass_of_the_next_message(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize((20, 37, R[:4]), (45, 46, R[4:9]))
    pair.append(R[:6])
    before = pair.rig.engine.stats()
    assert pair.error() < TOLERANCE
    after = pair.rig.engine.stats()
    assert after.steps - before.steps == 1
    assert after.rows_computed - before.rows_computed == 4 + 5 + 6


def test_replacement_computed_on_its_own_first(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize((20, 37, R[:4]))
    pair.prefill()
    pair.append(R[:6])
    assert pair.error() < TOLERANCE


def test_edit_of_what_is_still_pending(loaded, unpatched, variant):
    """R of the first edit is cut by the second before it was ever computed."""
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize((20, 37, R[:9]))
    pair.amortize((18, 24, R[9:11]), (26, 30, []))
    assert pair.error() < TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_rows_are_turned_both_ways_and_back(loaded, unpatched, variant):
    """Back where it was written, a row is not turned at all."""
    pair = Pair(Rig(loaded(variant)), unpatched(variant), random_ids(LENGTH))
    pair.prefill()
    pair.amortize((10, 10, R[:13]))
    assert pair.error() < TOLERANCE
    pair.amortize((30, 30, R[:2]), (40, 57, []))
    assert pair.error() < TOLERANCE
    pair.amortize((10, 23, []))
    pair.amortize((17, 19, []))
    rows = pair.rig.engine.sequences[pair.sequence].rows
    assert not rows.turned(pair.rig.engine.cache.table)[:27].any()
    assert pair.error() < TOLERANCE


@pytest.mark.parametrize("name", ["v2-moe-yarn", "v3-noqlora-dense"])
def test_two_hundred_edits_err_no_more_than_one(loaded, unpatched, name):
    """The stored keys never change, so nothing adds up."""
    pair = Pair(Rig(loaded(name), check=False), unpatched(name), random_ids(LENGTH))
    pair.prefill()
    errors = []
    generator = torch.Generator().manual_seed(0)
    for i in range(200):
        start = int(torch.randint(4, len(pair.oracle.ids) - 12, (1,), generator=generator))
        # Grows and shrinks in turns around 60 entries; old rows in front of the end live long and are moved often.
        removed, added = ((6, 2), (1, 5))[i % 2]
        pair.amortize((start, start + removed, R[i % 30 : i % 30 + added]))
        pair.append(R[i % 7 : i % 7 + 1])
        if i % 3 == 0:
            pair.amortize((len(pair.oracle.ids) - 4, len(pair.oracle.ids) - 1, ()))
        errors.append(pair.error())
    pair.rig.engine.check_integrity()
    # Medians: a model with random weights has texts, early or late, on which every rounding is blown up.
    first, last = median(errors[:50]), median(errors[-50:])
    assert first < TOLERANCE / 2
    assert last < 2 * first
    assert max(errors) < 10 * TOLERANCE
    assert pair.row_error() < TOLERANCE


def test_one_row_moved_two_hundred_times(loaded, unpatched, variant):
    """Rows computed once: after 200 shifts to and fro they stand 100 positions on, and err as after one."""
    errors = {}
    for times in (1, 200):
        pair = Pair(Rig(loaded(variant), check=False), unpatched(variant), random_ids(LENGTH))
        pair.prefill()
        for i in range(times):
            by = 100 if times == 1 else (3, -2)[i % 2]
            if by > 0:
                pair.amortize((8, 8, random_ids(by, seed=i)))
            else:
                pair.amortize((8, 8 - by, ()))
        assert len(pair.oracle.ids) == LENGTH + 100
        errors[times] = pair.error()
        assert pair.row_error() < TOLERANCE
    assert errors[200] < max(3 * errors[1], TOLERANCE / 2)


def test_stored_rows_never_change(loaded, variant):
    """Bit for bit, from allocation to release; the places they stand at do."""
    rig = Rig(loaded(variant))
    sequence = rig.open(random_ids(LENGTH))
    rig.prefill(sequence)
    pool, slots = rig.engine.cache.pool, torch.as_tensor(rig.slots(sequence)[20:]).long()
    written_at = rig.engine.cache.table.written_at
    before = (pool.c_kv[:, slots].clone(), pool.k_pe[:, slots].clone(), torch.tensor(written_at[slots])[None, :, None])
    for i in range(30):
        rig.engine.splice(sequence, [rig.edit(5, 5 + i % 3, R[: 2 * (i % 2)])])
        rig.logits(sequence)
    after = (pool.c_kv[:, slots], pool.k_pe[:, slots], torch.tensor(written_at[slots])[None, :, None])
    for had, has in zip(before, after, strict=True):
        # The last entry was computed anew by every Generate, into another slot.
        assert torch.equal(had[:, :-1], has[:, :-1])


def test_the_oracle_turns_as_hugging_face_does(unpatched, variant):
    """Its complex multiplication against the keys that the model's own rotary code gives at both places."""
    model = unpatched(variant)
    hidden = torch.randn(1, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for here, there in ((5, 60), (150, 3)):
        keys = [_key(model, hidden, position) for position in (here, there)]
        assert worst(turn(model, keys[0], there - here), keys[1]) < 1e-4
        assert worst(turn(model, keys[0], there - here + 1), keys[1]) > 0.05


@torch.inference_mode()
def _key(model, hidden, position):
    """k_pe [1, rope] that HF's first attention module hands to its cache."""
    from transformers import DynamicCache

    cache = DynamicCache()
    model.model.layers[0].self_attn(
        hidden, position_embeddings=model.model.rotary_emb(hidden, torch.tensor([[position]])), attention_mask=None,
        cache=cache,
    )  # fmt: skip
    return cache.layers[0].values[0, 0].double()
