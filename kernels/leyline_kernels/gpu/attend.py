"""What decode and extend share: a block of query rows over a range of one sequence's entries.

Knows rows (one head of one query), not sequences: each row brings its last visible index.

A score needs the angle between query and key alone: R(d) k . q = k . R(-d) q. Edits move long runs of entries by one
delta, so nearly every tile has one, mostly that of the tile before: the query is turned by -delta once and kept, and
such a tile costs a comparison. A tile of several deltas turns its keys.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import triton
import triton.language as tl

from leyline_kernels.gpu.pairs import angles, rope_columns, turn

LOG2_E = 1.4426950408889634
"""Softmax is computed in powers of two: scores are multiplied by this beforehand."""

NO_DELTA = tl.constexpr(-2147483648)
"""What no key is ever moved by."""
MOST_DELTA = tl.constexpr(2147483647)


@triton.jit
def _least_and_most(by, counts):
    """Of the deltas where `counts` holds, [N] each."""
    return tl.min(tl.where(counts, by, MOST_DELTA), axis=0), tl.max(tl.where(counts, by, NO_DELTA), axis=0)


@triton.jit
def attend(
    q_latent, q_pe, exists, last,
    lo, hi,
    c_kv, stride_c, k_pe, stride_k, slots, deltas, inv_freq, scale_log2,
    RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of BLOCK_M rows over the entries [lo, hi) of one sequence.

    q_latent, q_pe: [BLOCK_M] pointers to the rows; exists: [BLOCK_M]; last: [BLOCK_M] highest index seen
    slots, deltas: pointers to the sequence's first entry; deltas are read only where TURNED
    Returns the unnormalised output [BLOCK_M, BLOCK_RANK], the rows' maxima and sums, all fp32. A row that saw
    nothing has maximum -inf and sum 0.
    """
    col = tl.arange(0, BLOCK_RANK)
    in_rank = (col < RANK)[None, :]
    pe_at, in_rope = rope_columns(ROPE, BLOCK_HALF, INTERLEAVED)
    in_rope = in_rope[None, :]

    q = tl.load(q_latent[:, None] + col[None, :], mask=exists[:, None] & in_rank, other=0.0)
    q_pe_at = q_pe[:, None] + pe_at[None, :]
    has_pe = exists[:, None] & in_rope
    # The rotary query as it meets the keys: turned by -stands.
    stands = 0
    q_turned = tl.load(q_pe_at, mask=has_pe, other=0.0)

    out = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    # Nothing is read through an invalid entry: its slot may be -1, and unused pool rows may hold NaN. Slots and
    # deltas are read a tile ahead, so that no load of this tile waits for another.
    index = lo + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + index, mask=index < hi, other=0)
    if TURNED:
        delta = tl.load(deltas + index, mask=index < hi, other=0)

    for start in range(lo, hi, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        valid = index < hi
        following = index + BLOCK_N
        at = slot.to(tl.int64)[:, None]
        c = tl.load(c_kv + at * stride_c + col[None, :], mask=valid[:, None] & in_rank, other=0.0)
        k = tl.load(k_pe + at * stride_k + pe_at[None, :], mask=valid[:, None] & in_rope, other=0.0)
        slot = tl.load(slots + following, mask=following < hi, other=0)

        score = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        score = tl.dot(q_turned, tl.trans(k), acc=score, input_precision=PRECISION)
        if TURNED:
            # Rare, so it reads the tile's keys again: as long as they have no use but the product above, they are
            # loaded ahead as c is.
            if tl.max((valid & (delta != stands)).to(tl.int32), axis=0) != 0:
                by = tl.load(deltas + index, mask=valid, other=0)
                at = tl.load(slots + index, mask=valid, other=0).to(tl.int64)[:, None]
                q_meets = tl.load(q_pe_at, mask=has_pe, other=0.0)
                k_meets = tl.load(k_pe + at * stride_k + pe_at[None, :], mask=valid[:, None] & in_rope, other=0.0)
                least, most = _least_and_most(by, valid)
                if least == most:
                    back = angles(tl.zeros([1], tl.int32) - least, inv_freq, ROPE, BLOCK_HALF)
                    q_meets = turn(q_meets, tl.cos(back), tl.sin(back), BLOCK_M, BLOCK_HALF, INTERLEAVED)
                    q_turned = q_meets
                    stands = least
                else:
                    angle = angles(by, inv_freq, ROPE, BLOCK_HALF)
                    k_meets = turn(k_meets, tl.cos(angle), tl.sin(angle), BLOCK_N, BLOCK_HALF, INTERLEAVED)
                score = tl.dot(q_meets, tl.trans(k_meets), input_precision=PRECISION)
            delta = tl.load(deltas + following, mask=following < hi, other=0)

        score = tl.dot(q, tl.trans(c), acc=score, input_precision=PRECISION)
        seen = valid[None, :] & (index[None, :] <= last[:, None])
        score = tl.where(seen, score * scale_log2, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet: subtract 0, not -inf, from its scores.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, axis=1)
        out = tl.dot(p.to(c.dtype), c, acc=out * fade[:, None], input_precision=PRECISION)
        top = new_top
    return out, top, total
