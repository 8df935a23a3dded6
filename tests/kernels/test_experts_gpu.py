"""The experts' kernels compiled, at DeepSeek-V2-Lite's shape in bf16, against the twins in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, WIDTH, EXPERTS, TOP_K, SHARED = 2048, 1408, 64, 6, 2
TOLERANCE = 8e-3
MIXED = pytest.mark.parametrize("tokens", [1, 2, 16, 40, 64, 127, 128, 129, 700], ids=str)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    num = EXPERTS + SHARED
    gate_up = torch.randn(num, 2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    down = torch.randn(num, HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5
    return {"gate_up": gate_up, "down": down}


def routed(tokens: int, among: int = EXPERTS) -> dict[str, Tensor]:
    """Tokens and their experts, all of the first `among`."""
    top_k_weights, top_k_index = torch.rand(tokens, among, device="cuda").topk(TOP_K)
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return {"x": x, "top_k_index": top_k_index, "top_k_weights": top_k_weights}


def wide(args: dict[str, Any]) -> dict[str, Any]:
    return {name: arg.float() if name in ("x", "gate_up", "down") else arg for name, arg in args.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@MIXED
@pytest.mark.parametrize("among", [TOP_K, EXPERTS])
def test_experts(weights: dict[str, Tensor], tokens: int, among: int) -> None:
    args = routed(tokens, among) | weights | {"shared": SHARED}
    got = leyline_kernels.experts(**args)
    error = relative_error(got, reference.experts(**wide(args)))
    print(f"error experts {tokens} tokens among {among}: {error:.1e}")
    assert error < TOLERANCE
    assert torch.equal(leyline_kernels.experts(**args), got)
    swapped = args | {"top_k_index": (args["top_k_index"] + 1) % EXPERTS}
    assert relative_error(leyline_kernels.experts(**swapped), got) > 0.1


@pytest.mark.parametrize("tokens", [3, 200])
def test_both_ways_agree(weights: dict[str, Tensor], tokens: int) -> None:
    from leyline_kernels.gpu.experts import experts

    args = routed(tokens) | weights | {"shared": SHARED}
    few, many = experts(**args, max_pairs=1 << 30), experts(**args, max_pairs=0)
    assert relative_error(few, many) < TOLERANCE


@pytest.mark.parametrize("tokens", [5, 200])
def test_fp32(tokens: int) -> None:
    torch.manual_seed(0)
    args = routed(tokens, 8) | {
        "gate_up": torch.randn(9, 2 * 96, HIDDEN, device="cuda") * HIDDEN**-0.5,
        "down": torch.randn(9, HIDDEN, 96, device="cuda") * 96**-0.5,
        "shared": 1,
    }
    args["x"] = args["x"].float()
    want = reference.experts(**{n: a.double() if torch.is_tensor(a) and a.is_floating_point() else a
                                for n, a in args.items()})  # fmt: skip
    assert relative_error(leyline_kernels.experts(**args), want) < 1e-5


@pytest.mark.parametrize("tokens", [1, 16, 64, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_route(tokens: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5).to(dtype)
    weights, index = leyline_kernels.route(x, weight, TOP_K, 1.5)
    scores = (x.double() @ weight.double().T).softmax(-1)
    got = torch.zeros_like(scores).scatter(1, index.long(), weights.double())
    want = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K).indices, 1.5) * scores
    assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("shape", [(1, 2816), (33, 21888), (3, 70)], ids=str)
def test_silu_mul(shape: tuple[int, int]) -> None:
    gate_up = 3 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert relative_error(leyline_kernels.silu_mul(gate_up), reference.silu_mul(gate_up.float())) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_one_graph_serves_any_routing(weights: dict[str, Tensor], tokens: int) -> None:
    """Captured once with its router; then the tokens change in place, and with them the experts."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    router = torch.randn(EXPERTS, HIDDEN, device="cuda") * HIDDEN**-0.5

    def layer() -> Tensor:
        top_k_weights, top_k_index = leyline_kernels.route(x, router, TOP_K, 1.0)
        return leyline_kernels.experts(x, top_k_index, top_k_weights, **weights, shared=SHARED)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for scale in (1.0, 3.0, 0.0):
        x.normal_().mul_(scale)
        x[tokens // 2 :] = x[0]
        graph.replay()
        top_k_weights, top_k_index = leyline_kernels.route(x, router, TOP_K, 1.0)
        args = {"x": x, "top_k_index": top_k_index, "top_k_weights": top_k_weights, **weights, "shared": SHARED}
        want = reference.experts(**wide(args))
        assert relative_error(out, want) < TOLERANCE if scale else not out.any()
