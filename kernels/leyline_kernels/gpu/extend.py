"""Absorbed extend: blocks of queries x heads of one sequence over its entries, causal by logical index.

For short extends over long lists; see `split` for how blocks and their entries are shared out to the programs. The
host needs neither the lengths nor a sync: each program finds its block on the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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

# 64 rows x rank 512 of fp32 sums fill half of the registers, two stages of 64 entries the shared memory: 16, 64 and 128
# queries over 32k entries take 120, 380 and 730 us on an H200; with three stages of 32 entries 132, 453 and 864.
BF16 = Tiling(block_n=64, num_warps=8, num_stages=2, programs=1, block_m=64)
# fp32 dots run without tensor cores from shared memory: the smallest tiles.
FP32 = Tiling(block_n=16, num_warps=4, num_stages=1, programs=2)


@triton.jit
def _line(q_indptr, kv_len, num_seqs, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    """Of every sequence: first query and end, tiles of one block, tiles of all, tiles up to its end. [BLOCK_SEQS]."""
    b = tl.arange(0, BLOCK_SEQS)
    in_batch = b < num_seqs
    q_begin = tl.load(q_indptr + b, mask=in_batch, other=0)
    q_end = tl.load(q_indptr + b + 1, mask=in_batch, other=0)
    tiles = tl.cdiv(tl.load(kv_len + b, mask=in_batch, other=0), BLOCK_N)
    of_all = tiles * tl.cdiv(q_end - q_begin, BLOCK_Q)
    return q_begin, q_end, tiles, of_all, tl.cumsum(of_all, axis=0)


@triton.jit(do_not_specialize=["num_seqs"])
def _extend_kernel(
    q_latent, stride_ql_t, stride_ql_h, q_pe, stride_qp_t, stride_qp_h, q_indptr, q_index,
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2, num_seqs,
    out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, TURNED: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    m = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * BLOCK_H + m % BLOCK_H
    q_begins, q_ends, tiles, of_all, upto = _line(q_indptr, kv_len, num_seqs, BLOCK_Q, BLOCK_N, BLOCK_SEQS)
    line_end = tl.sum(of_all, axis=0)
    each = tiles_each(line_end, tl.num_programs(0), MIN_TILES)
    at = program * each
    end = tl.minimum(at + each, line_end)

    while at < end:
        seq = tl.sum((upto <= at).to(tl.int32), axis=0)
        mine = tl.arange(0, BLOCK_SEQS) == seq
        seq_tiles = pick(tiles, mine)
        seq_begin = pick(upto - of_all, mine)
        block = (at - seq_begin) // seq_tiles
        block_begin = seq_begin + block * seq_tiles
        stop = tl.minimum(end, block_begin + seq_tiles)

        in_block = m // BLOCK_H
        t = pick(q_begins, mine) + block * BLOCK_Q + in_block
        exists = (t < pick(q_ends, mine)) & (head < H)
        last = tl.load(q_index + t, mask=exists, other=-1)
        num_entries = tl.minimum(tl.load(kv_len + seq), tl.max(last, axis=0) + 1)
        # int64: a table of many rows has more places than int32 counts bytes of.
        begin = tl.load(kv_start + seq).to(tl.int64)
        t = t.to(tl.int64)
        out, top, total = attend(
            q_latent + t * stride_ql_t + head * stride_ql_h, q_pe + t * stride_qp_t + head * stride_qp_h,
            exists, last,
            (at - block_begin) * BLOCK_N, tl.minimum((stop - block_begin) * BLOCK_N, num_entries),
            c_kv, stride_c, k_pe, stride_k, kv_slots + begin, kv_delta + begin, inv_freq, scale_log2,
            RANK, ROPE, INTERLEAVED, TURNED, BLOCK_M, BLOCK_N, BLOCK_RANK, BLOCK_HALF,
            PRECISION,
        )  # fmt: skip
        whole = (at == block_begin) & (stop == block_begin + seq_tiles)
        store_rows(
            out_latent, part, part_lse, t * H + head,
            (piece_of(program, at == program * each).to(tl.int64) * BLOCK_Q + in_block) * H + head,
            exists, whole, out, top, total, RANK, BLOCK_RANK,
        )  # fmt: skip
        at = stop


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def _join_kernel(
    q_indptr, kv_len, num_seqs, num_programs, out_latent, part, part_lse,
    H: tl.constexpr, RANK: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    head = tl.program_id(1)
    q_begins, q_ends, tiles, of_all, upto = _line(q_indptr, kv_len, num_seqs, BLOCK_Q, BLOCK_N, BLOCK_SEQS)
    each = tiles_each(tl.sum(of_all, axis=0), num_programs, MIN_TILES)
    mine = (q_begins <= t) & (t < q_ends)
    seq_tiles = pick(tiles, mine)
    in_seq = t - pick(q_begins, mine)
    join_row(
        out_latent, t.to(tl.int64) * H + head, part, part_lse, in_seq % BLOCK_Q * H + head, BLOCK_Q * H,
        pick(upto - of_all, mine) + in_seq // BLOCK_Q * seq_tiles, seq_tiles, each,
        RANK, BLOCK_PARTS, BLOCK_COLS,
    )  # fmt: skip


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
    tiling: Tiling | None = None,
) -> Tensor:
    """See `leyline_kernels.extend`. tiling: instead of the one measured to be fastest (tests, tuning)."""
    require_contiguous_rows(q_latent=q_latent, q_pe=q_pe, c_kv=c_kv, k_pe=k_pe)
    num_queries, num_heads, rank = q_latent.shape
    rope = q_pe.shape[-1]
    num_seqs = q_indptr.numel() - 1
    out_latent = torch.empty(num_queries, num_heads, rank, dtype=q_latent.dtype, device=q_latent.device)
    if num_queries == 0:
        return out_latent

    if tiling is None:
        tiling = FP32 if q_latent.dtype == torch.float32 else BF16
    block_h = min(tiling.block_m, triton.next_power_of_2(num_heads))
    block_q = tiling.block_m // block_h
    head_groups = triton.cdiv(num_heads, block_h)
    num_programs = max(1, tiling.programs * num_processors(q_latent.device) // head_groups)
    part, part_lse = part_buffers(num_programs, block_q * num_heads, rank, q_latent.device)
    line = {
        "H": num_heads,
        "RANK": rank,
        "MIN_TILES": tiling.min_tiles,
        "BLOCK_Q": block_q,
        "BLOCK_N": tiling.block_n,
        "BLOCK_SEQS": max(64, triton.next_power_of_2(num_seqs)),  # one binary for most batches
    }
    _extend_kernel[(num_programs, head_groups)](
        q_latent, q_latent.stride(0), q_latent.stride(1), q_pe, q_pe.stride(0), q_pe.stride(1), q_indptr, q_index,
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0),
        kv_start, kv_len, kv_slots, kv_slots if kv_delta is None else kv_delta, inv_freq, scale * LOG2_E, num_seqs,
        out_latent, part, part_lse,
        ROPE=rope, INTERLEAVED=interleaved(layout), TURNED=kv_delta is not None,
        BLOCK_H=block_h,
        BLOCK_RANK=max(MIN_DOT, triton.next_power_of_2(rank)),
        BLOCK_HALF=max(MIN_DOT // 2, triton.next_power_of_2(rope // 2)),
        PRECISION="ieee", num_warps=tiling.num_warps, num_stages=tiling.num_stages, **line,
    )  # fmt: skip
    block_parts, block_cols = join_blocks(num_queries * num_heads, rank)
    _join_kernel[(num_queries, num_heads, triton.cdiv(rank, block_cols))](
        q_indptr, kv_len, num_seqs, num_programs, out_latent, part, part_lse,
        BLOCK_PARTS=block_parts, BLOCK_COLS=block_cols, num_warps=4, **line,
    )  # fmt: skip
    return out_latent
