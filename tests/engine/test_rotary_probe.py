"""The rotary probe asks the model's own code, and refuses what no single turn can move."""

from __future__ import annotations

from functools import wraps
from types import MethodType

import pytest
import torch

from leyline_server.model.rotary_probe import probe
from tests.engine import models

LAYOUTS = {
    "v2-moe-yarn": "interleaved",
    "v2-qlora-dense": "interleaved",
    "v3-moe-yarn": "halves",
    "v3-noqlora-dense": "halves",
}


def test_finds_the_layout(variant):
    found = probe(models.make(variant))
    assert (found.layout, found.reason) == (LAYOUTS[variant], "")


def test_frequencies_are_the_models_own(variant):
    model = models.make(variant)
    assert torch.equal(probe(model).inv_freq, model.model.rotary_emb.inv_freq)


def test_the_configuration_is_not_asked():
    """V3 without `rope_interleave` rotates halves all the same; another model's code may say anything."""
    model = models.make("v3-moe-yarn")
    model.config.rope_interleave = False
    assert probe(model).layout == "halves"


def test_in_bf16_too(loaded):
    assert loaded("v2-qlora-dense", torch.bfloat16).rotary.layout == "interleaved"


def test_it_changes_nothing(variant):
    model = models.make(variant)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    probe(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)


def _refused(model) -> str:
    found = probe(model)
    assert found.layout is None
    assert "errs by" in found.reason
    return found.reason


@pytest.mark.parametrize("family", ["v2-qlora-dense", "v3-noqlora-dense"])
def test_refuses_dynamic_rope(family):
    """It passes at short distances: frequencies change beyond the trained window alone."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    _refused(models.make(family, rope_parameters=rope, max_position_embeddings=64))


def test_refuses_frequencies_that_are_not_the_ones_used(variant):
    model = models.make(variant)
    rotary = model.model.rotary_emb
    forward, used = type(rotary).forward, rotary.inv_freq.clone()

    def other(self, x, position_ids):
        told, self.inv_freq = self.inv_freq, used * 0.97
        try:
            return forward(self, x, position_ids)
        finally:
            self.inv_freq = told

    rotary.forward = MethodType(other, rotary)
    _refused(model)


def test_refuses_partial_rotary():
    """The slower half of the pairs is not turned at all."""
    model = models.make("v2-qlora-dense")
    rotary = model.model.rotary_emb
    forward = type(rotary).forward

    def partial(self, x, position_ids):
        turns = forward(self, x, position_ids)
        turns[..., : turns.shape[-1] // 2] = 1
        return turns

    rotary.forward = MethodType(partial, rotary)
    _refused(model)


def test_refuses_a_key_that_is_wider_than_its_frequencies():
    model = models.make("v3-noqlora-dense")
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq[:-1]
    model.model.rotary_emb.forward = MethodType(lambda self, x, p: _all_pairs(x, p), rotary)
    _refused(model)


def _all_pairs(x, positions):
    angles = positions[..., None].float() * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_refuses_a_theta_of_a_layers_own(layer):
    """A layer in the middle as well as the first and the last."""
    model = models.make("v2-qlora-dense")
    attention = model.model.layers[layer].self_attn
    forward = type(attention).forward

    @wraps(forward)
    def other(self, *args, position_embeddings, **kwargs):
        return forward(self, *args, position_embeddings=position_embeddings**1.5, **kwargs)

    attention.forward = MethodType(other, attention)
    _refused(model)


def test_refuses_positions_of_several_axes():
    """M-RoPE as a text model would see it: some pairs follow another axis, which does not move with the text."""
    model = models.make("v2-qlora-dense")
    rotary = model.model.rotary_emb
    forward = type(rotary).forward

    def several(self, x, position_ids):
        turns, still = forward(self, x, position_ids), forward(self, x, position_ids * 0)
        turns[..., 2:4] = still[..., 2:4]
        return turns

    rotary.forward = MethodType(several, rotary)
    _refused(model)
