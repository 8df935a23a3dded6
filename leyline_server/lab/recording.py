"""The logits behind each token, taken where the runner samples: the one place through which all of them pass.

The engine runs as it is. Beyond one request at a time nothing is assumed of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leyline_proto.refusal import Refusal
from leyline_server.engine.engine import EndReason, HitReport
from leyline_server.engine.local import LocalEngine
from leyline_server.sampling import Sampler, SamplingParams, draw


class RecordingSampler(Sampler):
    """Never greedy to the runner, so that every row of logits comes by; keeps it."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.logits: list[Tensor] = []

    @property
    def greedy(self) -> bool:
        return False


def recording_draw(logits: Tensor, samplers: Sequence[Sampler], indices: Sequence[int]) -> Tensor:
    """As `sampling.draw`. It is for an engine whose `runner.draw` it becomes."""
    for row, sampler, index in zip(logits, samplers, indices, strict=True):
        if isinstance(sampler, RecordingSampler):
            assert index == len(sampler.logits)
            sampler.logits.append(row.clone())
    return draw(logits, samplers, indices)


def divergence(want: Tensor, got: Tensor) -> list[float]:
    """KL(want || got) of each row of logits, in nats (Kullback and Leibler 1951)."""
    p, q = (logits.double().log_softmax(-1) for logits in (want, got))
    return [max(0.0, float(row)) for row in (p.exp() * (p - q)).sum(-1)]


@contextmanager
def recording(engine: LocalEngine) -> Iterator[None]:
    """Within it, requests with a `RecordingSampler` keep their logits."""
    before, engine.runner.draw = engine.runner.draw, recording_draw
    try:
        yield
    finally:
        engine.runner.draw = before


@dataclass
class Asked:
    """The listener of one request, and what it was told. Logits of a step launched for nothing are left out."""

    sampler: RecordingSampler
    tokens: list[int] = field(default_factory=list)
    report: HitReport | None = None
    end: EndReason | None = None
    error: Refusal | None = None

    def started(self, report: HitReport) -> None:
        self.report = report

    def token(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return False

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        self.end, self.error = reason, error

    @property
    def logits(self) -> Tensor:
        """[tokens, vocab] fp32 on the CPU: row i is what token i was chosen from."""
        return torch.stack([row.float().cpu() for row in self.sampler.logits[: len(self.tokens)]])
