"""Turning a key equals what Hugging Face's own rotary code gives at the new position, and rotations form a group.

Both implementations of `rotate` are held to it: the torch twin and the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from leyline_kernels import reference

ROPE = 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.6,
    "mscale_all_dim": 1.3,
}
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
OTHER = {"interleaved": "halves", "halves": "interleaved"}

Turn = Callable[..., Tensor]


@pytest.fixture(params=["reference", "triton"])
def turn(request: pytest.FixtureRequest) -> Turn:
    """k_pe [N, rope] turned by delta [N], through `rotate` on a pool of two layers with scattered slots."""
    if request.param == "triton":
        request.getfixturevalue("on_triton")
        from leyline_kernels.gpu.rotate import rotate
    else:
        rotate = reference.rotate

    def through_rotate(k_pe: Tensor, delta: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
        n = len(k_pe)
        order = torch.randperm(3 * n, device=k_pe.device)
        src, dst = order[:n].int(), order[n : 2 * n].int()
        pool = torch.full((2, 3 * n, k_pe.shape[-1]), torch.nan, device=k_pe.device)
        pool[:, src.long()] = torch.stack([k_pe, -k_pe])
        rotate(pool, src, dst, delta.int(), inv_freq, layout)
        assert torch.equal(pool[:, src.long()], torch.stack([k_pe, -k_pe])), "a source slot changed"
        assert pool[:, order[2 * n :]].isnan().all(), "a slot outside dst was written"
        assert torch.equal(pool[1, dst.long()], -pool[0, dst.long()]), "layers differ"
        return pool[0, dst.long()]

    return through_rotate


def hf_rotary(family: str, rope_parameters: dict[str, Any]) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
    """HF's rotary module, and its own rotation of a raw key [N, rope] to positions [N]."""
    config_class = DeepseekV2Config if family == "v2" else DeepseekV3Config
    config = config_class(
        hidden_size=256,
        num_attention_heads=2,
        qk_rope_head_dim=ROPE,
        max_position_embeddings=2048,
        rope_parameters=dict(rope_parameters),
    )
    if family == "v2":
        rotary = v2.DeepseekV2RotaryEmbedding(config)
    else:
        rotary = v3.DeepseekV3RotaryEmbedding(config)

    def at(key: Tensor, position: Tensor) -> Tensor:
        key, position = key[None, None], position[None]
        if family == "v2":
            return v2.apply_rotary_emb(key, key, rotary(key, position))[1][0, 0]
        cos, sin = rotary(key, position)
        rotated = v3.apply_rotary_pos_emb_interleave if family == "v3" else v3.apply_rotary_pos_emb
        return rotated(key, key, cos, sin)[1][0, 0]

    return rotary, at


@pytest.mark.parametrize("rope_parameters", [DEFAULT, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize(
    ("family", "layout"), [("v2", "interleaved"), ("v3", "halves"), ("v3 without rope_interleave", "halves")]
)
def test_a_turned_key_is_hugging_faces_key_at_the_new_position(
    family: str,
    layout: str,
    rope_parameters: dict[str, Any],
    turn: Turn,
    relative_error: Callable[[Tensor, Tensor], float],
    device: str,
) -> None:
    rotary, at = hf_rotary(family, rope_parameters)
    inv_freq = rotary.inv_freq.to(device)
    magnitude = rotary.attention_scaling
    assert (abs(magnitude - 1) > 0.05) == (rope_parameters is YARN)
    raw = torch.randn(50, ROPE)

    # Near, and beyond original_max_position_embeddings, where fp32 angles of some 1,000 radians round to 1e-4.
    for bound, tolerance in ((40, 1e-5), (2000, 1e-3)):
        p, q = torch.randint(0, bound, (2, 50))
        here, there = at(raw, p).to(device), at(raw, q).to(device)
        delta = (q - p).to(device)

        def error(got: Tensor, there: Tensor = there) -> float:
            return relative_error(got, there)

        turned = turn(here, delta, inv_freq, layout)
        assert error(turned) < tolerance
        # The controls, each of which must fail.
        assert error(here) > 0.05, "rotation off"
        assert error(turn(here, delta, inv_freq, OTHER[layout])) > 0.05, "the other layout"
        assert error(turn(here, delta + 1, inv_freq, layout)) > 0.05, "off by one"
        assert error(turn(here, -delta, inv_freq, layout)) > 0.05, "the wrong sign"
        if rope_parameters is YARN:
            assert error(turned * magnitude) > 0.05, "magnitude applied twice"
            assert error(turn(here, delta, hf_rotary(family, DEFAULT)[0].inv_freq.to(device), layout)) > 0.05


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize(("n", "rope"), [(1, 16), (33, 32), (70, 64)])
def test_rotations_form_a_group(
    n: int,
    rope: int,
    layout: str,
    turn: Turn,
    inv_freq: Callable[[int], Tensor],
    relative_error: Callable[[Tensor, Tensor], float],
    device: str,
) -> None:
    by = partial(turn, inv_freq=inv_freq(rope), layout=layout)
    k_pe = torch.randn(n, rope, device=device)
    a, b = torch.randint(-300, 300, (2, n), device=device)

    assert torch.equal(by(k_pe, torch.zeros_like(a)), k_pe)
    assert relative_error(by(by(k_pe, a), b), by(k_pe, a + b)) < 1e-4
    assert relative_error(by(by(k_pe, a), -a), k_pe) < 1e-5
    assert relative_error(by(by(k_pe, a), b), by(k_pe, a + b + 1)) > 0.05
    assert torch.allclose(by(k_pe, a).norm(dim=-1), k_pe.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_the_kernel_equals_its_twin(
    layout: str,
    on_triton: None,
    inv_freq: Callable[[int], Tensor],
    relative_error: Callable[[Tensor, Tensor], float],
    device: str,
) -> None:
    from leyline_kernels.gpu.rotate import rotate

    layers, slots, n, rope = 5, 90, 41, 48
    pool = torch.randn(layers, slots, rope, device=device)
    src = torch.randperm(slots, device=device)[:n].int()
    dst = src.clone()  # in place
    delta = torch.randint(-1000, 1000, (n,), device=device).int()
    want, got = pool.clone(), pool.clone()
    reference.rotate(want, src, dst, delta, inv_freq(rope), layout)
    rotate(got, src, dst, delta, inv_freq(rope), layout)
    assert relative_error(got, want) < 1e-5
    untouched = torch.ones(slots, dtype=torch.bool, device=device).index_fill(0, dst.long(), False)
    assert torch.equal(got[:, untouched], pool[:, untouched])
    assert not torch.equal(got, pool)


def test_an_empty_list_is_no_work(turn: Turn, inv_freq: Callable[[int], Tensor], device: str) -> None:
    empty = torch.empty(0, 16, device=device)
    assert turn(empty, torch.empty(0, dtype=torch.int32, device=device), inv_freq(16), "halves").shape == (0, 16)
