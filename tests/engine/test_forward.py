"""Prefill, chunks and decode in a packed step give Hugging Face's own logits."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from leyline_server.lab.oracle import full_forward
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, relative, worst

TOLERANCE = 1e-4


def test_packed_prefill_of_several_sequences(loaded, unpatched, variant):
    rig = Rig(loaded(variant), prefill_chunk=512)
    texts = [random_ids(length, seed) for seed, length in enumerate((50, 1, 17, 33))]
    runs = [rig.generate(rig.open(text)) for text in texts]
    rig.run()
    assert rig.engine.stats().steps == 1
    for run, text in zip(runs, texts, strict=True):
        want = full_forward(unpatched(variant), text)[-1:]
        assert want.std() > 0.5
        assert worst(run.logits, want) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(loaded, unpatched, variant, chunk):
    rig = Rig(loaded(variant), prefill_chunk=chunk)
    text, tail = random_ids(50), random_ids(6, seed=1)
    got = rig.logits(rig.open(text), tail)
    assert rig.engine.stats().steps == -(-50 // chunk) + 5
    assert worst(got, full_forward(unpatched(variant), text + tail)[49:-1]) < TOLERANCE


def test_decode_beside_the_prefill_of_others(loaded, unpatched, variant):
    rig = Rig(loaded(variant), prefill_chunk=16)
    first, tail = random_ids(30), random_ids(12, seed=1)
    decoding = rig.generate(rig.open(first), 12, forced=tail)
    rig.step()
    rig.step()
    others = [random_ids(40, seed=2), random_ids(5, seed=3)]
    joining = [rig.generate(rig.open(text), 4) for text in others]
    rig.run()
    assert worst(decoding.logits, full_forward(unpatched(variant), first + tail)[29:-1]) < TOLERANCE
    for run, text in zip(joining, others, strict=True):
        want = full_forward(unpatched(variant), text + run.tokens)[len(text) - 1 : -1]
        assert worst(run.logits, want) < TOLERANCE


def test_beyond_the_trained_window(loaded, unpatched):
    """YaRN's `original_max_position_embeddings` is 64 here."""
    rig = Rig(loaded("v3-moe-yarn"), prefill_chunk=100)
    text = random_ids(300)
    assert worst(rig.logits(rig.open(text)), full_forward(unpatched("v3-moe-yarn"), text)[-1:]) < TOLERANCE


def test_every_row_of_every_layer(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant), prefill_chunk=16), unpatched(variant), random_ids(50))
    pair.prefill()
    assert pair.row_error() < TOLERANCE


def test_prefix_hit_gives_the_same_logits(loaded, unpatched, variant):
    rig = Rig(loaded(variant))
    text, own = random_ids(40), random_ids(10, seed=1)
    rig.prefill(rig.open(text))
    run = rig.generate(rig.open(text[:30] + own))
    rig.run()
    assert run.report.prefix_hit == 30
    assert worst(run.logits, full_forward(unpatched(variant), text[:30] + own)[-1:]) < TOLERANCE


@pytest.mark.parametrize("variant", ["v2-qlora-dense", "v3-noqlora-dense"])
def test_bf16_errs_no_more_than_hugging_face_does(loaded, unpatched, variant):
    """Dense variants: in bf16 a near tie of two experts routes differently, which is no rounding."""
    rig = Rig(loaded(variant, torch.bfloat16), prefill_chunk=16)
    text, tail = random_ids(50), random_ids(20, seed=1)
    got = rig.logits(rig.open(text), tail)
    reference = unpatched(variant, torch.bfloat16)
    theirs = full_forward(reference, text + tail)[49:-1]
    exact = full_forward(deepcopy(reference).float(), text + tail)[49:-1]
    assert relative(theirs, exact) > 1e-3, "not computed in bf16"
    assert relative(got, theirs) < 0.1
    assert relative(got, exact) < 1.3 * relative(theirs, exact)
