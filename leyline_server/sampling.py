"""From logits to a token: temperature, top-k, top-p and a seed.

Owns the sampling of one sequence's next token. It does not know sessions; the engine keeps one `Sampler` a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    """Draws one request's tokens. The same seed and logits give the same tokens, whatever else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> int:
        """logits [vocab] fp32, finite or -inf. Draws on the host, in fp32."""
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        scores = logits.cpu()
        scores = (scores - scores.max()) / max(params.temperature, _MIN_TEMPERATURE)
        if params.top_k:
            kth = scores.topk(min(params.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        probabilities = scores.softmax(-1)
        if params.top_p < 1.0:
            # Nucleus sampling (Holtzman et al., arXiv 1904.09751): the smallest set whose mass reaches top_p.
            ordered, order = probabilities.sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= params.top_p
            outside[0] = False  # a top_p that is 0 in fp32 still leaves the likeliest
            probabilities[order[outside]] = 0.0
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
