"""Turning new queries and keys, against Hugging Face's own function for DeepSeek-V2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb

from leyline_kernels import reference

pytestmark = pytest.mark.usefixtures("on_triton")


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("heads", "rope"), [(1, 2), (3, 12), (16, 64)])
@pytest.mark.parametrize("side", ["kernel", "twin"])
def test_rope(
    inv_freq: Callable[[int], Tensor],
    relative_error: Callable[[Tensor, Tensor], float],
    tokens: int,
    heads: int,
    rope: int,
    side: str,
) -> None:
    """Queries and keys as a model has them: parts of wider rows, heads after tokens."""
    from leyline_kernels.gpu.rope import rope as kernel

    freq = inv_freq(rope)
    q_pe = torch.randn(tokens, heads, rope + 6, device=freq.device).transpose(0, 1)[..., 6:]
    k_pe = torch.randn(tokens, rope + 10, device=freq.device)[:, 10:]
    angle = torch.randint(0, 5000, (tokens, 1), device=freq.device) * freq
    turns = torch.polar(torch.full_like(angle, 1.3), angle)
    want_q, want_k = apply_rotary_emb(q_pe[None], k_pe[None, None], turns[None])
    got_q, got_k = (kernel if side == "kernel" else reference.rope)(q_pe, k_pe, torch.view_as_real(turns))
    assert got_q.shape == q_pe.shape
    assert got_k.shape == k_pe.shape
    assert relative_error(got_q, want_q[0]) < 1e-6
    assert relative_error(got_k, want_k[0, 0]) < 1e-6
