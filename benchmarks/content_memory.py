"""What content reuse costs in slots: the chunk registry with sessions that hold what they find, by count alone.

As in the engine, rows behind a session's first hit are approximate and not registered. No session has a prefix of
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.content_arms import NAMESPACE
from benchmarks.content_input import Ids, Parts, encoded, text_of
from benchmarks.content_text import Writer
from benchmarks.record import Measured
from leyline_server.cache.chunks import SINK
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.cache.slots import PENDING, Slots

OPEN, SHUFFLES = 16, 100


@dataclass(slots=True)
class Served:
    """A session: its slots, and how many of them it found."""

    slots: Slots
    found: int

    @property
    def hit_rate(self) -> float:
        return 100 * self.found / len(self.slots)


class Sessions:
    """A pool and a registry of `budget` rows, and the sessions that come."""

    def __init__(self, num_slots: int, budget: int) -> None:
        self.cache = KVCache(Pool(1, num_slots, 1, 1, torch.float32, torch.device("cpu")), budget)
        self.table, self.chunks = self.cache.table, self.cache.chunks

    @property
    def held(self) -> int:
        """Slots that are not free."""
        return self.table.num_slots - self.table.num_free

    def open(self, ids: Ids) -> Served:
        slots = np.full(len(ids), PENDING, np.int32)
        hits = self.chunks.match(NAMESPACE, ids[SINK:-1])
        exact = SINK + hits[0].start if hits else len(ids)
        for hit in hits:
            self.cache.touch(hit.slots)
            slots[SINK + hit.start : SINK + hit.start + len(hit.slots)] = hit.slots
        waits = np.flatnonzero(slots == PENDING)
        self.cache.retain(slots)
        slots[waits] = self.cache.allocate(waits.astype(np.int32))
        _, gone = self.chunks.register(NAMESPACE, ids[:exact], slots[:exact], 0, self.cache.tick())
        self.cache.release_cached(gone)
        return Served(slots, len(ids) - len(waits))

    def close(self, session: Served) -> None:
        self.cache.release(session.slots)


def prompts(documents: int, count: int, seed: int) -> tuple[list[Ids], int]:
    """Prompts of all of these documents, each time in another order between a header and a question of their own, and
    how many ids the documents have."""
    write = Writer(seed)
    pool: Parts = [(write.document(), True) for _ in range(documents)]
    out = [
        text_of([
            (write.header(80), False),
            *(pool[one] for one in write.rng.permutation(documents)),
            (f"<|user|>{write.prose(60)}", False),
        ]).ids
        for _ in range(count)
    ]  # fmt: skip
    return out, sum(len(encoded(text)) for text, _ in pool)


def open_together(case: str) -> Iterator[Measured]:
    """Sixteen sessions over ten documents, all open."""
    texts, _ = prompts(10, OPEN, seed=11)
    tokens = sum(map(len, texts))
    sessions = Sessions(tokens, tokens)
    served = [sessions.open(ids) for ids in texts]
    sessions.chunks.check_integrity()
    sessions.table.check_integrity([one.slots for one in served], sessions.chunks.slots())
    yield Measured(case, "a copy for each session", "slots in use", tokens, "slots", OPEN)
    yield Measured(case, "leyline: named once", "slots in use", sessions.table.in_use, "slots", OPEN)
    yield Measured(case, "leyline: named once", "hit rate", _mean(one.hit_rate for one in served), "%", OPEN)


def one_after_another(case: str, factor: float) -> Iterator[Measured]:
    """A hundred sessions over fourteen documents, each closed before the next; `factor`: the budget, in documents."""
    texts, documents = prompts(14, SHUFFLES, seed=12)
    budget = round(factor * documents)
    sessions = Sessions(budget + 2 * max(map(len, texts)), budget)
    arm = f"leyline: budget of {factor:g} x the documents"
    rates, held = list[float](), list[int]()
    for ids in texts:
        served = sessions.open(ids)
        rates.append(served.hit_rate)
        sessions.close(served)
        held.append(sessions.held)
    sessions.chunks.check_integrity()
    sessions.table.check_integrity([], sessions.chunks.slots())
    yield Measured(case, arm, "budget", budget, "slots")
    for number in (1, 10, 50, SHUFFLES):
        yield Measured(case, arm, f"slots held after {number}", held[number - 1], "slots")
    yield Measured(case, arm, "most slots held", max(held), "slots", SHUFFLES).at_most(budget)
    for start, end in ((1, 10), (10, 50), (50, SHUFFLES)):
        yield Measured(case, arm, f"hit rate of {start + 1} to {end}", _mean(rates[start:end]), "%", end - start)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
