"""Attention over an editable MLA cache, and the rest of a step that would hold it up; Triton on CUDA, else torch twins.

    decode, extend     absorbed attention over lists of slots, turning keys as they are read
    gather, prefill    its expanded form: lists gathered, then every head attends by itself
    rotate             the eager rotation, for engines whose attention can't turn keys
    route, experts     a mixture of experts; silu_mul, rope: single fused operations

Owns the contract of these operations. Knows tensors only: no sessions, no model code. The symbols (c_kv, ..) stand
in `leyline_kernels.reference`. Nothing here imports Triton until a CUDA tensor arrives, so the CPU server runs without
it. The modules of `leyline_kernels.gpu` hold the kernels under the same names, for tests and benchmarks that choose one
side.
"""

from __future__ import annotations

from torch import Tensor

from leyline_kernels import reference
from leyline_kernels.reference import RotaryLayout

__all__ = [
    "RotaryLayout",
    "decode",
    "experts",
    "extend",
    "gather",
    "prefill",
    "reference",
    "rope",
    "rotate",
    "route",
    "silu_mul",
]


def rotate(
    k_pe: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    delta: Tensor,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> None:
    """Eager rotation in all layers: k_pe[:, dst] = R(delta) k_pe[:, src]. Modifies k_pe in place.

    k_pe:      [L, S, rope], last axis contiguous
    src_slots: [N] int32   slots read
    dst_slots: [N] int32   slots written, distinct; an entry may write the slot it reads, none another reads
    delta:     [N] int32   new position - position the source's key is turned to
    inv_freq:  [rope / 2] fp32
    """
    if k_pe.is_cuda:
        from leyline_kernels.gpu.rotate import rotate as rotate_on_gpu

        return rotate_on_gpu(k_pe, src_slots, dst_slots, delta, inv_freq, layout)
    return reference.rotate(k_pe, src_slots, dst_slots, delta, inv_freq, layout)


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
    max_len: int | None = None,
) -> Tensor:
    """One query per sequence over all its entries -> out_latent [B, H, rank] in q_latent's dtype.

    q_latent:   [B, H, rank]   absorbed query, last axis contiguous
    q_pe:       [B, H, rope]   turned to the query's logical index, last axis contiguous
    c_kv, k_pe: [S, rank], [S, rope]   one layer of the pool, last axis contiguous
    kv_start, kv_len: [B] int32   sequence b's entry j stands at place kv_start[b] + j of the two below, j < kv_len[b]
    kv_slots:   [N] int32      the entry's slot
    kv_delta:   [N] int32      logical index - written_at; None is the caller's promise that every delta is 0
    max_len:    a bound on the longest sequence known on the host; only the size of the launch depends on it

    Places outside the sequences (gaps of a table kept at its full size) are never read. Deltas are meant to be equal
    over long runs, as edits leave them: a tile of one delta costs no turning. A sequence without entries gives
    zeros. Never synchronises with the device: a CUDA graph may capture it.
    """
    if q_latent.is_cuda:
        from leyline_kernels.gpu.decode import decode as decode_on_gpu

        return decode_on_gpu(
            q_latent, q_pe, c_kv, k_pe, kv_start, kv_len, kv_slots, kv_delta, inv_freq, layout, scale, max_len,
        )  # fmt: skip
    return reference.decode(q_latent, q_pe, c_kv, k_pe, kv_start, kv_len, kv_slots, kv_delta, inv_freq, layout, scale)


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
    """Any number of queries per sequence, causal by logical index -> out_latent [T, H, rank].

    q_latent, q_pe: [T, H, rank], [T, H, rope], last axis contiguous
    q_indptr:   [B + 1] int32  sequence b's queries are rows [q_indptr[b], q_indptr[b + 1]); q_indptr[B] == T
    q_index:    [T] int32      logical index of each query, in any order; it sees the entries j <= q_index
    kv_slots:   [N] int32      may be -1 for an entry without KV: it must stand after its sequence's queries; unread

    The other arguments are `decode`'s. A sequence may have no queries; one without entries gives zeros.
    """
    if q_latent.is_cuda:
        from leyline_kernels.gpu.extend import extend as extend_on_gpu

        return extend_on_gpu(
            q_latent, q_pe, q_indptr, q_index,
            c_kv, k_pe, kv_start, kv_len, kv_slots, kv_delta, inv_freq, layout, scale,
        )  # fmt: skip
    return reference.extend(
        q_latent, q_pe, q_indptr, q_index,
        c_kv, k_pe, kv_start, kv_len, kv_slots, kv_delta, inv_freq, layout, scale,
    )  # fmt: skip


