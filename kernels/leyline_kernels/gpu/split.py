"""How the work of a launch is split over its programs, and how the parts are joined again.

The work is one line of tiles: block after block of query rows, each with the tiles of its sequence's entries. Every
program takes an equal piece of that line, whatever the lengths are, so one long list fills the chip as well as many
short ones do. Lengths are read on the device: the grid comes from host integers alone, a CUDA graph holds for any.

A block that one program did alone is final. Of the blocks that it shares with its neighbours, at most the first and
the last of its piece, a program leaves parts 2 * program and 2 * program + 1.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel covers its work. Which is fastest was measured; any is right."""

    block_n: int
    """Entries of a tile, a power of two of at least 16."""
    num_warps: int
    num_stages: int
    """Tiles in shared memory at once: loads run num_stages - 1 ahead."""
    programs: int
    """Programs for each processor of the chip."""
    min_tiles: int = 4
    """A program takes at least so many tiles: fewer parts to join when there is little to do."""
    block_m: int = 16
    """Rows of a block, a power of two of at least 16: queries x heads in extend. Decode takes its heads as they are."""


@triton.jit
def tiles_each(total, num_programs, MIN_TILES: tl.constexpr):
    """Tiles of the line that one program takes."""
    return tl.maximum(tl.cdiv(total, num_programs), MIN_TILES)


@triton.jit
def piece_of(program, at_begin):
    """Number of the part that a program leaves of a block, by whether the program begins with it."""
    return 2 * program + tl.where(at_begin, 0, 1)


@triton.jit
def pick(values, which):
    """The one element of `values` where `which` holds, 0 if none does."""
    return tl.sum(tl.where(which, values, 0), axis=0)


@triton.jit
def store_rows(
    out_latent, part, part_lse, row, piece, exists, whole, out, top, total,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Writes a block's rows: the result where one program did the whole block, else its part and log2-sum-exp2.

    row, piece: [BLOCK_M] int64 index into out_latent [rows, RANK]; into part [.., RANK] and part_lse [..]
    """
    col = tl.arange(0, BLOCK_RANK)
    mask = exists[:, None] & (col < RANK)[None, :]
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    if whole:
        at = out_latent + row[:, None] * RANK + col[None, :]
        tl.store(at, out.to(out_latent.dtype.element_ty), mask=mask)
    else:
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(part_lse + piece, lse, mask=exists)
        tl.store(part + piece[:, None] * RANK + col[None, :], out, mask=mask)


@triton.jit
def join_row(
    out_latent, row, part, part_lse, row_in_part, rows_in_part, first_tile, num_tiles, each,
    RANK: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = sum_s 2^lse_s part_s / sum_s 2^lse_s over a row's parts, for one block of its columns.

    A row without entries becomes 0. One that a single program did is final already: nothing is read or written.
    row_in_part, rows_in_part: where the row stands in each part
    first_tile, num_tiles: where its block lies on the line
    """
    col = tl.program_id(2) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    in_rank = col < RANK
    begin = first_tile // each
    num_parts = tl.where(num_tiles == 0, 0, (first_tile + num_tiles - 1) // each - begin + 1)
    if num_parts != 1:
        top = float("-inf")
        total = 0.0
        out = tl.zeros([BLOCK_COLS], dtype=tl.float32)
        for done in range(0, num_parts, BLOCK_PARTS):
            s = done + tl.arange(0, BLOCK_PARTS)
            exists = s < num_parts
            piece = piece_of(begin + s, (s > 0) | (first_tile == begin * each))
            piece = piece.to(tl.int64) * rows_in_part + row_in_part
            lse = tl.load(part_lse + piece, mask=exists, other=float("-inf"))
            values = tl.load(
                part + piece[:, None] * RANK + col[None, :], mask=exists[:, None] & in_rank[None, :], other=0.0
            )
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(lse - shift)
            fade = tl.exp2(top - shift)
            total = total * fade + tl.sum(weight, axis=0)
            out = out * fade + tl.sum(weight[:, None] * values, axis=0)
            top = new_top
        out = out / tl.where(total == 0.0, 1.0, total)
        tl.store(out_latent + row * RANK + col, out.to(out_latent.dtype.element_ty), mask=in_rank)


def part_buffers(num_programs: int, num_rows: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised fp32 part [parts, rows, rank] and part_lse [parts, rows], for blocks of num_rows."""
    part = torch.empty(2 * num_programs, num_rows, rank, dtype=torch.float32, device=device)
    return part, torch.empty(2 * num_programs, num_rows, dtype=torch.float32, device=device)


def join_blocks(num_rows: int, rank: int) -> tuple[int, int]:
    """BLOCK_PARTS and BLOCK_COLS of a join: few rows have many parts each, and need narrow blocks to fill the chip."""
    parts, cols = (64, 32) if num_rows <= 64 else (16, 128)
    return parts, min(cols, triton.next_power_of_2(rank))


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
