"""Split-KV decode: one query per sequence, all its heads (or a group of them) as the rows of one block.

Each key tile is read once for all heads of the block. The number of splits comes from host integers, and each
sequence is split into equal parts on the device, so a CUDA graph holds for any lengths.
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
def _decode_kernel(
    q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h,
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2,
    out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    exists = head < H

    # int64: a table of many rows has more places than int32 counts bytes of.
    begin = tl.load(kv_start + b).to(tl.int64)
    num_entries = tl.load(kv_len + b)
    lo, hi = split_range(num_entries, split, NUM_SPLITS, BLOCK_N)

    last = tl.zeros([BLOCK_H], dtype=tl.int32) + (num_entries - 1)
    out, top, total = attend(
        q_latent + b * stride_ql_b + head * stride_ql_h, q_pe + b * stride_qp_b + head * stride_qp_h,
        exists, last, lo, hi,
        c_kv, stride_c, k_pe, stride_k, kv_slots + begin, kv_delta + begin, inv_freq, scale_log2,
        RANK, ROPE, INTERLEAVED, TURNED, BLOCK_H, BLOCK_N, BLOCK_RANK, BLOCK_HALF, PRECISION,
    )  # fmt: skip
    store_rows(out_latent, part, part_lse, b * H + head, exists, split, out, top, total, RANK, BLOCK_RANK, NUM_SPLITS)


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
    scale: float,
    max_len: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """See `leyline_kernels.decode`. num_splits: overrides the choice made from max_len (tests, tuning)."""
    require_contiguous_rows(q_latent=q_latent, q_pe=q_pe, c_kv=c_kv, k_pe=k_pe)
    num_seqs, num_heads, rank = q_latent.shape
    rope = q_pe.shape[-1]
    out_latent = torch.empty(num_seqs, num_heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    if num_seqs == 0:
        return out_latent

    fp32 = q_latent.dtype == torch.float32
    # fp32 dots run without tensor cores from shared memory: the smallest tiles.
    block_h = MIN_DOT if fp32 else max(MIN_DOT, min(64, triton.next_power_of_2(num_heads)))
    head_groups = triton.cdiv(num_heads, block_h)
    if num_splits is None:
        longest = kv_slots.numel() if max_len is None else max_len
        num_splits = choose_splits(num_seqs * head_groups, longest, q_latent.device)
    # Turning adds a load that hangs on another (slot, then written_at): one stage more hides it. 16 x 32k, H200:
    # 507 us with two stages, 400 us with three; without turning two do (227 us).
    num_stages = 1 if fp32 else 3 if kv_delta is not None else 2
    part, part_lse = split_buffers(num_seqs * num_heads, num_splits, rank, q_latent.device)

    _decode_kernel[(num_seqs, head_groups, num_splits)](
        q_latent, q_latent.stride(0), q_latent.stride(1), q_pe, q_pe.stride(0), q_pe.stride(1),
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0),
        kv_start, kv_len, kv_slots, kv_slots if kv_delta is None else kv_delta, inv_freq, scale * LOG2_E,
        out_latent, part, part_lse,
        H=num_heads, RANK=rank, ROPE=rope,
        INTERLEAVED=interleaved(layout), TURNED=kv_delta is not None, NUM_SPLITS=num_splits,
        BLOCK_H=block_h, BLOCK_N=16 if fp32 else 32,
        BLOCK_RANK=max(MIN_DOT, triton.next_power_of_2(rank)),
        BLOCK_HALF=max(MIN_DOT // 2, triton.next_power_of_2(rope // 2)),
        PRECISION="ieee", num_warps=4 if block_h <= 16 else 8, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge(out_latent, part, part_lse)
    return out_latent
