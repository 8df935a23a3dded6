"""What 64 open gRPC streams cost the engine: its step beside clients that read, and the same step without any.

Both are taken on the engine's thread of one running server, on the same sessions, in turn. The clients are a process
of their own. Goal: at most 5 % longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

from benchmarks import agreement, clients, served_session
from benchmarks.bench import Bench, require
from benchmarks.drive import Watch
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from benchmarks.served_session import ServedSession
from benchmarks.serving import Serving, StepClock, clocked, serving
from leyline_server.engine.engine import GenerateParams

ROUNDS = 2


def _sizes(bed: Bed) -> tuple[int, int, int]:
    """(sessions, tokens in each, tokens generated in each)."""
    return bed.size(64, 4), bed.size(1024, 32), bed.size(192, 24)


def cases(bed: Bed) -> Sequence[str]:
    sessions, tokens, _ = _sizes(bed)
    return [f"{sessions} sessions of {tokens:,} tokens"]


def check(bed: Bed) -> None:
    agreement.check(bed)


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    count, tokens, generated = _sizes(bed)
    parts = bed.parts()
    with clocked(parts.engine) as clock, serving(parts) as server:
        sessions = [served_session.create(server) for _ in range(count)]
        for seed, session in enumerate(sessions):
            session.append(bed.ids(tokens, seed=seed), prefill=True)
        bare, streamed = list[float](), list[float]()
        for number in range(ROUNDS + 1):
            took = _bare(server, clock, sessions, generated), _streamed(server, clock, sessions, generated)
            if number:  # the first round warms up
                bare += took[0]
                streamed += took[1]
        for session in sessions:
            session.close()
    plain = measured(case, "bare engine", "step", bare, "ms")
    beside = measured(case, f"{count} open streams", "step", streamed, "ms")
    yield plain
    yield beside
    assert plain.value is not None
    assert beside.value is not None
    longer = 100 * (beside.value / plain.value - 1)
    yield Measured(case, beside.arm, "longer than the bare step", longer, "%").at_most(5, bed.full)


def _bare(server: Serving, clock: StepClock, sessions: Sequence[ServedSession], generated: int) -> list[float]:
    """Forks' own sequences, asked on the engine's thread: nothing listens but a list."""
    copies = [session.fork() for session in sessions]
    watches = [Watch() for _ in copies]
    first = len(clock.begun)

    def start() -> None:
        engine, store = server.parts.engine, server.parts.store
        for watch, copy in zip(watches, copies, strict=True):
            engine.generate(store.find("default", copy.id).sequence, GenerateParams(generated), watch)

    server.on_engine(start)
    while any(watch.end is None for watch in watches):
        time.sleep(0.02)
    for copy in copies:
        copy.close()
    return _middle(clock, first)


def _streamed(server: Serving, clock: StepClock, sessions: Sequence[ServedSession], generated: int) -> list[float]:
    copies = [session.fork() for session in sessions]
    first = len(clock.begun)
    out = clients.run("stream_client", server.address, str(generated), *(copy.id for copy in copies))
    came = int(out.split()[-1])
    require(came == generated * len(copies), f"{came} tokens came, {generated * len(copies)} were generated")
    times = _middle(clock, first)
    for copy in copies:
        copy.close()
    return times


def _middle(clock: StepClock, first: int) -> list[float]:
    """Milliseconds from step to step in the middle third of a run, where every session decodes."""
    begun = [at for at, did in zip(clock.begun[first:], clock.acted[first:], strict=True) if did]
    third = len(begun) // 3
    gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(begun)]
    return gaps[third : 2 * third]


BENCH = Bench("streams", "cpu", check, cases, rows)
