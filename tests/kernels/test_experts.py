"""The experts of a layer: the Triton kernels in the interpreter, and the twins, against a plain loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

pytestmark = pytest.mark.usefixtures("on_triton")

TOLERANCE = 2e-6


@pytest.fixture
def gpu() -> Any:
    import leyline_kernels.gpu.experts as module

    return module


def make(tokens: int, num_experts: int, top_k: int, hidden: int, width: int, shared: int = 0) -> dict[str, Any]:
    """Arguments of `experts` with values of unit deviation everywhere."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.rand(tokens, num_experts, device=device)
    weights, index = scores.topk(top_k)
    return {
        "x": torch.randn(tokens, hidden, device=device),
        "top_k_index": index,
        "top_k_weights": weights,
        "gate_up": torch.randn(num_experts + shared, 2 * width, hidden, device=device) * hidden**-0.5,
        "down": torch.randn(num_experts + shared, hidden, width, device=device) * width**-0.5,
        "shared": shared,
    }


def slowly(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor, shared: int) -> Tensor:
    """One pair of a token and an expert after another, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    always = [(e, 1.0) for e in range(len(down) - shared, len(down))]
    for t, row in enumerate(x.double()):
        for e, weight in [*zip(top_k_index[t].tolist(), top_k_weights[t].tolist(), strict=True), *always]:
            gate, up = (gate_up[e].double() @ row).chunk(2)
            out[t] += weight * (down[e].double() @ (gate * gate.sigmoid() * up))
    return out


SHAPES = [
    (1, 5, 2, 40, 24, 0),
    (1, 4, 4, 64, 32, 2),
    (5, 7, 3, 72, 41, 1),
    (19, 6, 2, 33, 40, 2),
    (21, 3, 1, 16, 8, 0),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("max_pairs", [10_000, 0], ids=["few", "many"])
def test_experts(gpu: Any, relative_error: Callable[..., float], shape: tuple[int, ...], max_pairs: int) -> None:
    args = make(*shape)
    got = gpu.experts(**args, max_pairs=max_pairs)
    want = slowly(**args)
    assert got.shape == want.shape
    assert relative_error(got, want) < TOLERANCE
    assert relative_error(reference.experts(**args), want) < TOLERANCE


@pytest.mark.parametrize("max_pairs", [10_000, 0], ids=["few", "many"])
@pytest.mark.parametrize("chosen", [[0], [6], [2, 5]], ids=str)
def test_all_tokens_on_few_experts(
    gpu: Any, relative_error: Callable[..., float], chosen: list[int], max_pairs: int
) -> None:
    """One expert fills more than two blocks; weights of the experts that nobody asks are never used: they are NaN."""
    args = make(37, 7, len(chosen), 24, 16)
    args["top_k_index"] = torch.tensor(chosen, device=args["x"].device).expand(37, -1)
    unused = [e for e in range(7) if e not in chosen]
    args["gate_up"][unused] = torch.nan
    args["down"][unused] = torch.nan
    assert relative_error(gpu.experts(**args, max_pairs=max_pairs), slowly(**args)) < TOLERANCE


def test_each_block_size(gpu: Any, relative_error: Callable[..., float]) -> None:
    args = make(40, 3, 2, 48, 24, shared=1)
    want = slowly(**args)
    for rows in (16, 32, 64):
        tiles = (gpu.Tiles(rows, 16, 16, 4, 1), gpu.Tiles(rows, 32, 64, 4, 1))
        assert relative_error(gpu.experts(**args, tiles=tiles), want) < TOLERANCE


def test_more_pairs_than_one_tile_of_the_grouping(gpu: Any, relative_error: Callable[..., float]) -> None:
    args = make(90, 4, 3, 16, 8, shared=1)
    assert relative_error(gpu.experts(**args, max_pairs=10_000), slowly(**args)) < TOLERANCE


def test_rows_that_are_no_neighbours(gpu: Any, relative_error: Callable[..., float]) -> None:
    """x as a part of wider rows, int32 indices."""
    args = make(9, 5, 2, 32, 16)
    wide = torch.full((9, 50), torch.nan, device=args["x"].device)
    wide[:, :32] = args["x"]
    args |= {"x": wide[:, :32], "top_k_index": args["top_k_index"].int()}
    for max_pairs in (10_000, 0):
        assert relative_error(gpu.experts(**args, max_pairs=max_pairs), slowly(**args)) < TOLERANCE


def test_no_tokens(gpu: Any) -> None:
    args = make(0, 4, 2, 16, 8, shared=1)
    assert gpu.experts(**args).shape == (0, 16)
    assert leyline_kernels.experts(**args).shape == (0, 16)
    assert gpu.silu_mul(torch.zeros(0, 16, device=args["x"].device)).shape == (0, 8)
    assert gpu.route(args["x"], args["x"].new_zeros(4, 16), 2, 1.0)[0].shape == (0, 2)


def test_weights_in_another_order_are_refused(gpu: Any) -> None:
    args = make(3, 4, 2, 16, 16)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.experts(**args | {"down": args["down"].transpose(1, 2)})


def test_a_token_does_not_depend_on_the_others(gpu: Any) -> None:
    """The same bits in any company of its own block size: nothing is summed across rows."""
    args = make(20, 4, 2, 32, 16, shared=1)
    together = gpu.experts(**args)
    for t in (0, 7, 19):
        alone = args | {name: args[name][t : t + 1] for name in ("x", "top_k_index", "top_k_weights")}
        assert torch.equal(gpu.experts(**alone)[0], together[t])


@pytest.mark.parametrize(("tokens", "num_experts", "top_k", "hidden"), [(1, 4, 2, 40), (7, 6, 6, 300), (3, 64, 6, 129)])
def test_route(
    gpu: Any, relative_error: Callable[..., float], tokens: int, num_experts: int, top_k: int, hidden: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(num_experts, hidden, device=device) * hidden**-0.5
    scores = (x.double() @ weight.double().T).softmax(-1)
    want = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1.0) * scores * 2.5
    for side in (gpu.route, reference.route):
        weights, index = side(x, weight, top_k, 2.5)
        assert weights.dtype is torch.float32
        assert index.dtype is torch.int32
        got = torch.zeros_like(scores).scatter(1, index.long(), weights.double())
        assert relative_error(got, want) < TOLERANCE


def test_route_of_ties_and_of_nonsense(gpu: Any) -> None:
    """Ties go to the lower index, each expert once; a row that is no number still names experts that exist."""
    x = torch.ones(2, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    x[1] = torch.nan
    weights, index = gpu.route(x, torch.ones_like(x[:1]).expand(5, -1).contiguous(), 3, 1.0)
    assert index[0].tolist() == [0, 1, 2]
    assert weights[0].tolist() == pytest.approx([0.2] * 3)
    assert (index[1] >= 0).all()
    assert (index[1] < 5).all()


@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 3, 2200)], ids=str)
def test_silu_mul(gpu: Any, relative_error: Callable[..., float], shape: tuple[int, ...]) -> None:
    gate_up = 3 * torch.randn(shape, device="cuda" if torch.cuda.is_available() else "cpu")
    gate, up = gate_up.double().chunk(2, -1)
    want = gate * gate.sigmoid() * up
    assert relative_error(gpu.silu_mul(gate_up), want) < TOLERANCE
    assert relative_error(reference.silu_mul(gate_up), want) < TOLERANCE
