"""Decode: one query per sequence, all its heads (or a group of them) as the rows of one block.

Each key tile is read once for all heads of the block. See `split` for how the entries of all sequences are shared
out to the programs. A Hopper GPU has a kernel of its own for up to 16 heads: `decode_hopper`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu import decode_hopper
from leyline_kernels.gpu.attend import LOG2_E, attend
from leyline_kernels.gpu.pairs import MIN_DOT, interleaved, require_contiguous_rows
from leyline_kernels.gpu.split import (
    Tiling,
    join_blocks,
    join_row,
    num_processors,
    part_buffers,
    pick,
    piece_of,
    store_rows,
    tiles_each,
)
from leyline_kernels.reference import RotaryLayout

# 16 rows of sums leave the registers of a processor room for two programs: one loads while the other computes.
BF16 = Tiling(block_n=32, num_warps=4, num_stages=3, programs=2, min_tiles=1)
# More heads than a block of 16 rows holds: sums of up to 64 rows x rank fill half of the registers.
BF16_MANY_HEADS = Tiling(block_n=32, num_warps=8, num_stages=3, programs=1)
# fp32 dots run without tensor cores from shared memory: the smallest tiles.
FP32 = Tiling(block_n=16, num_warps=4, num_stages=1, programs=2, min_tiles=8)


@triton.jit
def _line(kv_len, num_seqs, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    """Of every sequence: its tiles, and the tiles up to its end. [BLOCK_SEQS] each."""
    b = tl.arange(0, BLOCK_SEQS)
    tiles = tl.cdiv(tl.load(kv_len + b, mask=b < num_seqs, other=0), BLOCK_N)
    return tiles, tl.cumsum(tiles, axis=0)


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_kernel(
    q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h,
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2, num_seqs,
    out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SEQS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = head < H
    tiles, upto = _line(kv_len, num_seqs, BLOCK_N, BLOCK_SEQS)
    line_end = tl.sum(tiles, axis=0)
    each = tiles_each(line_end, tl.num_programs(0), MIN_TILES)
    at = program * each
    end = tl.minimum(at + each, line_end)

    while at < end:
        b = tl.sum((upto <= at).to(tl.int32), axis=0)
        mine = tl.arange(0, BLOCK_SEQS) == b
        seq_end = pick(upto, mine)
        seq_begin = seq_end - pick(tiles, mine)
        stop = tl.minimum(end, seq_end)

        num_entries = tl.load(kv_len + b)
        # int64: a table of many rows has more places than int32 counts bytes of.
        begin = tl.load(kv_start + b).to(tl.int64)
        row = b.to(tl.int64)
        out, top, total = attend(
            q_latent + row * stride_ql_b + head * stride_ql_h, q_pe + row * stride_qp_b + head * stride_qp_h,
            exists, tl.zeros([BLOCK_H], dtype=tl.int32) + (num_entries - 1),
            (at - seq_begin) * BLOCK_N, tl.minimum((stop - seq_begin) * BLOCK_N, num_entries),
            c_kv, stride_c, k_pe, stride_k, kv_slots + begin, kv_delta + begin, inv_freq, scale_log2,
            RANK, ROPE, INTERLEAVED, TURNED, BLOCK_H, BLOCK_N, BLOCK_RANK, BLOCK_HALF,
            PRECISION,
        )  # fmt: skip
        whole = (at == seq_begin) & (stop == seq_end)
        store_rows(
            out_latent, part, part_lse, row * H + head,
            piece_of(program, at == program * each).to(tl.int64) * H + head,
            exists, whole, out, top, total, RANK, BLOCK_RANK,
        )  # fmt: skip
        at = stop


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _join_kernel(
    kv_len, num_seqs, num_programs, out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    head = tl.program_id(1)
    tiles, upto = _line(kv_len, num_seqs, BLOCK_N, BLOCK_SEQS)
    each = tiles_each(tl.sum(tiles, axis=0), num_programs, MIN_TILES)
    mine = tl.arange(0, BLOCK_SEQS) == b
    num_tiles = pick(tiles, mine)
    join_row(
        out_latent, b.to(tl.int64) * H + head, part, part_lse, head, H, pick(upto, mine) - num_tiles, num_tiles, each,
        RANK, BLOCK_PARTS, BLOCK_COLS,
    )  # fmt: skip


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
    tiling: Tiling | None = None,
) -> Tensor:
    """See `leyline_kernels.decode`. tiling: of the kernel in this file, instead of what was measured to be fastest
    (tests, tuning)."""
    require_contiguous_rows(q_latent=q_latent, q_pe=q_pe, c_kv=c_kv, k_pe=k_pe)
    num_seqs, num_heads, rank = q_latent.shape
    rope = q_pe.shape[-1]
    out_latent = torch.empty(num_seqs, num_heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    if num_seqs == 0:
        return out_latent

    fp32 = q_latent.dtype == torch.float32
    block_h = MIN_DOT if fp32 else max(MIN_DOT, min(64, triton.next_power_of_2(num_heads)))
    hopper = tiling is None and decode_hopper.supports(q_latent, q_pe)
    if tiling is None:
        tiling = FP32 if fp32 else BF16 if block_h == MIN_DOT else BF16_MANY_HEADS
        tiling = decode_hopper.TILING if hopper else tiling
    head_groups = triton.cdiv(num_heads, block_h)
    num_programs = max(1, tiling.programs * num_processors(q_latent.device) // head_groups)
    if max_len is not None:
        num_programs = min(num_programs, max(1, num_seqs * triton.cdiv(max_len, tiling.block_n * tiling.min_tiles)))
    part, part_lse = part_buffers(num_programs, num_heads, rank, q_latent.device)
    line = {
        "H": num_heads,
        "RANK": rank,
        "MIN_TILES": tiling.min_tiles,
        "BLOCK_N": tiling.block_n,
        "BLOCK_SEQS": max(64, triton.next_power_of_2(num_seqs)),  # one binary for most batches
    }
    args = (
        q_latent, q_latent.stride(0), q_latent.stride(1), q_pe, q_pe.stride(0), q_pe.stride(1),
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0),
        kv_start, kv_len, kv_slots, kv_slots if kv_delta is None else kv_delta, inv_freq, scale * LOG2_E, num_seqs,
        out_latent, part, part_lse,
    )  # fmt: skip
    how = line | {"ROPE": rope, "INTERLEAVED": interleaved(layout), "TURNED": kv_delta is not None}
    if hopper:
        decode_hopper.launch(num_programs, *args, **how)
    else:
        _decode_kernel[(num_programs, head_groups)](
            *args, **how, BLOCK_H=block_h,
            BLOCK_RANK=max(MIN_DOT, triton.next_power_of_2(rank)),
            BLOCK_HALF=max(MIN_DOT // 2, triton.next_power_of_2(rope // 2)),
            PRECISION="ieee", num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
    block_parts, block_cols = join_blocks(num_seqs * num_heads, rank)
    _join_kernel[(num_seqs, num_heads, triton.cdiv(rank, block_cols))](
        kv_len, num_seqs, num_programs, out_latent, part, part_lse,
        BLOCK_PARTS=block_parts, BLOCK_COLS=block_cols, num_warps=4, **line,
    )  # fmt: skip
    return out_latent
