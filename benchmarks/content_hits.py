"""Content hits: a prompt of which four fifths stood elsewhere before, in another order, against a prefill of all of it.

Ten documents were read once, by another session, behind another header; then each prompt has them in an order of its
own behind a header of its own, with new text between them. The rival computes the prompt, of equal length, that nobody
has seen. Energy is the GPU's own counter over all prompts of an arm, each from its append to its first token.
Also: how many slots sessions hold that read the same documents at once, against a store that copies what it finds; and
whether another tenant can tell by the clock that somebody has read what it reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from benchmarks import agreement, drive
from benchmarks.bench import Bench, require
from benchmarks.record import Measured, measured
from benchmarks.registry import NAMESPACE, Bed
from benchmarks.timing import Energy
from leyline_proto import leyline_pb2 as pb
from leyline_proto.repair import Repair
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.engine.engine import Namespace
from leyline_server.engine.local import LocalEngine
from leyline_server.lab.statistics import wilson

DOCUMENTS: Final = 10
SESSIONS: Final = 16
REPEATS: Final = 20  # as many as make a second or more, by which the energy counter is exact enough
GOAL_TIMES: Final = 4.0
FULL: Final = "full prefill"
ARMS: Final = {
    FULL: PREFIX,
    "content hits": Reuse(pb.REUSE_CONTENT),
    "content hits, first 16 of each computed": Reuse(pb.REUSE_CONTENT, Repair(first=16)),
    "content hits, 15 % computed": Reuse(pb.REUSE_CONTENT, Repair(share=0.15)),
}
SAME: Final = f"{SESSIONS} sessions, the same {DOCUMENTS} documents"
TENANT: Final = "another tenant"
COPYING: Final = "a store that copies"


def length(bed: Bed) -> int:
    """Tokens of a prompt."""
    return bed.size(16_384, 800)


def documents(bed: Bed) -> list[list[int]]:
    """Four fifths of a prompt."""
    each = length(bed) * 4 // 5 // DOCUMENTS
    return [bed.ids(each, seed=7000 + number) for number in range(DOCUMENTS)]


def prompt(bed: Bed, known: Sequence[Sequence[int]], seed: int) -> list[int]:
    """The known texts in an order of their own behind new text, half of it in front of all, with some behind each."""
    fresh = bed.ids(length(bed) - sum(map(len, known)), seed=seed)
    ids, rest = fresh[: len(fresh) // 2], fresh[len(fresh) // 2 :]
    step = len(rest) // len(known)
    for at, text in enumerate(random.Random(seed).sample(known, len(known))):
        ids += [*text, *rest[at * step : (at + 1) * step]]
    return [*ids, *rest[len(known) * step :]]


def _registered(bed: Bed) -> tuple[LocalEngine, list[list[int]]]:
    """An engine in which another session has read the documents, and is closed."""
    engine, known = bed.parts().engine, documents(bed)
    sequence = engine.open(NAMESPACE, Reuse(pb.REUSE_REGISTER))
    engine.append(sequence, prompt(bed, known, seed=1))
    drive.run(engine, drive.compute(engine, sequence))
    engine.close(sequence)
    return engine, known


def _ask(
    engine: LocalEngine, ids: Sequence[int], reuse: Reuse, tenant: Namespace = NAMESPACE
) -> tuple[int, drive.Watch]:
    sequence = engine.open(tenant, reuse)
    engine.append(sequence, ids)
    watch = drive.generate(engine, sequence, 1)
    drive.run(engine, watch)
    return sequence, watch


def check(bed: Bed) -> None:
    """What the engine says; and that a prompt computes what is new, and no more than what its repair names besides."""
    agreement.check(bed)
    engine, known = _registered(bed)
    moved = sum(map(len, known))
    for number, (name, reuse) in enumerate(ARMS.items()):
        sequence, watch = _ask(engine, prompt(bed, known, seed=100 + number), reuse)
        assert watch.report is not None
        hit = watch.report.content_hit
        if not reuse.takes:
            require(watch.report.reused == 0, f"{name} found something in the cache")
        elif reuse.repair.first:
            require(hit == moved - DOCUMENTS * reuse.repair.first, f"{name}: {hit} of {moved} moved tokens were hit")
        else:
            least = moved - DOCUMENTS - int(moved * reuse.repair.share)
            require(least <= hit <= moved, f"{name}: {hit} of {moved} moved tokens were hit")
        engine.close(sequence)


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    yield from {SAME: _memory, TENANT: _another_tenant}.get(case, _first_tokens)(bed, case)


def _first_tokens(bed: Bed, case: str) -> Iterable[Measured]:
    (engine, known), energy = _registered(bed), Energy(bed.device)
    plain: float | None = None
    plain_joules: float | None = None
    for arm, (name, reuse) in enumerate(ARMS.items()):
        watches: list[drive.Watch] = []
        before: float | None = None
        for repeat in range(REPEATS + 1):
            if repeat == 1:  # the first warms up
                watches.clear()
                before = energy.joules()
            sequence, watch = _ask(engine, prompt(bed, known, seed=1000 * (arm + 1) + repeat), reuse)
            watches.append(watch)
            engine.close(sequence)
        after = energy.joules()
        first = measured(case, name, "first token", [watch.ttft for watch in watches], "s")
        yield first
        computed = [watch.report.computed for watch in watches if watch.report is not None]
        yield measured(case, name, "computed", computed, "tokens")
        joules = None if before is None or after is None else (after - before) / REPEATS
        yield Measured(case, name, "energy", joules, "J a prompt")
        if name == FULL:
            plain, plain_joules = first.value, joules
            continue
        assert plain is not None
        assert first.value is not None
        times = Measured(case, name, "full prefill over it", plain / first.value, "x")
        yield times.at_least(GOAL_TIMES, bed.full) if reuse == ARMS["content hits"] else times
        if joules is not None and plain_joules:
            yield Measured(case, name, "energy saved", 100 * (1 - joules / plain_joules), "%")


def _memory(bed: Bed, case: str) -> Iterable[Measured]:
    engine, known = _registered(bed)
    asked = [_ask(engine, prompt(bed, known, seed=5000 + number), ARMS["content hits"]) for number in range(SESSIONS)]
    yield Measured(case, "content hits", "slots in use", engine.stats().in_use, "slots")
    copied = sum(engine.length(sequence) - 1 for sequence, _ in asked)  # what was sampled last is pending
    yield Measured(case, COPYING, "slots in use", copied, "slots")
    for sequence, _ in asked:
        engine.close(sequence)


def _another_tenant(bed: Bed, case: str) -> Iterable[Measured]:
    """In turn a prompt of what the first tenant has read, and one of what nobody has. Half of the pairs is a coin."""
    engine, known = _registered(bed)
    unknown = [bed.ids(len(text), seed=9000 + number) for number, text in enumerate(known)]
    times: dict[str, list[float]] = {"what another has read": [], "what nobody has read": []}
    for repeat in range(-1, REPEATS):
        asked = list(zip(times, (known, unknown), strict=True))
        for arm, texts in asked if repeat % 2 else reversed(asked):
            tenant = (f"other {arm} {repeat}", NAMESPACE[1])  # one that has computed nothing itself
            ids = prompt(bed, texts, seed=6000 + repeat)
            sequence, watch = _ask(engine, ids, ARMS["content hits"], tenant)
            require(watch.report is not None and watch.report.reused == 0, "a tenant has hit another's rows")
            engine.close(sequence)
            if repeat >= 0:  # the first warms up
                times[arm].append(watch.ttft)
    for arm, taken in times.items():
        yield measured(case, arm, "first token", taken, "s")
    read, unread = times.values()
    sooner = [one < other for one, other in zip(read, unread, strict=True)]
    low, high = wilson(sum(sooner), len(sooner))
    yield Measured(
        case,
        "what another has read",
        "sooner",
        100 * sum(sooner) / len(sooner),
        "% of pairs",
        len(sooner),
        100 * low,
        100 * high,
    )


def cases(bed: Bed) -> Sequence[str]:
    return [f"{length(bed):,} tokens, 80 % moved", SAME, TENANT]


BENCH = Bench("content_hits", "cpu", check, cases, rows)
