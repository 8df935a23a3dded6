"""Expanded prefill: a block of one head's queries over its sequence's expanded keys and values, causal by index.

Per head and pair nope + rope + v multiply-adds, against the absorbed form's 2 * rank + rope: worth expanding the
entries for once enough queries read them. Tiles in front of a block's smallest index need no mask; with gaps
between the indices the masked rest may be long. The grid is larger than the work by at most one block per
sequence: each program finds its block on the device, so the host needs neither the lengths nor a sync.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.attend import LOG2_E
from leyline_kernels.gpu.pairs import MIN_DOT, require_contiguous_rows
from leyline_kernels.gpu.split import num_processors


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut."""

    block_m: int
    """Queries of one head a program takes."""
    block_n: int
    """Entries it reads at once."""
    num_warps: int
    num_stages: int
    head_group: int = 0
    """Heads whose blocks are launched together, heaviest first; 0: `choose_heads`."""


LONG = Tiles(block_m=128, block_n=64, num_warps=8, num_stages=3)
SHORT = Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2)
EXACT = Tiles(block_m=MIN_DOT, block_n=MIN_DOT, num_warps=4, num_stages=1)
"""fp32: dots run without tensor cores, from shared memory."""

HALVINGS = tl.constexpr(17)
"""Steps that find one of 2**17 weights, each a block of queries long: over a million entries at 16 queries a block.

Unrolled: behind a loop in front of the main one, Triton 3.7 no longer sees that the rows are contiguous.
"""

SETTLE = True
"""Use the sums, by an instruction that is none, before a tile's scores are begun.

Else Triton leaves the sums' wgmma running into them, and ptxas, which sees scores zeroed while one runs, makes every
wgmma of the loop wait for the one before (its warning C7515).
"""

JOIN_ROWS = 16

MIN_SPLIT, MAX_SPLITS = 256, 8
"""Entries a program reads at least; into how many ranges at most few queries' entries are split.
Each power of two is compiled by itself, and a server compiles them all before it serves."""

MIN_SEQS = 64
"""Up to so many sequences are served by one binary: a server's requests at once, by default."""

L2_BYTES = 32 * 2**20
"""Expanded entries of the heads in flight: these are read by all their blocks, an H200's L2 cache holds 50 MB."""

MIN_ROUNDS = 3
"""Rounds of the chip that heads launched together fill at least, even beyond L2_BYTES: of blocks of very different
weight, as with queries in holes, the heavy ones of the last heads would begin when all else is done."""


