"""Decode on a Hopper GPU: as `decode`'s own kernel, built so that loading never waits for computing.

Of a processor's one program four warps only load: scattered rows into a ring of tiles in shared memory, with an
mbarrier for each tile that is full and one for each that is free. Four others only compute, with the entries of a tile
as the 64 rows of a wgmma and the heads as its columns, so that 16 heads waste nothing: scores [entries, heads], sums
[rank, heads].

Keys are turned as in `attend`: the query is turned once for each run of entries moved by one delta. The keys of a tile
of several deltas are turned in the ring. It is written in Gluon, which has no interpreter: `decode`'s kernel is the
twin that a test compares it with.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from leyline_kernels.gpu.attend import MOST_DELTA, NO_DELTA
from leyline_kernels.gpu.split import Tiling

TILING: Final = Tiling(block_n=64, num_warps=4, num_stages=2, programs=1, min_tiles=1)
"""64 entries are the rows of one wgmma; two tiles of them and the queries fill a processor's shared memory."""

MAX_HEADS: Final = 16
RANK: Final = 512
ROPE: Final = 64

# Triton 3.7 renamed it.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def supports(q_latent: Tensor, q_pe: Tensor) -> bool:
    """Whether this kernel was built for such queries, and for the GPU they are on."""
    return (
        q_latent.dtype in (torch.bfloat16, torch.float16)
        and q_latent.shape[1] <= MAX_HEADS
        and (q_latent.shape[2], q_pe.shape[2]) == (RANK, ROPE)
        and q_latent.is_cuda
        and torch.cuda.get_device_capability(q_latent.device) == (9, 0)
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _find(kv_len, num_seqs, MIN_TILES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SEQS: gl.constexpr):
    """A program's piece of the line (see `split`): its first sequence, which tile of that, and how many tiles."""
    b = gl.arange(0, BLOCK_SEQS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    tiles = gl.cdiv(gl.load(kv_len + b, mask=b < num_seqs, other=0), BLOCK_N)
    upto = gl.associative_scan(tiles, 0, _add)
    line_end = gl.sum(tiles, axis=0)
    each = gl.maximum(gl.cdiv(line_end, gl.num_programs(0)), MIN_TILES)
    begin = gl.program_id(0) * each
    count = gl.maximum(gl.minimum(each, line_end - begin), 0)
    seq = gl.sum((upto <= begin).to(gl.int32), axis=0)
    tile = begin - gl.sum(gl.where(b < seq, tiles, 0), axis=0)
    return seq, tile, count


@gluon.jit
def _following(kv_start, kv_len, seq, entry, left, more, BLOCK_N: gl.constexpr):
    """Where the tile behind this one lies, if there are `more`: sequence, place in the table, entries left of it."""
    entry += BLOCK_N
    left -= BLOCK_N
    if (left <= 0) & more:
        seq += 1
        left = gl.load(kv_len + seq)
        while left == 0:
            seq += 1
            left = gl.load(kv_len + seq)
        entry = gl.load(kv_start + seq).to(gl.int64)
    return seq, entry, left


@gluon.jit
def _sine_and_cosine(angle):
    """Of radians in fp32, within 2e-6 as far as angles of a million: far less than 16 bits show.

    The library's take hundreds of instructions a number, and tiles that need them are few: they would run from cold.
    """
    turns = gl.floor(angle * 0.15915494309189535 + 0.5)
    # 2 pi in two parts: the first product is exact in the fused operation.
    angle = gl.fma(turns, -6.2831854820251465, angle)
    angle = gl.fma(turns, 1.7484556000744487e-07, angle)
    sine = gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    cosine = gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], gl.float32, is_pure=True, pack=1)
    return sine, cosine


