"""Naive torch twins of every kernel: the meaning of the package, and what a CPU server runs.

Owns the formulas; knows nothing of sessions, schedulers or Hugging Face. Reads row by row what DESIGN.md
section 2 says: a slot is written once, attention turns its key to where it now stands.

Multi-head Latent Attention, DeepSeek-V2 (arXiv 2405.04434, section 2.1, appendix C). The package's symbols:

    symbol      shape                    meaning
    ----------  -----------------------  ------------------------------------------------------------------
    T B H S L N                          query tokens, sequences, heads, pool slots, layers, list entries
    rank        kv_lora_rank             width of the latent: 512 in DeepSeek-V2
    rope        qk_rope_head_dim         width of the rotary key: 64
    q_nope      [T, H, nope]             the query's part without position
    q_pe        [T, H, rope]             its rotary part, already turned to the query's logical index
    W_UK        [H, nope, rank]          up-projection of keys (half of kv_b_proj)
    W_UV        [H, rank, v_head_dim]    up-projection of values (the other half)
    c_kv        [S, rank]                latent after its norm; shared by all heads; has no position
    k_pe        [S, rope]                rotary key, turned to written_at; shared by all heads
    written_at  [S] int32                position a slot's k_pe was turned to when it was written
    delta       j - written_at[slot]     how far the key of the entry at logical index j has to be turned
    q_latent    [T, H, rank]             q_nope @ W_UK: the absorbed query (the caller does it)
    out_latent  [T, H, rank]             softmax(score) @ c_kv: the caller applies W_UV
    inv_freq    [rope / 2] fp32          the model's own rotary frequencies, YaRN included

    score(i, j) = scale * (q_latent_i . c_kv_j + q_pe_i . R(delta_j) k_pe_j)         for j <= i

The lists of a batch lie in one flat table: entry j of sequence b is in slot kv_slots[kv_start[b] + j], and its delta
at the same place of kv_delta. Whoever keeps the lists computes the deltas: attention never sees written_at.

R is RoFormer's rotation (arXiv 2104.09864, section 3.2.2): pair m of the key turns by delta * inv_freq[m], so
R(a) R(b) = R(a + b). It is a pure rotation: YaRN's magnitude is in k_pe and q_pe already, not applied again.

Precision: angles in fp32 (an exact integer times inv_freq), everything else in fp32, or float64 for float64
inputs: bf16 inputs are widened first, so no score is ever rounded to bf16. Only the turned key and the output
are rounded to the inputs' dtype, as in the Triton kernels.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

RotaryLayout = Literal["interleaved", "halves"]
"""Where the two numbers of rotary pair m lie in the last axis: (2m, 2m + 1), or (m, m + rope / 2)."""


def split_pairs(x: Tensor, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second number of every rotary pair: two `[..., rope / 2]`."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    if layout == "halves":
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]
    raise ValueError(f"unknown rotary layout {layout!r}: expected 'interleaved' or 'halves'")


def turn(k_pe: Tensor, delta: Tensor, inv_freq: Tensor, layout: RotaryLayout) -> Tensor:
    """R(delta) k_pe: a new tensor in k_pe's dtype.

    k_pe: [..., N, rope], turned to any position p. delta: [N] integers of either sign. inv_freq: [rope / 2].
    The result is k_pe turned to p + delta (RoFormer, arXiv 2104.09864, equation 15).
    """
    wide = torch.promote_types(k_pe.dtype, torch.float32)
    angle = delta.to(torch.float32)[:, None] * inv_freq.to(torch.float32)
    cos, sin = angle.to(wide).cos(), angle.to(wide).sin()
    turned = torch.empty_like(k_pe)
    first, second = split_pairs(k_pe.to(wide), layout)
    turned_first, turned_second = split_pairs(turned, layout)
    turned_first.copy_(first * cos - second * sin)
    turned_second.copy_(second * cos + first * sin)
    return turned


def rotate(
    k_pe: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> None:
    """See `leyline_kernels.rotate`."""
    k_pe[:, dst_slots.long()] = turn(k_pe[:, src_slots.long()], delta, inv_freq, layout)


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
    scale: float,
) -> Tensor:
    """See `leyline_kernels.decode`."""
    out_latent = torch.zeros_like(q_latent)
    for b, (start, count) in enumerate(zip(kv_start.tolist(), kv_len.tolist(), strict=True)):
        here = slice(start, start + count)
        delta = None if kv_delta is None else kv_delta[here]
        c, k = _entries(c_kv, k_pe, kv_slots[here], delta, inv_freq, layout)
        score = scale * (_wide(q_latent[b]) @ c.T + _wide(q_pe[b]) @ k.T)
        out_latent[b] = score.softmax(-1) @ c
    return out_latent


def extend(
    q_latent: Tensor,
    q_pe: Tensor,
    q_indptr: Tensor,
    q_index: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    kv_start: Tensor,
    kv_len: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
    scale: float,
) -> Tensor:
    """See `leyline_kernels.extend`."""
    out_latent = torch.zeros_like(q_latent)
    starts, lengths = kv_start.tolist(), kv_len.tolist()
    for b, (q_start, q_end) in enumerate(pairwise(q_indptr.tolist())):
        if q_start == q_end or lengths[b] == 0:
            continue
        index = q_index[q_start:q_end]
        # Entries after every query may have no slot: they are left out before anything is gathered.
        count = min(lengths[b], int(index.max()) + 1)
        here = slice(starts[b], starts[b] + count)
        delta = None if kv_delta is None else kv_delta[here]
        c, k = _entries(c_kv, k_pe, kv_slots[here], delta, inv_freq, layout)
        # [t, H, rank] @ [rank, n]: torch folds queries and heads into the rows of one matrix product.
        score = scale * (_wide(q_latent[q_start:q_end]) @ c.T + _wide(q_pe[q_start:q_end]) @ k.T)
        later = torch.arange(count, device=index.device) > index[:, None]
        score.masked_fill_(later[:, None, :], float("-inf"))
        out_latent[q_start:q_end] = score.softmax(-1) @ c
    return out_latent


def _entries(
    c_kv: Tensor,
    k_pe: Tensor,
    slots: Tensor,
    delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """One sequence's rows in list order, keys turned to where they stand: c_kv [n, rank], k_pe [n, rope]."""
    slots = slots.long()
    k = k_pe[slots]
    if delta is not None:
        k = turn(k, delta, inv_freq, layout)
    return _wide(c_kv[slots]), _wide(k)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def route(x: Tensor, weight: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.route`."""
    scores = torch.nn.functional.linear(_wide(x), weight.to(torch.promote_types(x.dtype, torch.float32))).softmax(-1)
    weights, index = scores.topk(top_k, dim=-1, sorted=False)
    return weights * scale, index.int()


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor, shared: int = 0
) -> Tensor:
    """See `leyline_kernels.experts`."""
    num_tokens, num_experts = x.shape[0], gate_up.shape[0]
    # [T, E]: what each expert's answer weighs, 0 where it isn't asked.
    weights = _wide(x).new_zeros(num_tokens, num_experts)
    weights.scatter_add_(1, top_k_index.long(), top_k_weights.to(weights.dtype))
    asked = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, top_k_index.long(), True)
    weights[:, num_experts - shared :] = 1.0
    asked[:, num_experts - shared :] = True
    out = torch.zeros_like(weights[:, :1]).expand(-1, x.shape[1]).clone()
    for e in asked.any(0).nonzero().flatten().tolist():
        tokens = asked[:, e].nonzero().flatten()
        inner = silu_mul(_wide(x[tokens]) @ _wide(gate_up[e]).T)
        out[tokens] += weights[tokens, e, None] * (inner @ _wide(down[e]).T)
    return out.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `leyline_kernels.silu_mul`."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def gather(
    c_kv: Tensor,
    k_pe: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.gather`."""
    slots = kv_slots.long().clamp(min=0)
    latent, keys = c_kv[slots], k_pe[slots]
    if kv_delta is not None:
        keys = turn(keys, kv_delta, inv_freq, layout)
    absent = (kv_slots < 0)[:, None]
    return latent.masked_fill_(absent, 0.0), keys.masked_fill_(absent, 0.0)


def prefill(
    q: Tensor,
    kv: Tensor,
    keys: Tensor,
    q_indptr: Tensor,
    q_index: Tensor,
    kv_indptr: Tensor,
    scale: float,
    nope: int,
) -> Tensor:
    """See `leyline_kernels.prefill`."""
    out = q.new_zeros(*q.shape[:2], kv.shape[-1] - nope)
    bounds = pairwise(kv_indptr.tolist())
    for (q_start, q_end), (kv_start, kv_end) in zip(pairwise(q_indptr.tolist()), bounds, strict=True):
        if q_start == q_end or kv_start == kv_end:
            continue
        index = q_index[q_start:q_end]
        # Entries after every query may hold anything: they are left out.
        kv_end = min(kv_end, kv_start + int(index.max()) + 1)
        expanded = _wide(kv[kv_start:kv_end]).transpose(0, 1)
        q_nope, q_pe = _wide(q[q_start:q_end]).transpose(0, 1).tensor_split([nope], dim=-1)
        score = scale * (q_nope @ expanded[..., :nope].mT + q_pe @ _wide(keys[kv_start:kv_end]).T)
        score.masked_fill_(torch.arange(kv_end - kv_start, device=index.device) > index[:, None], float("-inf"))
        out[q_start:q_end] = (score.softmax(-1) @ expanded[..., nope:]).transpose(0, 1)
    return out


def rope(q_pe: Tensor, k_pe: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.rope`."""
    cos, sin = turns.unbind(-1)
    turned = torch.empty_like(q_pe), torch.empty_like(k_pe)
    for before, after in zip((q_pe, k_pe), turned, strict=True):
        first, second = split_pairs(_wide(before), "interleaved")
        after[..., 0::2] = first * cos - second * sin
        after[..., 1::2] = second * cos + first * sin
    return turned
