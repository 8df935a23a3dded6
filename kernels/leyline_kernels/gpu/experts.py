"""A mixture-of-experts layer for any number of tokens: routing, the experts' two products, and their sum.

Few pairs of a token and an expert (a decode step): four launches, bound by reading each chosen expert's weights once.
Many (prefill): torch's grouped product between a gather, silu_mul and combine that touch each value once. Nothing
here waits for the device, and no sum depends on the order in which programs run.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from leyline_kernels import reference
from leyline_kernels.gpu.pairs import MIN_DOT, require_contiguous_rows

MAX_PAIRS = 2560
"""Up to this many pairs the kernels here do the products, beyond it `grouped_mm`. H200, V2-Lite's shape: 332 against
435 us with 2,048 pairs, 476 against 459 with 4,096 (`benchmarks/tune_experts.py`)."""

MAX_ROUTED = 64
"""Up to this many tokens `route` is worth its reading the router's weight once for each token."""


class Tiles(NamedTuple):
    """Sizes of one product: a program makes `n` columns for `rows` pairs of one expert, `k` terms at a time."""

    rows: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Not specialised: else the first step of another batch size could compile while a graph is captured.
@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    top_k_index, pair_of_row, expert_of_block, num_blocks, num_pairs,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program e lists expert e's pairs, in order, in blocks of ROWS rows; the last block is filled up with -1."""
    e = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    hits = tl.zeros([BLOCK_E, BLOCK_P], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        _, expert = _pairs(start, top_k_index, num_pairs, NUM_EXPERTS, TOP_K, PER_TOKEN, BLOCK_P)
        hits += (expert[None, :] == each[:, None]).to(tl.int32)
    counts = tl.sum(hits, axis=1)
    blocks = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(each < e, blocks, 0), axis=0)
    count = tl.sum(tl.where(each == e, counts, 0), axis=0)

    row = first * ROWS
    for start in range(0, num_pairs, BLOCK_P):
        pair, expert = _pairs(start, top_k_index, num_pairs, NUM_EXPERTS, TOP_K, PER_TOKEN, BLOCK_P)
        mine = (expert == e).to(tl.int32)
        tl.store(pair_of_row + row + tl.cumsum(mine, axis=0) - 1, pair, mask=mine > 0)
        row += tl.sum(mine, axis=0)
    own_blocks = (count + ROWS - 1) // ROWS
    rest = row + tl.arange(0, ROWS)
    tl.store(pair_of_row + rest, tl.full([ROWS], -1, dtype=tl.int32), mask=rest < (first + own_blocks) * ROWS)
    for block in range(first, first + own_blocks):
        tl.store(expert_of_block + block, e)
    if e == 0:
        tl.store(num_blocks, tl.sum(blocks, axis=0))


