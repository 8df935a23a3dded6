"""A decode kernel of another build, only to be measured beside `gpu/decode.py`: unmoved keys, bf16, equal lengths.

Of a Hopper processor's one program, four warps only load: scattered rows into a ring of tiles in shared memory, with
an mbarrier for each tile that is full and one for each that is free. Four others only compute, with the entries of a
tile as the 64 rows of a wgmma and the heads as its columns, so that 16 heads waste nothing: scores [entries, heads],
sums [rank, heads]. Nothing here has been measured yet.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from typing import Any

import torch
import triton
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

from leyline_kernels.gpu.attend import LOG2_E
from leyline_kernels.gpu.decode import _join_kernel
from leyline_kernels.gpu.split import join_blocks, num_processors, part_buffers

BLOCK_N = 64
STAGES = 2
# Triton 3.7 renamed it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _load_tiles(
    c_kv, stride_c, k_pe, stride_k, kv_start, kv_slots, num_entries, tiles, begin, end, c_ring, k_ring, full, free,
    RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    C_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    K_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c_index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, C_ROWS))
    k_index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, K_ROWS))
    c_col = gl.arange(0, RANK, layout=gl.SliceLayout(0, C_ROWS))
    k_col = gl.arange(0, ROPE, layout=gl.SliceLayout(0, K_ROWS))

    slots = kv_slots + gl.load(kv_start + begin // tiles).to(gl.int64) + begin % tiles * BLOCK_N
    left = num_entries - begin % tiles * BLOCK_N
    c_slot = gl.load(slots + c_index, mask=c_index < left, other=0)
    k_slot = gl.load(slots + k_index, mask=k_index < left, other=0)
    for item in range(begin, end):
        # The slots of the next tile, so that its rows wait for nothing.
        after = gl.minimum(item + 1, end - 1)
        slots = kv_slots + gl.load(kv_start + after // tiles).to(gl.int64) + after % tiles * BLOCK_N
        after_left = num_entries - after % tiles * BLOCK_N
        next_c_slot = gl.load(slots + c_index, mask=c_index < after_left, other=0)
        next_k_slot = gl.load(slots + k_index, mask=k_index < after_left, other=0)

        at = item - begin
        stage = at % STAGES
        mbarrier.wait(free.index(stage), at // STAGES & 1 ^ 1)
        c_rows = c_kv + c_slot.to(gl.int64)[:, None] * stride_c + c_col[None, :]
        k_rows = k_pe + k_slot.to(gl.int64)[:, None] * stride_k + k_col[None, :]
        # Rows past the end are filled with zeros.
        async_copy.async_copy_global_to_shared(k_ring.index(stage), k_rows, mask=(k_index < left)[:, None])
        async_copy.async_copy_global_to_shared(c_ring.index(stage), c_rows, mask=(c_index < left)[:, None])
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        c_slot, k_slot, left = next_c_slot, next_k_slot, after_left


@gluon.jit
def _compute_tiles(
    q_latent, q_pe, p_shared, num_entries, tiles, begin, end, scale_log2, part, part_lse, c_ring, k_ring, full, free,
    stride_ql_b, stride_ql_h, stride_qp_b, stride_qp_h, q_shared, q_pe_shared,
    H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    OF_HEAD: gl.constexpr = gl.SliceLayout(0, SUMS)
    Q_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    QP_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    row = gl.arange(0, RANK, layout=gl.SliceLayout(1, SUMS))
    head = gl.arange(0, H, layout=OF_HEAD)
    q_head = gl.arange(0, H, layout=gl.SliceLayout(1, Q_ROWS))[:, None]
    qp_head = gl.arange(0, H, layout=gl.SliceLayout(1, QP_ROWS))[:, None]
    q_col = gl.arange(0, RANK, layout=gl.SliceLayout(0, Q_ROWS))[None, :]
    qp_col = gl.arange(0, ROPE, layout=gl.SliceLayout(0, QP_ROWS))[None, :]

    out = gl.zeros([RANK, H], gl.float32, layout=SUMS)
    top = gl.full([H], float("-inf"), gl.float32, layout=OF_HEAD)
    total = gl.zeros([H], gl.float32, layout=OF_HEAD)
    for item in range(begin, end):
        seq = item // tiles
        tile = item % tiles
        if (item == begin) | (tile == 0):
            q_shared.store(gl.load(q_latent + seq * stride_ql_b + q_head * stride_ql_h + q_col))
            q_pe_shared.store(gl.load(q_pe + seq * stride_qp_b + qp_head * stride_qp_h + qp_col))
            out = gl.zeros([RANK, H], gl.float32, layout=SUMS)
            top = gl.full([H], float("-inf"), gl.float32, layout=OF_HEAD)
            total = gl.zeros([H], gl.float32, layout=OF_HEAD)
        at = item - begin
        stage = at % STAGES
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        fence_async_shared()
        c = c_ring.index(stage)
        score = gl.zeros([BLOCK_N, H], gl.float32, layout=SUMS)
        score = warpgroup_mma(k_ring.index(stage), q_pe_shared.permute((1, 0)), score, use_acc=False, is_async=True)
        score = warpgroup_mma(c, q_shared.permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        valid = (n < num_entries - tile * BLOCK_N)[:, None]
        score = gl.where(valid, score * scale_log2, float("-inf"))

        # No tile is empty, so the maximum is a number.
        new_top = gl.maximum(top, gl.max(score, axis=0))
        p = gl.exp2(score - new_top[None, :])
        fade = gl.exp2(top - new_top)
        total = total * fade + gl.sum(p, axis=0)
        p_shared.store(p.to(gl.bfloat16))
        fence_async_shared()
        out = warpgroup_mma(c.permute((1, 0)), p_shared, out * fade[None, :], is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        top = new_top
        # All warps have read the tile before one of them frees it.
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        if (item == end - 1) | (tile == tiles - 1):
            first = gl.maximum(begin - seq * tiles, 0)
            piece = 2 * gl.program_id(0) + gl.where(seq * tiles + first == begin, 0, 1)
            gl.store(part_lse + piece * H + head, top + gl.log2(total))
            to = part + (piece * H + head)[None, :] * RANK + row[:, None]
            gl.store(to, out / total[None, :])


@gluon.jit
def _decode_kernel(
    q_latent, stride_ql_b, stride_ql_h, q_pe, stride_qp_b, stride_qp_h, c_kv, stride_c, k_pe, stride_k,
    kv_start, kv_slots, num_entries, tiles, each, num_tiles, scale_log2, part, part_lse,
    H: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, RANK], gl.bfloat16)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROPE], gl.bfloat16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, H], gl.bfloat16)
    c_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, RANK], C)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE], K)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [H, RANK], C)
    q_pe_shared = gl.allocate_shared_memory(gl.bfloat16, [H, ROPE], K)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_N, H], P)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each of the 128 loading threads arrives when its copies have; of the computing ones, one for all.
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(free.index(stage), count=1)

    begin = gl.program_id(0) * each
    end = gl.minimum(begin + each, num_tiles)
    if begin < end:
        gl.warp_specialize(
            [
                (
                    _compute_tiles,
                    (
                        q_latent, q_pe, p_shared, num_entries, tiles, begin, end, scale_log2, part, part_lse,
                        c_ring, k_ring, full, free, stride_ql_b, stride_ql_h, stride_qp_b, stride_qp_h,
                        q_shared, q_pe_shared, H, RANK, ROPE, BLOCK_N, STAGES,
                    ),
                ),
                (
                    _load_tiles,
                    (
                        c_kv, stride_c, k_pe, stride_k, kv_start, kv_slots, num_entries, tiles, begin, end,
                        c_ring, k_ring, full, free, RANK, ROPE, BLOCK_N, STAGES,
                    ),
                ),
            ],
            [4],
            [168],
        )  # fmt: skip


def decode(
    q_latent: Tensor, q_pe: Tensor, c_kv: Tensor, k_pe: Tensor, kv_start: Tensor, kv_len: Tensor, kv_slots: Tensor,
    scale: float, num_entries: int, **_: Any,
) -> Tensor:  # fmt: skip
    """As `leyline_kernels.decode` of unmoved keys, of lists that all have num_entries entries.

    Raises ValueError if a list isn't shared by several programs: such a result the join leaves alone.
    """
    num_seqs, num_heads, rank = q_latent.shape
    programs = num_processors(q_latent.device)
    tiles = triton.cdiv(num_entries, BLOCK_N)
    each = triton.cdiv(num_seqs * tiles, programs)
    if tiles <= 2 * each:
        raise ValueError(f"{num_seqs} lists of {num_entries}: too many or too short for {programs} programs")
    out = torch.empty_like(q_latent)
    part, part_lse = part_buffers(programs, num_heads, rank, q_latent.device)
    _decode_kernel[(programs,)](
        q_latent, q_latent.stride(0), q_latent.stride(1), q_pe, q_pe.stride(0), q_pe.stride(1),
        c_kv, c_kv.stride(0), k_pe, k_pe.stride(0), kv_start, kv_slots,
        num_entries, tiles, each, num_seqs * tiles, scale * LOG2_E, part, part_lse,
        H=num_heads, RANK=rank, ROPE=q_pe.shape[-1], BLOCK_N=BLOCK_N, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    block_parts, block_cols = join_blocks(num_seqs * num_heads, rank)
    _join_kernel[(num_seqs, num_heads, triton.cdiv(rank, block_cols))](
        kv_len, num_seqs, programs, out, part, part_lse, H=num_heads, RANK=rank, MIN_TILES=1, BLOCK_N=BLOCK_N,
        BLOCK_SEQS=max(64, triton.next_power_of_2(num_seqs)),
        BLOCK_PARTS=block_parts, BLOCK_COLS=block_cols, num_warps=4,
    )  # fmt: skip
    return out
