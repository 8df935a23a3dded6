"""Eager rotation: turned copies of keys, in all layers, in one launch.

A program takes a block of list entries, computes their angles once and walks the layers with them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.pairs import angles, interleaved, require_contiguous_rows, rope_columns, turn
from leyline_kernels.reference import RotaryLayout

BLOCK_N = 32
PROGRAMS = 8192
"""About how many programs fill the chip; short lists spread their layers over more of them."""


@triton.jit
def _rotate_kernel(
    k_pe, src_slots, dst_slots, delta, inv_freq,
    num_entries, num_layers, stride_layer, stride_slot,
    ROPE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_N: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = entry < num_entries
    src = tl.load(src_slots + entry, mask=exists, other=0).to(tl.int64)
    dst = tl.load(dst_slots + entry, mask=exists, other=0).to(tl.int64)
    by = tl.load(delta + entry, mask=exists, other=0)

    angle = angles(by, inv_freq, ROPE, BLOCK_HALF)
    cos = tl.cos(angle)
    sin = tl.sin(angle)

    at, in_rope = rope_columns(ROPE, BLOCK_HALF, INTERLEAVED)
    mask = exists[:, None] & in_rope[None, :]
    for layer in range(tl.program_id(1), num_layers, tl.num_programs(1)):
        base = k_pe + tl.cast(layer, tl.int64) * stride_layer
        k = tl.load(base + src[:, None] * stride_slot + at[None, :], mask=mask, other=0.0)
        k = turn(k, cos, sin, BLOCK_N, BLOCK_HALF, INTERLEAVED)
        tl.store(base + dst[:, None] * stride_slot + at[None, :], k, mask=mask)


def rotate(
    k_pe: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> None:
    """See `leyline_kernels.rotate`."""
    require_contiguous_rows(k_pe=k_pe)
    num_layers, _, rope = k_pe.shape
    num_entries = src_slots.numel()
    if num_entries == 0:
        return
    blocks = triton.cdiv(num_entries, BLOCK_N)
    _rotate_kernel[(blocks, min(num_layers, triton.cdiv(PROGRAMS, blocks)))](
        k_pe, src_slots, dst_slots, delta, inv_freq,
        num_entries, num_layers, k_pe.stride(0), k_pe.stride(1),
        ROPE=rope, BLOCK_HALF=triton.next_power_of_2(rope // 2), BLOCK_N=BLOCK_N,
        INTERLEAVED=interleaved(layout), num_warps=8,
    )  # fmt: skip