@triton.jit
def _pairs(
    start, top_k_index, num_pairs,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Pairs [start, start + BLOCK_P) and their experts, -1 beyond the last: a token's chosen ones, then the shared."""
    pair = start + tl.arange(0, BLOCK_P)
    nth = pair % PER_TOKEN
    exists = pair < num_pairs
    chosen = exists & (nth < TOP_K)
    expert = tl.load(top_k_index + pair // PER_TOKEN * TOP_K + nth, mask=chosen, other=-1).to(tl.int32)
    return pair, tl.where(exists & (nth >= TOP_K), NUM_EXPERTS - PER_TOKEN + nth, expert)


@triton.jit
def _product_kernel(
    x, stride_x, weight, out, pair_of_row, expert_of_block, num_blocks,
    N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[pair] = W x[pair // PER_ROW], or silu(W_gate x) * (W_up x), of the pair's expert, for one block of pairs.

    weight: [E, N, K], or [E, 2 N, K] gate over up; out: [pairs, N]
    The weights are the left factor: its 64 rows or more let a Hopper multiply from shared memory, and the few
    pairs are the width.
    """
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(expert_of_block + block).to(tl.int64)
    pair = tl.load(pair_of_row + block * ROWS + tl.arange(0, ROWS))
    exists = pair >= 0
    pair = tl.where(exists, pair, 0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = n < N

    x_at = x + (pair // PER_ROW)[None, :] * stride_x + k[:, None]
    first_at = weight + expert * ((2 * N if GATED else N) * K) + n[:, None] * K + k[None, :]
    first = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x_mask = exists[None, :]
            w_mask = in_n[:, None]
        else:
            x_mask = exists[None, :] & (start + k < K)[:, None]
            w_mask = in_n[:, None] & (start + k < K)[None, :]
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(first_at + start)
        else:
            w = tl.load(first_at + start, mask=w_mask, other=0.0)
        first = tl.dot(w, rows, acc=first, input_precision=PRECISION)
        if GATED:
            if N % BLOCK_N == 0 and K % BLOCK_K == 0:
                w_up = tl.load(first_at + N * K + start)
            else:
                w_up = tl.load(first_at + N * K + start, mask=w_mask, other=0.0)
            up = tl.dot(w_up, rows, acc=up, input_precision=PRECISION)
    if GATED:
        first = first / (1.0 + tl.exp(-first)) * up
    at = out + pair[None, :] * N + n[:, None]
    tl.store(at, first.to(out.dtype.element_ty), mask=exists[None, :] & in_n[:, None])


@triton.jit
def _combine_kernel(
    rows, row_of_pair, top_k_weights, out,
    N: tl.constexpr, TOP_K: tl.constexpr, PER_TOKEN: tl.constexpr, MOVED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for nth in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + nth
        if MOVED:
            row = tl.load(row_of_pair + row).to(tl.int64)
        value = tl.load(rows + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        if nth < TOP_K:
            value *= tl.load(top_k_weights + token * TOP_K + nth).to(tl.float32)
        total += value
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _gather_kernel(
    x, stride_x, pair_of_row, out, row_of_pair, K: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    pair = tl.load(pair_of_row + row)
    value = tl.load(x + pair // PER_TOKEN * stride_x + k, mask=k < K, other=0.0)
    tl.store(out + row * K + k, value, mask=k < K)
    tl.store(row_of_pair + pair, row.to(tl.int32))


@triton.jit
def _silu_mul_kernel(gate_up, out, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(gate_up + row * (2 * N) + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * N) + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _logits_kernel(
    x, stride_x, weight, part,
    E: tl.constexpr, K: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (e < E)[:, None] & (k < K)[None, :]
    w = tl.load(weight + e[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
    row = tl.load(x + token * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(part + (token * NUM_SPLITS + split) * BLOCK_E + e, tl.sum(w * row[None, :], axis=1))


@triton.jit
def _route_kernel(
    part, weights, index, scale,
    E: tl.constexpr, TOP_K: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    split = tl.arange(0, BLOCK_SPLITS)
    at = part + (token * NUM_SPLITS + split)[:, None] * BLOCK_E + e[None, :]
    logits = tl.sum(tl.load(at, mask=(split < NUM_SPLITS)[:, None], other=0.0), axis=0)
    logits = tl.where(e < E, logits, float("-inf"))
    score = tl.exp(logits - tl.max(logits, axis=0))
    score = tl.where(e < E, score / tl.sum(score, axis=0), -1.0)
    for nth in tl.static_range(TOP_K):
        best = tl.max(score, axis=0)
        # The least index of those that tie; scores that are no numbers still name an expert that exists.
        which = tl.minimum(tl.min(tl.where(score == best, e, BLOCK_E), axis=0), E - 1)
        tl.store(weights + token * TOP_K + nth, best * scale)
        tl.store(index + token * TOP_K + nth, which)
        score = tl.where(e == which, -1.0, score)


def route(x: Tensor, weight: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.route`."""
    num_tokens, hidden = x.shape
    if num_tokens == 0 or num_tokens > MAX_ROUTED:
        return reference.route(x, weight, top_k, scale)
    require_contiguous_rows(x=x)
    num_experts = weight.shape[0]
    block_e = triton.next_power_of_2(num_experts)
    block_k = min(128, triton.next_power_of_2(hidden))
    splits = triton.cdiv(hidden, block_k)
    part = torch.empty(num_tokens, splits, block_e, dtype=torch.float32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    index = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x.device)
    _logits_kernel[(num_tokens, splits)](
        x, x.stride(0), weight.contiguous(), part,
        E=num_experts, K=hidden, NUM_SPLITS=splits, BLOCK_E=block_e, BLOCK_K=block_k,
    )  # fmt: skip
    _route_kernel[(num_tokens,)](
        part, weights, index, float(scale),
        E=num_experts, TOP_K=top_k, NUM_SPLITS=splits, BLOCK_E=block_e,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
    )  # fmt: skip
    return weights, index


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: int = 0,
    max_pairs: int | None = None,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    """See `leyline_kernels.experts`. max_pairs, tiles: override the choices made here (tests, tuning)."""
    require_contiguous_rows(x=x)
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("gate_up and down must be contiguous")
    per_token = top_k_index.shape[-1] + shared
    num_pairs = x.shape[0] * per_token
    if num_pairs == 0:
        return torch.zeros_like(x)
    few = num_pairs <= (MAX_PAIRS if max_pairs is None else max_pairs)
    if few or not _aligned(x, gate_up, down):
        rows = _few(x, top_k_index, gate_up, down, per_token, tiles)
        return _combine(rows, None, top_k_weights, per_token, x.dtype)
    rows, row_of_pair = _many(x, top_k_index, gate_up, down, per_token)
    return _combine(rows, row_of_pair, top_k_weights, per_token, x.dtype)


def _aligned(*tensors: Tensor) -> bool:
    """Whether `grouped_mm` takes them: it wants every row to begin at a multiple of 16 bytes."""
    return all(t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


def _few(
    x: Tensor, top_k_index: Tensor, gate_up: Tensor, down: Tensor, per_token: int, tiles: tuple[Tiles, Tiles] | None
) -> Tensor:
    """Each pair's output without its weight: [pairs, hidden] fp32."""
    num_pairs = x.shape[0] * per_token
    num_experts, hidden, width = down.shape
    over_gate_up, over_down = tiles or choose_tiles(num_pairs, num_experts, x.dtype)
    groups = group(top_k_index, num_experts, per_token, over_gate_up.rows)
    inner = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    product(x, gate_up, inner, groups, per_token, True, over_gate_up)
    rows = torch.empty(num_pairs, hidden, dtype=torch.float32, device=x.device)
    product(inner, down, rows, groups, 1, False, over_down)
    return rows


def group(top_k_index: Tensor, num_experts: int, per_token: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs in blocks of one expert each: pair_of_row [blocks * rows], expert_of_block [blocks], num_blocks [1].

    int32; what lies beyond num_blocks is not written. The last rows of an expert's last block may be -1.
    """
    num_pairs = top_k_index.shape[0] * per_token
    # Each expert has less than a block of padding, and no block is empty.
    most = min(num_pairs, num_experts + num_pairs // rows)
    pair_of_row = torch.empty(most * rows, dtype=torch.int32, device=top_k_index.device)
    expert_of_block = torch.empty(most, dtype=torch.int32, device=top_k_index.device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=top_k_index.device)
    _group_kernel[(num_experts,)](
        top_k_index.contiguous(), pair_of_row, expert_of_block, num_blocks, num_pairs,
        NUM_EXPERTS=num_experts, TOP_K=top_k_index.shape[-1], PER_TOKEN=per_token,
        ROWS=rows, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_P=128, num_warps=8,
    )  # fmt: skip
    return pair_of_row, expert_of_block, num_blocks


def product(
    x: Tensor, weight: Tensor, out: Tensor, groups: tuple[Tensor, ...], per_row: int, gated: bool, tiles: Tiles
) -> None:
    """out[pair] = W x[pair // per_row], gated or not, of each pair's expert. Writes all of out."""
    n = out.shape[1]
    _product_kernel[(triton.cdiv(n, tiles.n), groups[1].numel())](
        x, x.stride(0), weight, out, *groups,
        N=n, K=weight.shape[-1], PER_ROW=per_row, GATED=gated,
        ROWS=tiles.rows, BLOCK_N=tiles.n, BLOCK_K=tiles.k, PRECISION="ieee",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def choose_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """Tiles of gate and up, and of down. Both have the same rows."""
    if dtype == torch.float32:
        # fp32 dots run without tensor cores: the smallest tiles.
        return Tiles(MIN_DOT, 32, 32, 4, 1), Tiles(MIN_DOT, 32, 32, 4, 1)
    rows = MIN_DOT if num_pairs <= 8 * num_experts else 32
    return Tiles(rows, 64, 64, 4, 4), Tiles(rows, 64, 128, 4, 4)


def _many(x: Tensor, top_k_index: Tensor, gate_up: Tensor, down: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """Each pair's output without its weight, sorted by expert: [pairs, hidden], and where a pair stands [pairs]."""
    num_tokens, hidden = x.shape
    num_experts = gate_up.shape[0]
    # The narrowest integers: a radix sort takes a pass for each byte.
    narrow = torch.uint8 if num_experts <= 256 else torch.int16
    every = torch.arange(num_experts, dtype=narrow, device=x.device)
    always = every[num_experts - (per_token - top_k_index.shape[-1]) :].expand(num_tokens, -1)
    expert, pair_of_row = torch.cat([top_k_index.to(narrow), always], dim=1).flatten().sort(stable=True)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)

    sorted_x = torch.empty(pair_of_row.numel(), hidden, dtype=x.dtype, device=x.device)
    row_of_pair = torch.empty(pair_of_row.numel(), dtype=torch.int32, device=x.device)
    _gather_kernel[(pair_of_row.numel(),)](
        x, x.stride(0), pair_of_row, sorted_x, row_of_pair,
        K=hidden, PER_TOKEN=per_token, BLOCK_K=triton.next_power_of_2(hidden),
    )  # fmt: skip
    inner = grouped_mm(sorted_x, gate_up.transpose(1, 2), offs=ends)
    del sorted_x  # 1 GB at 32k tokens of DeepSeek-V2-Lite
    return grouped_mm(silu_mul(inner), down.transpose(1, 2), offs=ends), row_of_pair


def _combine(rows: Tensor, row_of_pair: Tensor | None, weights: Tensor, per_token: int, dtype: torch.dtype) -> Tensor:
    """Sums a token's pairs in their order, in fp32; row_of_pair: where each pair stands, None where it is its row."""
    num_tokens, hidden = rows.shape[0] // per_token, rows.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=dtype, device=rows.device)
    # Few tokens are spread over more programs.
    block = min(256 if num_tokens <= 256 else 1024, triton.next_power_of_2(hidden))
    _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
        rows, rows if row_of_pair is None else row_of_pair, weights.contiguous(), out,
        N=hidden, TOP_K=weights.shape[-1], PER_TOKEN=per_token, MOVED=row_of_pair is not None, BLOCK_N=block,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `leyline_kernels.silu_mul`."""
    width = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    num_rows = out.numel() // max(width, 1)
    if num_rows:
        block = min(2048, triton.next_power_of_2(width))
        _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](gate_up, out, N=width, BLOCK_N=block)
    return out