@gluon.jit
def _turned(rows, valid, delta, inv_freq, ROPE: gl.constexpr, INTERLEAVED: gl.constexpr, ROWS: gl.constexpr):
    """R(delta) of each row [N] of pointers, in fp32, [N, ROPE] in the rows' dtype, in the layout ROWS.

    RoFormer, arXiv 2104.09864, equation 15. Each number is read beside the other of its pair.
    """
    col = gl.arange(0, ROPE, layout=gl.SliceLayout(0, ROWS))
    if INTERLEAVED:
        other = col ^ 1
        pair = col // 2
        first = other > col
    else:
        other = (col + ROPE // 2) % ROPE
        pair = col % (ROPE // 2)
        first = other > col
    angle = delta.to(gl.float32)[:, None] * gl.load(inv_freq + pair)[None, :]
    own = gl.load(rows[:, None] + col[None, :], mask=valid[:, None], other=0.0).to(gl.float32)
    others = gl.load(rows[:, None] + other[None, :], mask=valid[:, None], other=0.0).to(gl.float32)
    sine, cosine = _sine_and_cosine(angle)
    turned = own * cosine + others * gl.where(first[None, :], -sine, sine)
    return turned.to(rows.dtype.element_ty)


@gluon.jit
def _load_tiles(
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, seq, tile, count, c_ring, k_ring, full, free,
    RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    C_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    K_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c_index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, C_ROWS))
    k_index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, K_ROWS))
    c_col = gl.arange(0, RANK, layout=gl.SliceLayout(0, C_ROWS))
    k_col = gl.arange(0, ROPE, layout=gl.SliceLayout(0, K_ROWS))

    entry = gl.load(kv_start + seq).to(gl.int64) + tile * BLOCK_N
    left = gl.load(kv_len + seq) - tile * BLOCK_N
    c_slot = gl.load(kv_slots + entry + c_index, mask=c_index < left, other=0)
    k_slot = gl.load(kv_slots + entry + k_index, mask=k_index < left, other=0)
    for item in range(count):
        # The slots of the next tile, so that its rows wait for nothing.
        seq, entry, next_left = _following(kv_start, kv_len, seq, entry, left, item + 1 < count, BLOCK_N)
        next_c_slot = gl.load(kv_slots + entry + c_index, mask=c_index < next_left, other=0)
        next_k_slot = gl.load(kv_slots + entry + k_index, mask=k_index < next_left, other=0)

        stage = item % STAGES
        mbarrier.wait(free.index(stage), item // STAGES & 1 ^ 1)
        c_rows = c_kv + c_slot.to(gl.int64)[:, None] * stride_c + c_col[None, :]
        k_rows = k_pe + k_slot.to(gl.int64)[:, None] * stride_k + k_col[None, :]
        # Rows past the end are filled with zeros: nothing is read through an invalid entry.
        async_copy.async_copy_global_to_shared(k_ring.index(stage), k_rows, mask=(k_index < left)[:, None])
        async_copy.async_copy_global_to_shared(c_ring.index(stage), c_rows, mask=(c_index < left)[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        c_slot, k_slot, left = next_c_slot, next_k_slot, next_left


@gluon.jit
def _compute_tiles(
    q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h, k_pe, stride_k,
    kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2, out_latent, part, part_lse, seq, tile, count,
    c_ring, k_ring, q_shared, q_pe_shared, p_shared, full, free,
    H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, INTERLEAVED: gl.constexpr, TURNED: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    OF_HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    Q_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # Each warp has a whole tile's deltas: comparing them takes no shared memory.
    IN_WARP: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, BLOCK_N // 32], [1, 32], [4, 1], [1, 0]))
    dtype: gl.constexpr = c_ring.dtype
    n_pe = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PE_ROWS))
    n_score = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    n_delta = gl.arange(0, BLOCK_N, layout=IN_WARP)
    row = gl.arange(0, RANK, layout=gl.SliceLayout(1, SUMS))
    head = gl.arange(0, BLOCK_H, layout=OF_HEAD)
    q_head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, Q_ROWS))
    pe_head = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, PE_ROWS))
    q_col = gl.arange(0, RANK, layout=gl.SliceLayout(0, Q_ROWS))

    entry = gl.load(kv_start + seq).to(gl.int64) + tile * BLOCK_N
    left = gl.load(kv_len + seq) - tile * BLOCK_N
    opens = True
    piece = 2 * gl.program_id(0)
    whole = tile == 0
    # By how much the query in shared memory is turned back, and of this tile's deltas the least and the most.
    stands = NO_DELTA
    least = 0
    most = 0
    if TURNED:
        delta = gl.load(kv_delta + entry + n_delta, mask=n_delta < left, other=0)
        least = gl.min(gl.where(n_delta < left, delta, MOST_DELTA), axis=0)
        most = gl.max(gl.where(n_delta < left, delta, NO_DELTA), axis=0)
    out = gl.zeros([RANK, BLOCK_H], gl.float32, layout=SUMS)
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=OF_HEAD)
    total = gl.zeros([BLOCK_H], gl.float32, layout=OF_HEAD)
    for item in range(count):
        next_seq, next_entry, next_left = _following(kv_start, kv_len, seq, entry, left, item + 1 < count, BLOCK_N)
        if TURNED:
            delta = gl.load(kv_delta + next_entry + n_delta, mask=n_delta < next_left, other=0)
        q_pe_rows = q_pe + seq.to(gl.int64) * stride_qp_b + pe_head * stride_qp_h
        if opens:
            q_rows = q_latent + seq.to(gl.int64) * stride_ql_b + q_head * stride_ql_h
            q_shared.store(gl.load(q_rows[:, None] + q_col[None, :], mask=(q_head < H)[:, None], other=0.0))
            out = gl.zeros([RANK, BLOCK_H], gl.float32, layout=SUMS)
            top = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=OF_HEAD)
            total = gl.zeros([BLOCK_H], gl.float32, layout=OF_HEAD)
            stands = NO_DELTA
        stage = item % STAGES
        mbarrier.wait(full.index(stage), item // STAGES & 1)
        if (least != stands) | (most != stands):
            # A tile of several deltas meets the query as it is.
            one = least == most
            back = gl.zeros([BLOCK_H], gl.int32, layout=gl.SliceLayout(1, PE_ROWS)) - gl.where(one, least, 0)
            q_pe_shared.store(_turned(q_pe_rows, pe_head < H, back, inv_freq, ROPE, INTERLEAVED, PE_ROWS))
            stands = gl.where(one, least, NO_DELTA)
            if TURNED:  # noqa: SIM102  (known when it is compiled)
                if least != most:
                    by = gl.load(kv_delta + entry + n_pe, mask=n_pe < left, other=0)
                    slot = gl.load(kv_slots + entry + n_pe, mask=n_pe < left, other=0)
                    k_rows = k_pe + slot.to(gl.int64) * stride_k
                    k_ring.index(stage).store(_turned(k_rows, n_pe < left, by, inv_freq, ROPE, INTERLEAVED, PE_ROWS))
            _barrier()
        fence_async_shared()
        c = c_ring.index(stage)
        score = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, layout=SUMS)
        score = warpgroup_mma(k_ring.index(stage), q_pe_shared.permute((1, 0)), score, use_acc=False, is_async=True)
        score = warpgroup_mma(c, q_shared.permute((1, 0)), score, is_async=True)
        if TURNED:
            least = gl.min(gl.where(n_delta < next_left, delta, MOST_DELTA), axis=0)
            most = gl.max(gl.where(n_delta < next_left, delta, NO_DELTA), axis=0)
        score = warpgroup_mma_wait(0, deps=(score,))
        score = gl.where((n_score < left)[:, None], score * scale_log2, float("-inf"))

        # No tile is empty, so the maximum is a number.
        new_top = gl.maximum(top, gl.max(score, axis=0))
        p = gl.exp2(score - new_top[None, :])
        fade = gl.exp2(top - new_top)
        total = total * fade + gl.sum(p, axis=0)
        p_shared.store(p.to(dtype))
        fence_async_shared()
        out = warpgroup_mma(c.permute((1, 0)), p_shared, out * fade[None, :], is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        top = new_top
        # All warps have read the tile before one of them frees it.
        _barrier()
        mbarrier.arrive(free.index(stage), count=1)
        opens = next_seq != seq
        if opens | (item + 1 == count):
            at = seq.to(gl.int64) * H + head
            exists = head < H
            if whole & (left <= BLOCK_N):
                done = (out / total[None, :]).to(out_latent.dtype.element_ty)
                gl.store(out_latent + at[None, :] * RANK + row[:, None], done, mask=exists[None, :])
            else:
                to = piece * H + head
                gl.store(part_lse + to, top + gl.log2(total), mask=exists)
                gl.store(part + to[None, :] * RANK + row[:, None], out / total[None, :], mask=exists[None, :])
            piece = 2 * gl.program_id(0) + 1
            whole = True
        seq, entry, left = next_seq, next_entry, next_left


@gluon.jit(do_not_specialize=["num_seqs"])
def _decode_kernel(
    q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h, c_kv, stride_c, k_pe, stride_k,
    kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2, num_seqs, out_latent, part, part_lse,
    H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, INTERLEAVED: gl.constexpr, TURNED: gl.constexpr,
    MIN_TILES: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_SEQS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = c_kv.dtype.element_ty
    C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, RANK], dtype)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], dtype)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    c_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, RANK], C)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], K)
    q_shared = gl.allocate_shared_memory(dtype, [BLOCK_H, RANK], C)
    q_pe_shared = gl.allocate_shared_memory(dtype, [BLOCK_H, ROPE], K)
    p_shared = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], P)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each of the 128 loading threads arrives when its copies have; of the computing ones, one for all.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(free.index(stage), count=1)

    seq, tile, count = _find(kv_len, num_seqs, MIN_TILES, BLOCK_N, BLOCK_SEQS)
    if count > 0:
        gl.warp_specialize(
            [
                (
                    _compute_tiles,
                    (
                        q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h, k_pe, stride_k,
                        kv_start, kv_len, kv_slots, kv_delta, inv_freq, scale_log2, out_latent, part, part_lse,
                        seq, tile, count, c_ring, k_ring, q_shared, q_pe_shared, p_shared, full, free,
                        H, RANK, ROPE, INTERLEAVED, TURNED, BLOCK_H, BLOCK_N, STAGES,
                    ),
                ),
                (
                    _load_tiles,
                    (
                        c_kv, stride_c, k_pe, stride_k, kv_start, kv_len, kv_slots, seq, tile, count,
                        c_ring, k_ring, full, free, RANK, ROPE, BLOCK_N, STAGES,
                    ),
                ),
            ],
            [4],
            [168],
        )  # fmt: skip


def launch(num_programs: int, *args: Any, **constants: Any) -> None:
    """The arguments are those of `decode`'s kernel."""
    _decode_kernel[(num_programs,)](
        *args, BLOCK_H=MAX_HEADS, STAGES=TILING.num_stages, num_warps=TILING.num_warps, **constants
    )
