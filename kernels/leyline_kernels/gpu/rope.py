"""A layer's queries and keys turned to where they stand, in one launch: what a model does before it stores a key."""
# mypy: allow-untyped-defs, allow-incomplete-defs
# The values inside a Triton kernel have no static types.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline_kernels.gpu.pairs import require_contiguous_rows, rope_columns, turn


@triton.jit
def _rope_kernel(
    q_pe, stride_q_h, stride_q_t, k_pe, stride_k, turns, q_out, k_out,
    H: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    turns_at = turns + token * ROPE + 2 * pair
    cos = tl.load(turns_at, mask=pair < ROPE // 2, other=0.0)[None, :]
    sin = tl.load(turns_at + 1, mask=pair < ROPE // 2, other=0.0)[None, :]
    col, in_rope = rope_columns(ROPE, BLOCK_HALF, True)

    k_mask = in_rope[None, :]
    k = tl.load(k_pe + token * stride_k + col[None, :], mask=k_mask, other=0.0)
    tl.store(k_out + token * ROPE + col[None, :], turn(k, cos, sin, 1, BLOCK_HALF, True), mask=k_mask)

    head = tl.arange(0, BLOCK_H)
    q_mask = (head < H)[:, None] & in_rope[None, :]
    q = tl.load(q_pe + token * stride_q_t + head[:, None] * stride_q_h + col[None, :], mask=q_mask, other=0.0)
    q_at = q_out + (token * H + head)[:, None] * ROPE + col[None, :]
    tl.store(q_at, turn(q, cos, sin, BLOCK_H, BLOCK_HALF, True), mask=q_mask)


def rope(q_pe: Tensor, k_pe: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """See `leyline_kernels.rope`."""
    require_contiguous_rows(q_pe=q_pe, k_pe=k_pe)
    num_heads, num_tokens, rope = q_pe.shape
    # One token's heads lie together, as its query does before and after.
    q_out = torch.empty(num_tokens, num_heads, rope, dtype=q_pe.dtype, device=q_pe.device)
    k_out = torch.empty(num_tokens, rope, dtype=k_pe.dtype, device=k_pe.device)
    if num_tokens:
        _rope_kernel[(num_tokens,)](
            q_pe, q_pe.stride(0), q_pe.stride(1), k_pe, k_pe.stride(0), turns.contiguous(), q_out, k_out,
            H=num_heads, ROPE=rope,
            BLOCK_H=triton.next_power_of_2(num_heads), BLOCK_HALF=triton.next_power_of_2(rope // 2),
        )  # fmt: skip
    return q_out.transpose(0, 1), k_out
