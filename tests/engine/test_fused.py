"""A fused model gives the logits of Hugging Face's own, with the twins and with the kernels in the interpreter."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import leyline_kernels
from leyline_server.lab.oracle import full_forward
from leyline_server.model import attention
from leyline_server.model.fused import fuse
from tests.engine import models
from tests.engine.harness import random_ids
from tests.engine.pairs import relative, worst

TOLERANCE = 1e-4


def fused(variant: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = models.make(variant, dtype, **overrides)
    fuse(model)
    return model


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pytest.importorskip("leyline_kernels.gpu.experts")
    for name in ("experts", "route", "silu_mul"):
        monkeypatch.setattr(leyline_kernels, name, getattr(gpu, name))
    monkeypatch.setattr(leyline_kernels, "rope", pytest.importorskip("leyline_kernels.gpu.rope").rope)


def test_logits(variant):
    ids = random_ids(50)
    want = full_forward(models.make(variant), ids)
    assert want.std() > 0.5
    assert worst(full_forward(fused(variant), ids), want) < TOLERANCE


@pytest.mark.parametrize("count", [1, 9])
def test_logits_with_the_kernels(variant, count, on_triton):
    ids = random_ids(count)
    assert worst(full_forward(fused(variant), ids), full_forward(models.make(variant), ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["v2-moe-yarn", "v3-moe-yarn"])
def test_several_shared_experts_and_a_scale(family):
    """Two shared experts are one MLP of twice the width in HF's model."""
    own = {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "n_routed_experts": 8, "num_experts_per_tok": 3}
    ids = random_ids(30)
    model = fused(family, **own)
    assert worst(full_forward(model, ids), full_forward(models.make(family, **own), ids)) < TOLERANCE
    assert model.model.layers[1].mlp.num_shared == 2


def test_a_router_by_groups_stays_hugging_face_s(monkeypatch):
    own = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "n_routed_experts": 8}
    monkeypatch.setattr(leyline_kernels, "route", None)
    ids = random_ids(30)
    want = full_forward(models.make("v2-moe-yarn", **own), ids)
    assert worst(full_forward(fused("v2-moe-yarn", **own), ids), want) < TOLERANCE


def test_experts_through_the_registry(monkeypatch):
    """A block with a part that nobody knows keeps its forward; its experts still go through Hugging Face's registry."""
    model, reference = models.make("v2-moe-yarn"), models.make("v2-moe-yarn")
    for layer in model.model.layers[1:]:
        layer.mlp.unknown = torch.nn.Identity()
    fuse(model)
    seen = []
    real = leyline_kernels.experts
    monkeypatch.setattr(leyline_kernels, "experts", lambda *args: seen.append(len(args)) or real(*args))
    ids = random_ids(20)
    assert worst(full_forward(model, ids), full_forward(reference, ids)) < TOLERANCE
    assert seen == [5, 5]
    assert hasattr(model.model.layers[1].mlp, "shared_experts")


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_another_activation_is_left_alone(act):
    ids = random_ids(20)
    model = fused("v2-moe-yarn", hidden_act=act)
    want = full_forward(models.make("v2-moe-yarn", hidden_act=act), ids)
    assert worst(full_forward(model, ids), want) < TOLERANCE
    assert not hasattr(model.model.layers[0].mlp, "gate_up")
    assert hasattr(model.model.layers[1].mlp, "shared_experts")


def test_another_model_in_the_process_is_not_touched(variant):
    ids = random_ids(20)
    other = models.make(variant)
    want = full_forward(other, ids)
    fused(variant)
    assert torch.equal(full_forward(other, ids), want)
    assert torch.equal(full_forward(models.make(variant), ids), want)


def test_every_weight_is_kept_once(variant):
    plain = sum(weight.numel() for weight in models.make(variant).parameters())
    model = fused(variant)
    assert sum(weight.numel() for weight in model.parameters()) == plain
    assert sum({w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}.values()) == (
        4 * plain
    )


def test_a_copy_in_another_dtype(variant):
    """Weights are parameters like any others, and a copied module's forward reads the copy."""
    ids = random_ids(20)
    copy = deepcopy(fused(variant)).bfloat16()
    assert torch.equal(full_forward(copy, ids), full_forward(fused(variant, torch.bfloat16), ids))


def test_a_bf16_norm_errs_no_more_than_hugging_face_s():
    """One rounding after the weight, where HF's has one before and one after it."""
    torch.manual_seed(0)
    model = models.make("v2-qlora-dense", torch.bfloat16)
    norm = model.model.norm
    norm.weight.data.normal_(1.0, 0.3)
    x = torch.randn(200, 64, dtype=torch.bfloat16) * 5
    theirs = norm(x)
    fuse(model)
    got = norm(x)
    wide = x.double()
    want = norm.weight.double() * wide * (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    assert relative(theirs, want) > 1e-3
    assert relative(got, want) < relative(theirs, want)
    assert 1e-4 < relative(got, theirs) < 4e-3


def test_bf16_errs_no_more_than_hugging_face_does():
    """Dense: in bf16 a near tie of two experts routes differently, which is no rounding."""
    ids = random_ids(50)
    exact = full_forward(models.make("v2-qlora-dense", torch.bfloat16).float(), ids)
    theirs = full_forward(models.make("v2-qlora-dense", torch.bfloat16), ids)
    got = full_forward(fused("v2-qlora-dense", torch.bfloat16), ids)
    assert relative(theirs, exact) > 1e-3
    assert relative(got, exact) < 1.3 * relative(theirs, exact)


def test_the_rotation_is_the_kernel_s_where_it_is_known(variant, monkeypatch):
    """V2's forward calls it once a layer; V3's rotates otherwise and is left alone; a batch of two is HF's own."""
    model, reference = fused(variant), models.make(variant)
    seen = []
    real = leyline_kernels.rope
    monkeypatch.setattr(leyline_kernels, "rope", lambda *args: seen.append(args[0].shape) or real(*args))
    ids = torch.tensor([random_ids(9), random_ids(9, seed=1)])
    with torch.inference_mode():
        assert worst(model(ids).logits, reference(ids).logits) < TOLERANCE
        assert not seen
        model(ids[:1])
    assert seen == ([(4, 9, 16)] * 3 if variant.startswith("v2") else [])


def test_together_with_the_pool_s_attention(variant):
    """Both patches on one model, in the order in which a checkpoint is loaded."""
    model = fused(variant)
    attention.attach(model)
    patched = [m for m in model.modules() if "expand_kv" in vars(m)]
    assert len(patched) == 3
    assert model.config._experts_implementation == "leyline"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("count", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_graph_serves_other_tokens(variant, count, dtype):
    """All that is fused, in one captured walk of the layers: replays over other rows equal eager runs."""
    model = fused(variant, dtype).cuda()
    x = torch.randn(1, count, 64, device="cuda").to(dtype)

    def layers(rows: torch.Tensor) -> torch.Tensor:
        for layer in model.model.layers:
            rows = layer(rows, position_embeddings=positions)
        return model.model.norm(rows)

    with torch.inference_mode():
        positions = model.model.rotary_emb(x, torch.arange(count, device="cuda")[None])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layers(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            got, want = out.clone(), layers(x)
            assert got.float().std() > 0.5
            assert worst(got, want) < TOLERANCE
