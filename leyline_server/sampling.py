"""From logits to tokens: temperature, top-k, top-p and a seed, for all rows of a step at once.

Owns the draw. A request's numbers come from its seed and the count of tokens before this one, nothing else: the same
seed and logits give the same tokens, whatever shares the step and wherever it runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

_MIN_TEMPERATURE: Final = 1e-6
"""Below it a division would overflow fp32; it is greedy but for exact ties."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_p in (0, 1]; top_k >= 1, or 0 for all; without a seed each request differs."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class Sampler:
    """One request's parameters, and the uniform number behind each of its tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._seed = secrets.randbits(64) if params.seed is None else params.seed

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    def uniform(self, index: int) -> float:
        """In [0, 1), for the token `index` of the request."""
        # Philox is a counter-based generator (Salmon et al., SC 2011): any index without the ones before it.
        return float(np.random.Generator(np.random.Philox(key=self._seed % (1 << 64), counter=index)).random())


def greedy(logits: Tensor) -> Tensor:
    """logits [B, vocab] -> the likeliest ids [B] int64."""
    return logits.argmax(-1)


def draw(logits: Tensor, samplers: Sequence[Sampler], indices: Sequence[int]) -> Tensor:
    """Ids [B] int64 from logits [B, vocab] fp32, finite or -inf: row i is token `indices[i]` of request i.

    Greedy rows may stand among them. Never synchronises with the device.
    """
    params = [sampler.params for sampler in samplers]
    host = torch.tensor(
        [
            [p.temperature, p.top_p, p.top_k, 0.0 if s.greedy else s.uniform(i)]
            for p, s, i in zip(params, samplers, indices, strict=True)
        ],
        dtype=torch.float32,
    )
    if logits.is_cuda:
        host = host.pin_memory()
    temperature, top_p, top_k, uniform = host.to(logits.device, non_blocking=True)[..., None].unbind(1)  # each [B, 1]
    # Stable, so that of equal ones the first comes first, as `greedy` has it.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    scores = (ordered - ordered[:, :1]) / temperature.clamp(min=_MIN_TEMPERATURE)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probabilities = scores.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Nucleus sampling (Holtzman et al., arXiv 1904.09751): the smallest set whose mass reaches top_p. The likeliest
    # stays, also with a top_p that is 0 in fp32.
    outside = (top_p < 1.0) & (before >= top_p) & (rank > 0)
    kept = probabilities.masked_fill(outside, 0.0)
    mass = kept.cumsum(-1)
    # The first whose mass exceeds a uniform share of the whole; sums are rounded, so never beyond the last that counts.
    last = (kept > 0).sum(-1, keepdim=True) - 1
    chosen = torch.minimum((mass <= uniform * mass[:, -1:]).sum(-1, keepdim=True), last)
    chosen = torch.where(temperature == 0.0, torch.zeros_like(chosen), chosen)
    return order.gather(-1, chosen)[:, 0]
