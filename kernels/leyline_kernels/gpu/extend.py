"""Absorbed extend: blocks of queries x heads of one sequence over its entries, causal by logical index.

The grid is larger than the work by at most one block per sequence: each program finds its sequence on the
device, so the host needs neither the lengths nor a sync. A short extend over a long context splits the
context as decode does.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.attend import (
    LOG2_E,
    attend,
    choose_splits,
    merge,
    split_buffers,
    split_range,
    store_rows,
)
from leyline_kernels.gpu.pairs import MIN_DOT, interleaved, require_contiguous_rows
from leyline_kernels.reference import RotaryLayout


@triton.jit
def _find_block(q_indptr, num_seqs, block, BLOCK_Q: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    """Sequence and first query row of a block, when each sequence's queries are cut into blocks in turn.

    The sequence is num_seqs for the spare blocks at the end of the grid.
    """
    b = tl.arange(0, BLOCK_SEQS)
    in_batch = b < num_seqs
    begin = tl.load(q_indptr + b, mask=in_batch, other=0)
    end = tl.load(q_indptr + b + 1, mask=in_batch, other=0)
    blocks = tl.cdiv(end - begin, BLOCK_Q)
    blocks_upto = tl.cumsum(blocks, axis=0)
    seq = tl.sum(((blocks_upto <= block) & in_batch).to(tl.int32), axis=0)
    mine = b == seq
    first_row = tl.sum(tl.where(mine, begin + (block - (blocks_upto - blocks)) * BLOCK_Q, 0), axis=0)
    return seq, first_row


@triton.jit
def _extend_kernel(
    q_latent, stride_ql_t, stride_ql_h, q_pe, stride_qp_t, stride_qp_h, q_indptr, q_index, num_seqs,
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2,
    out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    seq, first_row = _find_block(q_indptr, num_seqs, tl.program_id(0), BLOCK_Q, BLOCK_SEQS)
    if seq >= num_seqs:
        return
    split = tl.program_id(2)

    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    m = tl.arange(0, BLOCK_M)
    t = first_row + m // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + m % BLOCK_H
    exists = (t < tl.load(q_indptr + seq + 1)) & (head < H)
    last = tl.load(q_index + t, mask=exists, other=-1)

    # int64: a table of many rows has more places than int32 counts bytes of.
    begin = tl.load(kv_start + seq).to(tl.int64)
    num_entries = tl.minimum(tl.load(kv_len + seq), tl.max(last, axis=0) + 1)
    lo, hi = split_range(num_entries, split, NUM_SPLITS, BLOCK_N)

    t = t.to(tl.int64)
    out, top, total = attend(
        q_latent + t * stride_ql_t + head * stride_ql_h, q_pe + t * stride_qp_t + head * stride_qp_h,
        exists, last, lo, hi,
        c_kv, stride_c, k_pe, stride_k, kv_slots + begin, kv_delta + begin, inv_freq, scale_log2,
        RANK, ROPE, INTERLEAVED, TURNED, BLOCK_M, BLOCK_N, BLOCK_RANK, BLOCK_HALF, PRECISION,
    )  # fmt: skip
    store_rows(out_latent, part, part_lse, t * H + head, exists, split, out, top, total, RANK, BLOCK_RANK, NUM_SPLITS)


def extend(
    q_latent: Tensor,
    q_pe: Tensor,
    q_indptr: Tensor,
    q_index: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
    scale: float,
    num_splits: int | None = None,
) -> Tensor:
    """See `leyline_kernels.extend`. num_splits: overrides the choice made from the sizes (tests, tuning)."""
    require_contiguous_rows(q_latent=q_latent, q_pe=q_pe, c_kv=c_kv, k_pe=k_pe)
    num_queries, num_heads, rank = q_latent.shape
    rope = q_pe.shape[-1]
    num_seqs = q_indptr.numel() - 1
    out_latent = torch.empty(num_queries, num_heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    if num_queries == 0:
        return out_latent

    fp32 = q_latent.dtype == torch.float32
    # 64 rows x rank 512 of fp32 sums fill half of the registers. fp32 dots run without tensor cores, from
    # shared memory: the smallest tiles.
    block_m = MIN_DOT if fp32 else 64
    block_h = min(block_m, triton.next_power_of_2(num_heads))
    block_q = block_m // block_h
    grid = (num_queries // block_q + num_seqs, triton.cdiv(num_heads, block_h))
    if num_splits is None:
        num_splits = choose_splits(grid[0] * grid[1], kv_slots.numel(), q_latent.device)
    part, part_lse = split_buffers(num_queries * num_heads, num_splits, rank, q_latent.device)

    _extend_kernel[(*grid, num_splits)](
        q_latent, q_latent.stride(0), q_latent.stride(1), q_pe, q_pe.stride(0), q_pe.stride(1),
        q_indptr, q_index, num_seqs,
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0),
        kv_start, kv_len, kv_slots, kv_slots if kv_delta is None else kv_delta, inv_freq, scale * LOG2_E,
        out_latent, part, part_lse,
        H=num_heads, RANK=rank, ROPE=rope,
        INTERLEAVED=interleaved(layout), TURNED=kv_delta is not None, NUM_SPLITS=num_splits,
        BLOCK_Q=block_q, BLOCK_H=block_h, BLOCK_N=16 if fp32 else 32,
        BLOCK_RANK=max(MIN_DOT, triton.next_power_of_2(rank)),
        BLOCK_HALF=max(MIN_DOT // 2, triton.next_power_of_2(rope // 2)),
        BLOCK_SEQS=triton.next_power_of_2(num_seqs),
        PRECISION="ieee", num_warps=4 if fp32 else 8, num_stages=1 if fp32 else 2,
    )  # fmt: skip
    if num_splits > 1:
        merge(out_latent, part, part_lse)
    return out_latent
