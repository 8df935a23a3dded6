"""One layer's rows of a list, packed in list order with their keys turned: what the expanded form multiplies.

Moves bytes: a program reads and writes a few whole rows. A block in which nothing moved takes no cosine.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.pairs import angles, interleaved, require_contiguous_rows, rope_columns, turn
from leyline_kernels.reference import RotaryLayout

BLOCK_N = 16


@triton.jit(do_not_specialize=["num_entries"])
def _gather_kernel(
    c_kv, stride_c, k_pe, stride_k, kv_slots, kv_delta, inv_freq, latent, keys, num_entries,
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = entry < num_entries
    slot = tl.load(kv_slots + entry, mask=exists, other=-1).to(tl.int64)
    filled = slot >= 0
    entry = entry.to(tl.int64)

    col = tl.arange(0, BLOCK_RANK)
    in_rank = (col < RANK)[None, :]
    c = tl.load(c_kv + slot[:, None] * stride_c + col[None, :], mask=filled[:, None] & in_rank, other=0.0)
    tl.store(latent + entry[:, None] * RANK + col[None, :], c, mask=exists[:, None] & in_rank)

    at, in_rope = rope_columns(ROPE, BLOCK_HALF, INTERLEAVED)
    k = tl.load(k_pe + slot[:, None] * stride_k + at[None, :], mask=filled[:, None] & in_rope[None, :], other=0.0)
    if TURNED:
        delta = tl.load(kv_delta + entry, mask=filled, other=0)
        if tl.max(tl.abs(delta), axis=0) > 0:
            angle = angles(delta, inv_freq, ROPE, BLOCK_HALF)
            k = turn(k, tl.cos(angle), tl.sin(angle), BLOCK_N, BLOCK_HALF, INTERLEAVED)
    tl.store(keys + entry[:, None] * ROPE + at[None, :], k, mask=exists[:, None] & in_rope[None, :])


def gather(
    c_kv: Tensor,
    k_pe: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.gather`."""
    require_contiguous_rows(c_kv=c_kv, k_pe=k_pe, kv_slots=kv_slots)
    num_entries, rank, rope = kv_slots.numel(), c_kv.shape[-1], k_pe.shape[-1]
    latent = torch.empty(num_entries, rank, dtype=c_kv.dtype, device=c_kv.device)
    keys = torch.empty(num_entries, rope, dtype=k_pe.dtype, device=k_pe.device)
    if kv_delta is not None:
        require_contiguous_rows(kv_delta=kv_delta)
    if num_entries == 0:
        return latent, keys
    _gather_kernel[(triton.cdiv(num_entries, BLOCK_N),)](
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0), kv_slots, kv_delta, inv_freq, latent, keys, num_entries,
        RANK=rank, ROPE=rope, INTERLEAVED=interleaved(layout), TURNED=kv_delta is not None,
        BLOCK_N=BLOCK_N, BLOCK_RANK=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(rope // 2),
    )  # fmt: skip
    return latent, keys
