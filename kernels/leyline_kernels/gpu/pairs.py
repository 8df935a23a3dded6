"""Rotary pairs inside a kernel: where their two numbers lie, and how they turn.

A pair's two numbers are loaded as two tiles `[.., rope / 2]`, so turning is elementwise on registers in both
layouts, and q . k is the sum of two dot products; nothing is shuffled within a tile.
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
def pair_offsets(pair, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Offsets of the first and of the second number of each rotary pair in the last axis."""
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + ROPE // 2
    return first, second


@triton.jit
def turn_pairs(first, second, cos, sin):
    """R(delta) on pairs (RoFormer, arXiv 2104.09864, equation 15): in fp32, returned in first's dtype."""
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


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