@triton.jit
def _find_heaviest(q_indptr, q_index, num_seqs, place, BLOCK_M: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    """Sequence and first query row of the place-th heaviest block, when each sequence's queries are cut in turn.

    Heavy means many entries to read, counted in blocks as if a sequence's queries were consecutive: the last one
    has the last query's index, each one before it one less. Gaps make the order worse, not wrong.
    The sequence is num_seqs for the spare blocks at the end of the grid.
    """
    b = tl.arange(0, BLOCK_SEQS)
    in_batch = b < num_seqs
    begin = tl.load(q_indptr + b, mask=in_batch, other=0)
    end = tl.load(q_indptr + b + 1, mask=in_batch, other=0)
    blocks = tl.cdiv(end - begin, BLOCK_M)
    top = tl.maximum(tl.load(q_index + end - 1, mask=blocks > 0, other=0) // BLOCK_M, blocks - 1)

    # The weight of the place-th: at most `place` blocks weigh `above` or more, more than that weigh `weight`.
    weight = tl.min(top, axis=0) * 0
    above = tl.max(top, axis=0) + 1
    for _ in tl.static_range(HALVINGS):
        middle = (weight + above) // 2
        as_heavy = tl.sum(tl.minimum(tl.maximum(top - middle + 1, 0), blocks), axis=0)
        weight = tl.where(as_heavy > place, middle, weight)
        above = tl.where(as_heavy > place, above, middle)

    heavier = tl.minimum(tl.maximum(top - weight, 0), blocks)
    here = tl.minimum(tl.maximum(top - weight + 1, 0), blocks) - heavier
    mine = (here > 0) & (tl.cumsum(here, axis=0) - 1 == place - tl.sum(heavier, axis=0))
    seq = tl.where(tl.sum(mine.to(tl.int32), axis=0) > 0, tl.sum(tl.where(mine, b, 0), axis=0), num_seqs)
    first_row = tl.sum(tl.where(mine, begin + (blocks - 1 - heavier) * BLOCK_M, 0), axis=0)
    return seq, first_row


@triton.jit
def _load(rows, col, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile of rows [R] of pointers; columns beyond WIDTH, and with MASKED rows that aren't valid, are 0."""
    at = rows[:, None] + col[None, :]
    if MASKED:
        tile = tl.load(at, mask=valid[:, None] & (col < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(col < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _walk(
    out, top, total, q_nope, q_pe, last, lo, hi, kv, stride_kv, keys, stride_k, scale_log2,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Online softmax of a block of rows over the entries [lo, hi); without MASKED whole tiles that every row sees.

    kv, keys: pointers to the sequence's first entry (kv: of this head)
    """
    nope_at = tl.arange(0, BLOCK_NOPE)
    rope_at = tl.arange(0, BLOCK_ROPE)
    v_at = tl.arange(0, BLOCK_V)
    offset = tl.arange(0, BLOCK_N)
    for start in range(lo, hi, BLOCK_N):
        valid = start + offset < hi
        if SETTLE:
            out = tl.inline_asm_elementwise("", "=f,0", [out], dtype=tl.float32, is_pure=False, pack=1)
        row = tl.cast(start, tl.int64)
        kv_rows = kv + row * stride_kv + offset * stride_kv
        k_rows = keys + row * stride_k + offset * stride_k
        k_nope = _load(kv_rows, nope_at, valid, NOPE, BLOCK_NOPE, MASKED)
        k_pe = _load(k_rows, rope_at, valid, ROPE, BLOCK_ROPE, MASKED)
        v = _load(kv_rows + NOPE, v_at, valid, V, BLOCK_V, MASKED)

        score = tl.dot(q_nope, tl.trans(k_nope), input_precision=PRECISION)
        score = tl.dot(q_pe, tl.trans(k_pe), acc=score, input_precision=PRECISION)
        if MASKED:
            seen = start + offset[None, :] <= last[:, None]
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1) * scale_log2)
        shift = new_top
        if MASKED:
            # A row that has seen nothing yet: subtract 0, not -inf, from its scores.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * scale_log2 - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        out = tl.dot(p.to(v.dtype), v, acc=out * fade[:, None], input_precision=PRECISION)
        top = new_top
    return out, top, total


@triton.jit
def _store(
    out, part, part_lse, row, exists, split, acc, top, total,
    V: tl.constexpr, BLOCK_V: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes a block's rows: the result where one program read all entries, else its part and log2-sum-exp2.

    row: [BLOCK_M] int64 index into out [rows, V], part [rows, NUM_SPLITS, V] and part_lse [rows, NUM_SPLITS]
    """
    col = tl.arange(0, BLOCK_V)
    mask = exists[:, None] & (col < V)[None, :]
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    if NUM_SPLITS == 1:
        tl.store(out + row[:, None] * V + col[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        piece = row * NUM_SPLITS + split
        tl.store(part_lse + piece, tl.where(empty, float("-inf"), top + tl.log2(total)), mask=exists)
        tl.store(part + piece[:, None] * V + col[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _join_kernel(
    out, part, part_lse, num_rows,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^lse_s part_s / sum_s 2^lse_s; a row without entries becomes 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_V)
    exists = row < num_rows
    mask = exists[:, None] & (col < V)[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_V], dtype=tl.float32)
    top = tl.full([BLOCK_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    for split in range(NUM_SPLITS):
        piece = row * NUM_SPLITS + split
        lse = tl.load(part_lse + piece, mask=exists, other=float("-inf"))
        values = tl.load(part + piece[:, None] * V + col[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - shift)
        weight = tl.exp2(lse - shift)
        total = total * fade + weight
        acc = acc * fade[:, None] + values * weight[:, None]
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * V + col[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "head_group"])
def _prefill_kernel(
    q, stride_q_t, stride_q_h, kv, stride_kv_n, stride_kv_h, keys, stride_k,
    q_indptr, q_index, kv_indptr, num_seqs, head_group, scale_log2, out, part, part_lse,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SEQS: tl.constexpr,
    PRECISION: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.num_programs(0) // H
    group = tl.program_id(0) // (num_blocks * head_group)
    in_group = tl.program_id(0) - group * (num_blocks * head_group)
    heads = tl.minimum(H - group * head_group, head_group)
    head = group * head_group + in_group % heads
    seq, first_row = _find_heaviest(q_indptr, q_index, num_seqs, in_group // heads, BLOCK_M, BLOCK_SEQS)
    if seq >= num_seqs:
        return
    split = tl.program_id(1)

    t = first_row + tl.arange(0, BLOCK_M)
    exists = t < tl.load(q_indptr + seq + 1)
    last = tl.load(q_index + t, mask=exists, other=-1)
    begin = tl.load(kv_indptr + seq)
    num_entries = tl.load(kv_indptr + seq + 1) - begin
    first = tl.min(tl.where(exists, last, num_entries), axis=0)
    seen = tl.minimum(num_entries, tl.max(last, axis=0) + 1)
    # Whole tiles a split, the last ones possibly none.
    per_split = tl.cdiv(tl.cdiv(seen, NUM_SPLITS), BLOCK_N) * BLOCK_N
    lo = split * per_split
    hi = tl.minimum(lo + per_split, seen)
    mask_from = tl.maximum(tl.minimum((first + 1) // BLOCK_N * BLOCK_N, hi // BLOCK_N * BLOCK_N), lo)

    t = t.to(tl.int64)
    rows = q + t * stride_q_t + head.to(tl.int64) * stride_q_h
    q_nope = _load(rows, tl.arange(0, BLOCK_NOPE), exists, NOPE, BLOCK_NOPE, True)
    q_pe = _load(rows + NOPE, tl.arange(0, BLOCK_ROPE), exists, ROPE, BLOCK_ROPE, True)
    kv += begin.to(tl.int64) * stride_kv_n + head.to(tl.int64) * stride_kv_h
    keys += begin.to(tl.int64) * stride_k

    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, top, total = _walk(
        acc, top, total, q_nope, q_pe, last, lo, mask_from, kv, stride_kv_n, keys, stride_k, scale_log2,
        NOPE, ROPE, V, False, BLOCK_N, BLOCK_NOPE, BLOCK_ROPE, BLOCK_V, PRECISION, SETTLE,
    )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, q_nope, q_pe, last, mask_from, hi, kv, stride_kv_n, keys, stride_k, scale_log2,
        NOPE, ROPE, V, True, BLOCK_N, BLOCK_NOPE, BLOCK_ROPE, BLOCK_V, PRECISION, SETTLE,
    )  # fmt: skip
    _store(out, part, part_lse, t * H + head, exists, split, acc, top, total, V, BLOCK_V, NUM_SPLITS)


def prefill(
    q: Tensor,
    kv: Tensor,
    keys: Tensor,
    q_indptr: Tensor,
    q_index: Tensor,
    kv_indptr: Tensor,
    scale: float,
    nope: int,
    tiles: Tiles | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """See `leyline_kernels.prefill`. tiles, num_splits: override the choice from the sizes (tests, tuning)."""
    require_contiguous_rows(q=q, kv=kv, keys=keys)
    num_queries, num_heads, _ = q.shape
    num_entries, rope, v_dim = kv.shape[0], keys.shape[-1], kv.shape[-1] - nope
    num_seqs = q_indptr.numel() - 1
    out = torch.empty(num_queries, num_heads, v_dim, dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return out

    if tiles is None:
        tiles = choose_tiles(num_queries, num_seqs, q.dtype)
    num_blocks = num_queries // tiles.block_m + num_seqs
    processors = num_processors(q.device)
    if num_splits is None:
        num_splits = choose_splits(num_queries, num_heads, num_entries, tiles, processors)
    head_bytes = num_entries * (nope + v_dim) * kv.element_size()
    head_group = min(tiles.head_group or choose_heads(num_heads, num_blocks, head_bytes, processors), num_heads)
    num_rows = num_queries * num_heads
    pieces = num_rows * num_splits if num_splits > 1 else 0
    part = torch.empty(pieces, v_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pieces, dtype=torch.float32, device=q.device)
    block_v = max(MIN_DOT, triton.next_power_of_2(v_dim))
    _prefill_kernel[(num_blocks * num_heads, num_splits)](
        q, q.stride(0), q.stride(1), kv, kv.stride(0), kv.stride(1), keys, keys.stride(0),
        q_indptr, q_index, kv_indptr, num_seqs, head_group, scale * LOG2_E, out, part, part_lse,
        H=num_heads, NOPE=nope, ROPE=rope, V=v_dim,
        NUM_SPLITS=num_splits,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_NOPE=max(MIN_DOT, triton.next_power_of_2(nope)),
        BLOCK_ROPE=max(MIN_DOT, triton.next_power_of_2(rope)),
        BLOCK_V=block_v,
        BLOCK_SEQS=max(MIN_SEQS, triton.next_power_of_2(num_seqs)),
        PRECISION="ieee", SETTLE=SETTLE and not triton.knobs.runtime.interpret,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _join_kernel[(triton.cdiv(num_rows, JOIN_ROWS),)](
            out, part, part_lse, num_rows, V=v_dim, BLOCK_V=block_v, BLOCK_ROWS=JOIN_ROWS, NUM_SPLITS=num_splits
        )
    return out


def choose_tiles(num_queries: int, num_seqs: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return EXACT
    return LONG if num_queries > SHORT.block_m * num_seqs else SHORT


def choose_heads(num_heads: int, num_blocks: int, head_bytes: int, processors: int) -> int:
    """How many heads, of these blocks and bytes of entries each, are launched together: groups of about one size, lest
    the last is a small one."""
    least = max(1, L2_BYTES // max(head_bytes, 1), triton.cdiv(MIN_ROUNDS * processors, num_blocks))
    return triton.cdiv(num_heads, max(1, num_heads // least))


def choose_splits(num_queries: int, num_heads: int, num_entries: int, tiles: Tiles, processors: int) -> int:
    """A power of two, since each number is compiled by itself, that fills the chip but starts no second round."""
    # Of the blocks that a sequence each may leave half empty, a graph's padding leaves most quite so: not counted.
    programs = triton.cdiv(num_queries, tiles.block_m) * num_heads
    wanted = min(2 * processors // programs, num_entries // MIN_SPLIT, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1
