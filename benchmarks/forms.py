"""Where the expanded form of attention begins to pay: the first token of a message behind a long list, in both forms.

The engine's choice (`model/batch.Form`) follows from the handicap that these figures set. Absorbed passes of more than
256 tokens have no graph: the host launches them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks import agreement, drive
from benchmarks.bench import Bench
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from leyline_server.engine.engine import SequenceId
from leyline_server.engine.local import LocalEngine

LENGTHS = {"message over 4k": 4096, "message over 32k": 32_768}
TOKENS = (16, 32, 64, 128, 256, 512, 1024)
REPEATS = 7
ARMS = {"absorbed": math.inf, "expanded": 0.0, "as chosen": None}
"""And the handicap of the expanded form that makes it so."""


def cases(bed: Bed) -> Sequence[str]:
    return list(LENGTHS)


def _message(bed: Bed) -> Sequence[int]:
    return TOKENS if bed.shape.full else TOKENS[:2]


def check(bed: Bed) -> None:
    """What the engine says, in each form."""
    for handicap in (math.inf, 0.0):
        agreement.check(bed, handicap)


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    engine = bed.parts().engine
    length = bed.size(LENGTHS[case], 128)
    (sequence,) = drive.prefill(engine, [bed.ids(length, seed=95)])
    for arm, handicap in ARMS.items():
        with handicapped(engine, handicap):
            engine.runner.warm_up()  # graphs are captured of the passes that the form is chosen for
            for tokens in _message(bed):
                times = [_first_token(engine, sequence, bed.ids(tokens, seed)) for seed in range(REPEATS + 1)]
                yield measured(case, arm, f"first token of {tokens}", times[1:], "ms")
    drive.close(engine, [sequence])  # the last arm left the graphs as they were


def _first_token(engine: LocalEngine, sequence: SequenceId, message: Sequence[int]) -> float:
    """Milliseconds. The message is gone again afterwards."""
    length = engine.length(sequence)
    engine.append(sequence, message)
    watch = drive.generate(engine, sequence, 1)
    drive.run(engine, watch)
    engine.truncate(sequence, length)
    engine.cache.clear_caches()
    return watch.ttft * 1e3


@contextmanager
def handicapped(engine: LocalEngine, handicap: float | None) -> Iterator[None]:
    """Inside the block the engine chooses the form of attention by another handicap, if there is one."""
    before = engine.runner.form
    if handicap is not None:
        engine.runner.form = replace(before, handicap=handicap)
    try:
        yield
    finally:
        engine.runner.form = before


BENCH = Bench("forms", "cpu", check, cases, rows)
