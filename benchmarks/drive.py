"""Drives an engine through its own seam and notes when each thing happened. One thread; nothing here is timed itself.

Owns the listener that takes times, and short names for what benchmarks do with an engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.registry import NAMESPACE
from leyline_proto.refusal import Refusal
from leyline_server.engine.engine import EndReason, Engine, GenerateParams, HitReport, Request, SequenceId


@dataclass(slots=True, eq=False)
class Watch:
    """The listener of one request: when it was asked for, when each token came, when it ended. Seconds of one clock."""

    begun: float = field(default_factory=time.perf_counter)
    report: HitReport | None = None
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: EndReason | None = None
    ended_at: float = 0.0
    error: Refusal | None = None
    request: Request | None = None

    def started(self, report: HitReport) -> None:
        self.report = report

    def token(self, token_id: int) -> bool:
        self.times.append(time.perf_counter())
        self.tokens.append(token_id)
        return False

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        self.end, self.error, self.ended_at = reason, error, time.perf_counter()

    def cancel(self) -> None:
        assert self.request is not None
        self.request.cancel()

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begun

    @property
    def wall(self) -> float:
        return self.ended_at - self.begun

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def open_with(engine: Engine, ids: Sequence[int]) -> SequenceId:
    sequence = engine.open(NAMESPACE)
    engine.append(sequence, ids)
    return sequence


def generate(engine: Engine, sequence: SequenceId, max_tokens: int, force_ids: Sequence[int] = ()) -> Watch:
    """Queues a greedy Generate that nothing ends before `max_tokens`."""
    watch = Watch()
    watch.request = engine.generate(sequence, GenerateParams(max_tokens, force_ids=tuple(force_ids)), watch)
    return watch


def compute(engine: Engine, sequence: SequenceId) -> Watch:
    watch = Watch()
    watch.request = engine.compute(sequence, watch)
    return watch


def run(engine: Engine, *watches: Watch) -> None:
    """Steps until all have ended. Raises what a request failed with, RuntimeError when nothing goes on any more."""
    while any(watch.end is None for watch in watches):
        if not engine.step() and any(watch.end is None for watch in watches):
            raise RuntimeError("the engine has nothing to do, and a request has not ended")
    if not engine.stats().running:
        while engine.step():  # a step that was launched ahead
            pass
    for watch in watches:
        if watch.error is not None:
            raise watch.error


def prefill(engine: Engine, texts: Iterable[Sequence[int]]) -> list[SequenceId]:
    """A computed sequence for each text, one after another."""
    sequences = []
    for ids in texts:
        sequence = open_with(engine, ids)
        run(engine, compute(engine, sequence))
        sequences.append(sequence)
    return sequences


def close(engine: Engine, sequences: Iterable[SequenceId]) -> None:
    for sequence in sequences:
        engine.close(sequence)
