"""Eager rotation: turned copies of keys, in all layers, in one launch.

A program takes a block of list entries, computes their angles once and walks the layers with them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.pairs import angles, interleaved, require_contiguous_rows, rope_columns, turn
from leyline_kernels.reference import RotaryLayout


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the entries and layers are shared out. Any is right."""

    block_n: int = 32
    """Entries of a program, a power of two."""
    programs: int = 2048
    """About how many programs fill the chip; short lists spread their layers over more of them."""
    num_warps: int = 4
    ahead: bool = True
    """Whether a program loads the keys of its next layer before it stores those of this one."""


BLOCKS = Blocks()


@triton.jit
def _rotate_kernel(
    k_pe, src_slots, dst_slots, delta, inv_freq,
    num_entries, num_layers, stride_layer, stride_slot,
    ROPE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = entry < num_entries
    src = tl.load(src_slots + entry, mask=exists, other=0).to(tl.int64)
    dst = tl.load(dst_slots + entry, mask=exists, other=0).to(tl.int64)
    by = tl.load(delta + entry, mask=exists, other=0)

    at, in_rope = rope_columns(ROPE, BLOCK_HALF, INTERLEAVED)
    mask = exists[:, None] & in_rope[None, :]
    src_at = src[:, None] * stride_slot + at[None, :]
    dst_at = dst[:, None] * stride_slot + at[None, :]
    step = tl.num_programs(1)
    first = tl.program_id(1)
    if AHEAD:
        coming = tl.load(k_pe + tl.cast(first, tl.int64) * stride_layer + src_at, mask=mask, other=0.0)

    angle = angles(by, inv_freq, ROPE, BLOCK_HALF)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    for layer in range(first, num_layers, step):
        base = k_pe + tl.cast(layer, tl.int64) * stride_layer
        if AHEAD:
            k = coming
            following = tl.cast(step, tl.int64) * stride_layer
            coming = tl.load(base + following + src_at, mask=mask & (layer + step < num_layers), other=0.0)
        else:
            k = tl.load(base + src_at, mask=mask, other=0.0)
        k = turn(k, cos, sin, BLOCK_N, BLOCK_HALF, INTERLEAVED)
        tl.store(base + dst_at, k, mask=mask)


def rotate(
    k_pe: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    layout: RotaryLayout,
    blocks: Blocks | None = None,
) -> None:
    """See `leyline_kernels.rotate`. blocks: instead of BLOCKS (tests, tuning)."""
    require_contiguous_rows(k_pe=k_pe)
    num_layers, _, rope = k_pe.shape
    num_entries = src_slots.numel()
    if num_entries == 0:
        return
    blocks = blocks or BLOCKS
    across = triton.cdiv(num_entries, blocks.block_n)
    _rotate_kernel[(across, min(num_layers, triton.cdiv(blocks.programs, across)))](
        k_pe, src_slots, dst_slots, delta, inv_freq,
        num_entries, num_layers, k_pe.stride(0), k_pe.stride(1),
        ROPE=rope, BLOCK_HALF=triton.next_power_of_2(rope // 2), BLOCK_N=blocks.block_n,
        INTERLEAVED=interleaved(layout), AHEAD=blocks.ahead, num_warps=blocks.num_warps,
    )  # fmt: skip
