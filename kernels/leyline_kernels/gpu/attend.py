"""What decode and extend share: a block of query rows over a range of entries, and the merge of ranges.

Knows rows (one head of one query), not sequences: each row brings its last visible index. Flash-decoding:
the entries may be split over programs, each writing its part of the output and its log-sum-exp; `merge` joins
them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.pairs import angles, rope_columns, turn

LOG2_E = 1.4426950408889634
"""Softmax is computed in powers of two: scores are multiplied by this beforehand."""

MIN_SPLIT = 256
MAX_SPLITS = 128


@triton.jit
def attend(
    q_latent, q_pe, exists, last,
    lo, hi,
    c_kv, stride_c, k_pe, stride_k, slots, deltas, inv_freq, scale_log2,
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of BLOCK_M rows over the entries [lo, hi) of one sequence.

    q_latent, q_pe: [BLOCK_M] pointers to the rows; exists: [BLOCK_M]; last: [BLOCK_M] highest index seen
    slots, deltas: pointers to the sequence's first entry; deltas are read only where TURNED
    Returns the unnormalised output [BLOCK_M, BLOCK_RANK], the rows' maxima and sums, all fp32. A row that saw
    nothing has maximum -inf and sum 0.
    """
    col = tl.arange(0, BLOCK_RANK)
    in_rank = (col < RANK)[None, :]
    pe_at, in_rope = rope_columns(ROPE, BLOCK_HALF, INTERLEAVED)
    in_rope = in_rope[None, :]

    q = tl.load(q_latent[:, None] + col[None, :], mask=exists[:, None] & in_rank, other=0.0)
    q_turned = tl.load(q_pe[:, None] + pe_at[None, :], mask=exists[:, None] & in_rope, other=0.0)

    out = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    for start in range(lo, hi, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        valid = index < hi
        # Nothing is read through an invalid entry: its slot may be -1, and unused pool rows may hold NaN.
        slot = tl.load(slots + index, mask=valid, other=0).to(tl.int64)
        c = tl.load(c_kv + slot[:, None] * stride_c + col[None, :], mask=valid[:, None] & in_rank, other=0.0)
        k = tl.load(k_pe + slot[:, None] * stride_k + pe_at[None, :], mask=valid[:, None] & in_rope, other=0.0)
        if TURNED:
            delta = tl.load(deltas + index, mask=valid, other=0)
            if tl.max(tl.abs(delta), axis=0) > 0:
                angle = angles(delta, inv_freq, ROPE, BLOCK_HALF)
                k = turn(k, tl.cos(angle), tl.sin(angle), BLOCK_N, BLOCK_HALF, INTERLEAVED)

        score = tl.dot(q, tl.trans(c), input_precision=PRECISION)
        score = tl.dot(q_turned, tl.trans(k), acc=score, input_precision=PRECISION)
        seen = valid[None, :] & (index[None, :] <= last[:, None])
        score = tl.where(seen, score * scale_log2, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet: subtract 0, not -inf, from its scores.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        out = tl.dot(p.to(c.dtype), c, acc=out * fade[:, None], input_precision=PRECISION)
        top = new_top
    return out, top, total


@triton.jit
def split_range(num_entries, split, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part [lo, hi) of [0, num_entries) that one split covers: whole tiles, possibly empty."""
    per_split = tl.cdiv(tl.cdiv(num_entries, NUM_SPLITS), BLOCK_N) * BLOCK_N
    lo = split * per_split
    return lo, tl.minimum(lo + per_split, num_entries)


@triton.jit
def store_rows(
    out_latent, part, part_lse, row, exists, split, out, top, total,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes one block's rows: the result where one split did it all, else its part and log2-sum-exp2.

    row: [BLOCK_M] int64 index into out_latent [rows, RANK], part [rows, NUM_SPLITS, RANK] and
    part_lse [rows, NUM_SPLITS]
    """
    col = tl.arange(0, BLOCK_RANK)
    mask = exists[:, None] & (col < RANK)[None, :]
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    if NUM_SPLITS == 1:
        at = out_latent + row[:, None] * RANK + col[None, :]
        tl.store(at, out.to(out_latent.dtype.element_ty), mask=mask)
    else:
        piece = row * NUM_SPLITS + split
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(part_lse + piece, lse, mask=exists)
        # An empty part is never read back, so it isn't written.
        tl.store(part + piece[:, None] * RANK + col[None, :], out, mask=mask & (total > 0.0)[:, None])


@triton.jit
def _merge_kernel(
    out_latent, part, part_lse,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_RANK)
    each = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(part_lse + row * NUM_SPLITS + each, mask=each < NUM_SPLITS, other=float("-inf"))
    top = tl.max(lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), axis=0)

    out = tl.zeros([BLOCK_RANK], dtype=tl.float32)
    for split in range(NUM_SPLITS):
        weight = tl.exp2(tl.load(part_lse + row * NUM_SPLITS + split) - top)
        if weight > 0.0:  # else the part may never have been written
            at = part + (row * NUM_SPLITS + split) * RANK + col
            out += weight * tl.load(at, mask=col < RANK, other=0.0)
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_latent + row * RANK + col, out.to(out_latent.dtype.element_ty), mask=col < RANK)


def merge(out_latent: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Joins the splits: out = sum_s 2^(lse_s) part_s / sum_s 2^(lse_s). Rows without any entry become 0."""
    num_rows, num_splits, rank = part.shape
    _merge_kernel[(num_rows,)](
        out_latent, part, part_lse,
        RANK=rank, BLOCK_RANK=triton.next_power_of_2(rank),
        NUM_SPLITS=num_splits, BLOCK_SPLITS=triton.next_power_of_2(num_splits),
    )  # fmt: skip


def split_buffers(num_rows: int, num_splits: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised fp32 part [rows, splits, rank] and part_lse [rows, splits]; no rows for one split."""
    num_rows = num_rows if num_splits > 1 else 0
    part = torch.empty(num_rows, num_splits, rank, dtype=torch.float32, device=device)
    return part, torch.empty(num_rows, num_splits, dtype=torch.float32, device=device)


def choose_splits(programs: int, max_len: int, device: torch.device) -> int:
    """Splits that fill the chip at two programs a processor, of about MIN_SPLIT entries or more.

    Rounded down: a few programs more than fit at once would run in a second round by themselves. Host integers
    only: no sync.
    """
    wanted = 2 * _num_processors(device) // programs
    return max(1, min(wanted, max_len // MIN_SPLIT, MAX_SPLITS))


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
