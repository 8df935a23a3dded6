"""`gather` and `prefill` compiled, at DeepSeek-V2-Lite's shape in bf16, against the torch twins in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

H, NOPE, ROPE, V, RANK = 16, 128, 64, 128, 512
TOLERANCE = 8e-3
"""bf16 rounds the weights of the softmax and the result."""


def queries(lens: list[int], counts: list[int], last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q_indptr, q_index: each sequence's last `counts` indices, or a random subset of all; kv_indptr."""
    index = []
    for n, count in zip(lens, counts, strict=True):
        every = torch.arange(n, device="cuda")
        index.append(every[n - count :] if last else every[torch.randperm(n, device="cuda")[:count]].sort().values)
    q_indptr, kv_indptr = (torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (counts, lens))
    return q_indptr, torch.cat(index).int(), kv_indptr


def arguments(lens: list[int], counts: list[int], last: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `prefill`; q head by head in memory, as the engine's projection leaves it."""
    q_indptr, q_index, kv_indptr = queries(lens, counts, last)
    return {
        "q": torch.randn(H, sum(counts), NOPE + ROPE, dtype=dtype, device="cuda").transpose(0, 1),
        "kv": torch.randn(sum(lens), H, NOPE + V, dtype=dtype, device="cuda"),
        "keys": torch.randn(sum(lens), ROPE, dtype=dtype, device="cuda"),
        "q_indptr": q_indptr,
        "q_index": q_index,
        "kv_indptr": kv_indptr,
        "scale": (NOPE + ROPE) ** -0.5,
        "nope": NOPE,
    }


def wider(args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, exactly, in fp32 for bf16 and in float64 for fp32."""
    wide = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
    return {name: arg.to(wide[arg.dtype]) if name in ("q", "kv", "keys") else arg for name, arg in args.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("last", [True, False], ids=["last", "subset"])
@pytest.mark.parametrize(
    ("lens", "counts"),
    [
        ([8192], [2048]),
        ([8192], [40]),
        ([3000], [3000]),
        ([5000, 700, 1300], [512, 300, 33]),
        ([4096, 2048, 900], [1, 0, 257]),
    ],
    ids=str,
)
def test_prefill(lens: list[int], counts: list[int], last: bool) -> None:
    args = arguments(lens, counts, last, torch.bfloat16)
    got, want = leyline_kernels.prefill(**args), reference.prefill(**wider(args))
    error = relative_error(got, want)
    print(f"error prefill {counts} over {lens} last={last}: {error:.1e}")
    assert error < TOLERANCE
    assert torch.equal(leyline_kernels.prefill(**args), got)
    ends = torch.tensor(lens, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda")).int() - 1
    coarse = args | {"q_index": torch.minimum(args["q_index"] | 7, ends)}
    if not last:
        assert relative_error(leyline_kernels.prefill(**coarse), want) > 2 * TOLERANCE, "the causal mask too coarse"


def test_prefill_in_fp32() -> None:
    args = arguments([900, 300], [200, 30], False, torch.float32)
    assert relative_error(leyline_kernels.prefill(**args), reference.prefill(**wider(args))) < 2e-5


def test_rows_nobody_sees_are_never_read() -> None:
    """Behind a sequence's last query, on a tile's edge and off it, anything may stand."""
    args = arguments([1000, 1300], [200, 300], True, torch.bfloat16)
    args["q_index"] = torch.cat([torch.arange(696, 896), torch.arange(3, 903, 3)]).int().cuda()
    want = reference.prefill(**wider(args))
    for rows in (slice(896, 1000), slice(1901, 2300)):
        args["kv"][rows], args["keys"][rows] = torch.nan, torch.nan
    assert relative_error(leyline_kernels.prefill(**args), want) < TOLERANCE


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_splits_and_tiles_agree(num_splits: int) -> None:
    from leyline_kernels.gpu import prefill as gpu

    args = arguments([4000, 2100], [130, 77], True, torch.bfloat16)
    want = reference.prefill(**wider(args))
    for tiles in (gpu.LONG, gpu.SHORT):
        assert relative_error(gpu.prefill(**args, tiles=tiles, num_splits=num_splits), want) < TOLERANCE


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_gather(layout: str) -> None:
    n, num_slots = 5000, 6000
    c_kv = torch.full((num_slots, RANK), torch.nan, dtype=torch.bfloat16, device="cuda")
    k_pe = torch.full((num_slots, ROPE), torch.nan, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(num_slots - 1, device="cuda")[:n] + 1
    c_kv[slots], k_pe[slots] = torch.randn_like(c_kv[slots]), torch.randn_like(k_pe[slots])
    delta = torch.randint(-9999, 9999, (n,), device="cuda").int()
    delta[:1000] = 0
    slots[-100:] = -1
    inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device="cuda") / ROPE)
    latent, keys = leyline_kernels.gather(c_kv, k_pe, slots.int(), delta, inv_freq, layout)
    want_latent, want_keys = reference.gather(c_kv.float(), k_pe.float(), slots.int(), delta, inv_freq, layout)
    assert torch.equal(latent.float(), want_latent)
    assert torch.equal(keys[:992].float(), want_keys[:992]), "what didn't move is copied"
    assert relative_error(keys, want_keys) < TOLERANCE
    assert keys[-100:].eq(0).all()


def test_expanded_equals_absorbed() -> None:
    """The two forms over one pool: the caller may take either."""
    n, t = 3000, 600
    c_kv = torch.randn(n, RANK, device="cuda").bfloat16()
    k_pe = torch.randn(n, ROPE, device="cuda").bfloat16()
    slots = torch.randperm(n, device="cuda").int()
    delta = torch.where(torch.arange(n, device="cuda") < 700, 0, -77).int()
    inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device="cuda") / ROPE)
    kv_b_proj = (torch.randn(H * (NOPE + V), RANK, device="cuda") * RANK**-0.5).bfloat16()
    q = torch.randn(t, H, NOPE + ROPE, device="cuda").bfloat16()
    q_indptr, q_index, kv_indptr = queries([n], [t], True)
    scale = (NOPE + ROPE) ** -0.5

    latent, keys = leyline_kernels.gather(c_kv, k_pe, slots, delta, inv_freq, "interleaved")
    kv = (latent @ kv_b_proj.T).view(n, H, NOPE + V)
    expanded = leyline_kernels.prefill(q, kv, keys, q_indptr, q_index, kv_indptr, scale, NOPE)

    w_uk, w_uv = kv_b_proj.view(H, NOPE + V, RANK).split([NOPE, V], dim=1)
    q_latent = torch.einsum("thd,hdr->thr", q[..., :NOPE], w_uk)
    out_latent = leyline_kernels.extend(
        q_latent, q[..., NOPE:], q_indptr, q_index, c_kv, k_pe, kv_indptr[:-1], kv_indptr.diff(), slots, delta,
        inv_freq, "interleaved", scale,
    )  # fmt: skip
    assert relative_error(expanded, torch.einsum("thr,hvr->thv", out_latent, w_uv)) < 2 * TOLERANCE
