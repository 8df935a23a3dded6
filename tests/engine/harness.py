"""Drives a `LocalEngine` from a test and records what it says: reports, tokens, and the logits behind each token.

Logits are taken where the runner samples, the one place through which each of them passes; the engine runs as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leyline_proto.refusal import Refusal
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.engine.engine import EndReason, GenerateParams, HitReport, RowEdit
from leyline_server.engine.local import LocalEngine
from leyline_server.engine.requests import LocalRequest
from leyline_server.lab.recording import RecordingSampler, recording_draw
from leyline_server.model.load import LoadedModel
from leyline_server.sampling import SamplingParams

NAMESPACE = ("tenant", "digest")
VOCAB = 131


@dataclass
class Run:
    """The listener of one request, and all that was seen of it."""

    report: HitReport | None = None
    tokens: list[int] = field(default_factory=list)
    end: EndReason | None = None
    error: Refusal | None = None
    stop_after: int | None = None
    request: LocalRequest | None = None

    def started(self, report: HitReport) -> None:
        assert self.report is None
        self.report = report

    def token(self, token_id: int) -> bool:
        assert self.end is None
        self.tokens.append(token_id)
        return len(self.tokens) == self.stop_after

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        assert self.end is None, "ended twice"
        self.end, self.error = reason, error

    @property
    def logits(self) -> Tensor:
        """[tokens, vocab]: row i is what token i was sampled from."""
        assert self.request is not None
        assert isinstance(self.request.sampler, RecordingSampler)
        # A step that was launched ahead may have been for nothing.
        return torch.stack(self.request.sampler.logits[: len(self.tokens)])


class Rig:
    """An engine and short names for what tests do with it. `check`: integrity after every step."""

    def __init__(
        self,
        model: LoadedModel,
        num_slots: int = 512,
        prefill_chunk: int = 64,
        max_queue: int = 32,
        check: bool = True,
        **more: Any,
    ) -> None:
        self.engine = LocalEngine(model, num_slots, prefill_chunk, max_queue, VOCAB, **more)
        self.engine.runner.draw = recording_draw
        self.check = check
        self.next_edit = 0

    def open(self, ids: Sequence[int] = (), namespace: tuple[str, ...] = NAMESPACE, reuse: Reuse = PREFIX) -> int:
        sequence = self.engine.open(namespace, reuse)
        self.engine.append(sequence, ids)
        return sequence

    def generate(
        self,
        sequence: int,
        max_tokens: int = 1,
        forced: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        stop_after: int | None = None,
        **params: Any,
    ) -> Run:
        """Queues a Generate whose logits are kept. It runs when `run` or `step` is called."""
        run = Run(stop_after=stop_after)
        sampling = sampling or SamplingParams()
        if forced:
            params["force_ids"] = tuple(forced)
        run.request = self.engine.generate(sequence, GenerateParams(max_tokens, sampling, **params), run)
        run.request.sampler = RecordingSampler(sampling)
        return run

    def compute(self, sequence: int) -> Run:
        run = Run()
        run.request = self.engine.compute(sequence, run)
        return run

    def step(self) -> bool:
        more = self.engine.step()
        if self.check:
            self.engine.check_integrity()
        return more

    def run(self) -> None:
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the engine never comes to rest")

    def logits(self, sequence: int, forced: Sequence[int] = ()) -> Tensor:
        """Generates one token, or as many as are forced, to the end; the logits behind each."""
        run = self.generate(sequence, max(1, len(forced)), forced)
        self.run()
        assert run.end is EndReason.LENGTH, (run.end, run.error)
        return run.logits

    def prefill(self, sequence: int) -> HitReport:
        run = self.compute(sequence)
        self.run()
        assert run.end is EndReason.DONE, (run.end, run.error)
        assert run.report is not None
        return run.report

    def edit(self, start: int, end: int, ids: Sequence[int] = (), **more: Any) -> RowEdit:
        self.next_edit += 1
        return RowEdit(start, end, tuple(ids), f"e{self.next_edit}", **more)

    def slots(self, sequence: int) -> Any:
        return self.engine.sequences[sequence].rows.slots.copy()

    def close_all(self) -> None:
        """Closes everything, empties the caches, and asserts that the pool is back at its start."""
        for sequence in list(self.engine.sequences):
            self.engine.close(sequence)
        self.engine.cache.clear_caches()
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert (stats.free, stats.in_use, stats.cached) == (stats.num_slots, 0, 0)


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()