def route(x: Tensor, weight: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """A greedy softmax router: (weights [T, top_k] fp32, index [T, top_k] int32), a token's experts in any order.

    x:      [T, hidden], last axis contiguous
    weight: [E, hidden], any float dtype: it is widened, never x rounded
    scale:  factor of the chosen scores, which aren't normalised again (DeepSeek-V2, arXiv 2405.04434, section 2.2)
    """
    if x.is_cuda:
        from leyline_kernels.gpu.experts import route as route_on_gpu

        return route_on_gpu(x, weight, top_k, scale)
    return reference.route(x, weight, top_k, scale)


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, gate_up: Tensor, down: Tensor, shared: int = 0
) -> Tensor:
    """Mixture of experts: sum over a token's experts of weight * down (silu(gate x) * (up x)) -> [T, hidden].

    x:             [T, hidden], last axis contiguous
    top_k_index:   [T, K] int32 or int64, experts in [0, E - shared), a token's all different
    top_k_weights: [T, K] fp32 or x's dtype
    gate_up:       [E, 2 f, hidden] contiguous, an expert's gate over its up projection
    down:          [E, hidden, f] contiguous
    shared:        so many experts at the end of both answer every token, with weight 1

    Products and the sum over a token's experts are in fp32, the inner activation is rounded to x's dtype. Equal
    inputs give equal bits. Never synchronises with the device for bf16: a CUDA graph may capture it.
    """
    if x.is_cuda:
        from leyline_kernels.gpu.experts import experts as experts_on_gpu

        return experts_on_gpu(x, top_k_index, top_k_weights, gate_up, down, shared)
    return reference.experts(x, top_k_index, top_k_weights, gate_up, down, shared)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [.., 2 f], gate before up -> [.., f]. Computed in fp32, rounded once."""
    if gate_up.is_cuda:
        from leyline_kernels.gpu.experts import silu_mul as silu_mul_on_gpu

        return silu_mul_on_gpu(gate_up)
    return reference.silu_mul(gate_up)


def gather(
    c_kv: Tensor,
    k_pe: Tensor,
    kv_slots: Tensor,
    kv_delta: Tensor | None,
    inv_freq: Tensor,
    layout: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """One layer's rows in list order, packed, for the expanded form -> latent [N, rank], keys [N, rope].

    c_kv, k_pe: [S, rank], [S, rope]   one layer of the pool, last axis contiguous
    kv_slots:   [N] int32   an entry's slot; -1 for an entry without KV: its rows are 0
    kv_delta:   [N] int32   logical index - written_at, what its key is turned by; None promises that all are 0

    The results are contiguous, in the pool's dtype.
    """
    if c_kv.is_cuda:
        from leyline_kernels.gpu.gather import gather as gather_on_gpu

        return gather_on_gpu(c_kv, k_pe, kv_slots, kv_delta, inv_freq, layout)
    return reference.gather(c_kv, k_pe, kv_slots, kv_delta, inv_freq, layout)


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
    """`extend` in the expanded form, over entries that the caller has expanded -> out [T, H, v] in q's dtype.

    q:         [T, H, nope + rope]   q_nope, then q_pe turned to the query's logical index; last axis contiguous
    kv:        [N, H, nope + v]      `gather`'s latent @ kv_b_proj.T: k_nope, then values; last axis contiguous
    keys:      [N, rope]             `gather`'s, shared by all heads; last axis contiguous
    q_indptr:  [B + 1] int32  sequence b's queries are rows [q_indptr[b], q_indptr[b + 1]); q_indptr[B] == T
    q_index:   [T] int32      logical index of each query; it sees the entries j <= q_index of its sequence
    kv_indptr: [B + 1] int32  sequence b's entry j is row kv_indptr[b] + j of kv and keys

    Indices should ascend within a sequence, with any gaps: other orders are right, but slow. Rows no query sees are
    never read. A sequence may have no queries; one without entries gives zeros. Never synchronises with the device.
    """
    if q.is_cuda:
        from leyline_kernels.gpu.prefill import prefill as prefill_on_gpu

        return prefill_on_gpu(q, kv, keys, q_indptr, q_index, kv_indptr, scale, nope)
    return reference.prefill(q, kv, keys, q_indptr, q_index, kv_indptr, scale, nope)


def rope(q_pe: Tensor, k_pe: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Turns new queries and keys to where they stand, interleaved pairs: new tensors like q_pe and k_pe.

    q_pe:  [H, T, rope], last axis contiguous
    k_pe:  [T, rope], last axis contiguous
    turns: [T, rope / 2, 2] fp32   cosine and sine of each pair's angle, times YaRN's magnitude if there is one

    In fp32, rounded once, as DeepSeek-V2's modelling code does it (RoFormer, arXiv 2104.09864, equation 15).
    """
    if q_pe.is_cuda:
        from leyline_kernels.gpu.rope import rope as rope_on_gpu

        return rope_on_gpu(q_pe, k_pe, turns)
    return reference.rope(q_pe, k_pe, turns)
