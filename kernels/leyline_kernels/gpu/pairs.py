"""Rotary keys inside a kernel: how a tile of them is read, and how it turns.

Rows are read whole: two strided reads, of the first and of the second numbers of the pairs, made the eager
rotation of interleaved keys 12 times slower. A tile that turns is split into the two and joined again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.reference import RotaryLayout

MIN_DOT = 16
"""The smallest extent of any axis of `tl.dot`: shorter ones are padded and masked."""


@triton.jit
def rope_columns(ROPE: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets in a row, and validity, of the 2 * BLOCK_HALF columns of a tile: each half padded by itself."""
    col = tl.arange(0, 2 * BLOCK_HALF)
    if INTERLEAVED:
        offset = col
        valid = col < ROPE
    else:
        pair = col % BLOCK_HALF
        offset = col // BLOCK_HALF * (ROPE // 2) + pair
        valid = pair < ROPE // 2
    return offset, valid


@triton.jit
def angles(delta, inv_freq, ROPE: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """delta [N] int32 -> [N, BLOCK_HALF] radians in fp32."""
    pair = tl.arange(0, BLOCK_HALF)
    freq = tl.load(inv_freq + pair, mask=pair < ROPE // 2, other=0.0)
    return delta.to(tl.float32)[:, None] * freq[None, :]


@triton.jit
def turn(k_pe, cos, sin, BLOCK_N: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """R(delta) k_pe of a tile [BLOCK_N, 2 * BLOCK_HALF]: in fp32, returned in k_pe's dtype.

    RoFormer, arXiv 2104.09864, equation 15.
    """
    if INTERLEAVED:
        pairs = tl.reshape(k_pe, [BLOCK_N, BLOCK_HALF, 2])
    else:
        pairs = tl.permute(tl.reshape(k_pe, [BLOCK_N, 2, BLOCK_HALF]), [0, 2, 1])
    first, second = tl.split(pairs.to(tl.float32))
    pairs = tl.join(first * cos - second * sin, second * cos + first * sin).to(k_pe.dtype)
    if not INTERLEAVED:
        pairs = tl.permute(pairs, [0, 2, 1])
    return tl.reshape(pairs, [BLOCK_N, 2 * BLOCK_HALF])


def interleaved(layout: RotaryLayout) -> bool:
    """Raises ValueError for a layout the kernels don't know."""
    if layout not in ("interleaved", "halves"):
        raise ValueError(f"unknown rotary layout {layout!r}: expected 'interleaved' or 'halves'")
    return layout == "interleaved"


def require_contiguous_rows(**tensors: Tensor) -> None:
    """Raises ValueError for a tensor whose last axis isn't contiguous: the kernels step through it by 1."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the last axis has stride {tensor.stride(-1)}, but must be contiguous")
