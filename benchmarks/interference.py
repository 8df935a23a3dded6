"""A FORGET of 30k tokens beside others: how long eight decoding sessions, and one that sends a message, wait.

Goal: between two tokens at most one chunk more than the usual step. The chunk is timed in the same run, with nobody
beside it. The message has 64 tokens and comes once the FORGET is under way: beside those that decode, and with nobody
else, when chunks are larger; it is also timed without a FORGET.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from benchmarks import agreement, drive
from benchmarks.bench import Bench, require
from benchmarks.drive import Watch
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from leyline_server.engine.engine import Engine, RowEdit, SequenceId

ROUNDS = 3
OTHERS = 8
BEFORE = 24  # steps of the others before the FORGET
UNDER_WAY = 2  # steps of the FORGET before the message
MESSAGES = ("a message, no FORGET", "a message, beside a FORGET", "a message, nobody decodes")


def _sizes(bed: Bed) -> tuple[int, int, int]:
    """(tokens of the one that forgets, where it cuts, tokens of each of the others)."""
    return bed.size(32_768, 400), bed.size(2_048, 40), bed.size(4_096, 32)


def cases(bed: Bed) -> Sequence[str]:
    length, cut, _ = _sizes(bed)
    return [f"{OTHERS} decode, one computes {(length - cut) // 1024}k again" if bed.shape.full else "small"]


def check(bed: Bed) -> None:
    """A FORGET computes all that stands behind it, and nobody else a row more than its tokens."""
    agreement.check(bed)
    length, cut, _ = _sizes(bed)
    engine = bed.parts().engine
    (sequence,) = drive.prefill(engine, [bed.ids(length, seed=1)])
    before = engine.stats().rows_computed
    _forget(engine, sequence, bed, seed=2)
    drive.run(engine, drive.compute(engine, sequence))
    computed = engine.stats().rows_computed - before
    require(computed == length - cut, f"a FORGET at {cut} of {length} computed {computed} rows")
    engine.close(sequence)


def _forget(engine: Engine, sequence: SequenceId, bed: Bed, seed: int) -> None:
    """As many tokens come as go, so that every round computes as much."""
    _, cut, _ = _sizes(bed)
    engine.splice(sequence, [RowEdit(cut, cut + 32, tuple(bed.ids(32, seed)), f"f{seed}", forget=True)])


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    length, _, other = _sizes(bed)
    engine = bed.parts().engine
    (victim,) = drive.prefill(engine, [bed.ids(length, seed=3)])
    others = drive.prefill(engine, (bed.ids(other, seed=10 + seed) for seed in range(OTHERS + 1)))
    newcomer = others.pop()
    chunks, usual, longest = list[float](), list[float](), list[float]()
    waits = [list[float]() for _ in MESSAGES]
    for number in range(ROUNDS + 1):
        chunk = _chunk_s(bed, engine, victim, seed=200 + number)
        _forget(engine, victim, bed, seed=100 + number)
        calm, wait = _beside(bed, engine, victim, others)
        with _decoding(bed, engine, others):
            waited = [_message_s(bed, engine, newcomer, seed=300 + number)]
        for beside, seed in ((others, 400 + number), ([], 500 + number)):
            _forget(engine, victim, bed, seed)
            waited.append(_message_beside_s(bed, engine, victim, newcomer, beside, seed))
        if number:  # the first round warms up
            chunks.append(chunk * 1e3)
            usual += [seconds * 1e3 for seconds in calm]
            longest.append(wait * 1e3)
            for samples, seconds in zip(waits, waited, strict=True):
                samples.append(seconds * 1e3)
    drive.close(engine, [victim, newcomer, *others])
    chunk_ms = measured(case, "one chunk, alone", "wall", chunks, "ms")
    calm_ms = measured(case, "others, before", "between tokens", usual, "ms")
    yield chunk_ms
    yield calm_ms
    assert chunk_ms.value is not None
    assert calm_ms.value is not None
    worst = measured(case, "others, beside a FORGET", "longest between tokens", longest, "ms")
    yield worst.at_most(calm_ms.value + chunk_ms.value, bed.full)
    for arm, samples in zip(MESSAGES, waits, strict=True):
        yield measured(case, arm, "first token", samples, "ms")


def _chunk_s(bed: Bed, engine: Engine, victim: SequenceId, seed: int) -> float:
    """Seconds of one chunk where it is the slowest: at the end of the long session, with nobody beside it."""
    length, chunk = engine.length(victim), bed.parts_chunk
    engine.append(victim, bed.ids(chunk, seed))
    watch = drive.compute(engine, victim)
    drive.run(engine, watch)
    engine.truncate(victim, length)
    return watch.wall


@contextmanager
def _decoding(bed: Bed, engine: Engine, others: Sequence[SequenceId]) -> Iterator[list[Watch]]:
    """They decode inside the block, and have for a while; they are as they were after it."""
    _, _, length = _sizes(bed)
    watches = [drive.generate(engine, sequence, bed.size(2048, 160)) for sequence in others]
    while any(len(watch.times) < BEFORE for watch in watches):
        engine.step()
    yield watches
    for watch in watches:
        watch.cancel()
    drive.run(engine, *watches)
    for sequence in others:
        engine.truncate(sequence, length)


def _beside(bed: Bed, engine: Engine, victim: SequenceId, others: Sequence[SequenceId]) -> tuple[list[float], float]:
    """(seconds between tokens before the FORGET, the longest once it was asked for and until it was done)."""
    with _decoding(bed, engine, others) as watches:
        asked = drive.compute(engine, victim)
        while asked.end is None:
            engine.step()
    calm, waits = list[float](), list[float]()
    for watch in watches:
        for earlier, later in pairwise(watch.times):
            if later < asked.begun:
                calm.append(later - earlier)
            elif earlier < asked.ended_at:
                waits.append(later - earlier)
    require(len(waits) > 0, "nobody decoded beside the FORGET")
    return calm[OTHERS * 4 :], max(waits)


def _message_beside_s(
    bed: Bed, engine: Engine, victim: SequenceId, newcomer: SequenceId, others: Sequence[SequenceId], seed: int
) -> float:
    """Seconds to the first token of a message that comes while the victim computes again."""
    with _decoding(bed, engine, others):
        asked = drive.compute(engine, victim)
        for _ in range(UNDER_WAY):
            engine.step()
        require(asked.end is None, "the FORGET was over before the message came")
        waited = _message_s(bed, engine, newcomer, seed)
        while asked.end is None:
            engine.step()
    drive.run(engine, asked)
    return waited


def _message_s(bed: Bed, engine: Engine, newcomer: SequenceId, seed: int) -> float:
    """Seconds from a message to its first token; the session is as it was then."""
    length = engine.length(newcomer)
    engine.append(newcomer, bed.ids(bed.size(64, 4), seed))
    watch = drive.generate(engine, newcomer, 1)
    while watch.end is None:
        engine.step()
    engine.truncate(newcomer, length)
    return watch.ttft


BENCH = Bench("interference", "cpu", check, cases, rows)
