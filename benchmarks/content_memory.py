"""What content reuse costs in slots: sessions that hold what they find, by count alone. No session has a prefix of
another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks.content_input import Ids, Parts, encoded, text_of
from benchmarks.content_served import CONTENT, Sessions
from benchmarks.content_text import Writer
from benchmarks.record import Measured

OPEN, SHUFFLES = 16, 100


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
    served = [sessions.open(ids, CONTENT) for ids in texts]
    sessions.check_integrity(session for session, _ in served)
    rates = [100 * found / len(ids) for (_, found), ids in zip(served, texts, strict=True)]
    yield Measured(case, "a copy for each session", "slots in use", tokens, "slots", OPEN)
    yield Measured(case, "leyline: named once", "slots in use", sessions.cache.table.in_use, "slots", OPEN)
    yield Measured(case, "leyline: named once", "hit rate", _mean(rates), "%", OPEN)


def one_after_another(case: str, factor: float) -> Iterator[Measured]:
    """A hundred sessions over fourteen documents, each closed before the next; `factor`: the budget, in documents."""
    texts, documents = prompts(14, SHUFFLES, seed=12)
    budget = round(factor * documents)
    sessions = Sessions(budget + 2 * max(map(len, texts)), budget)
    arm = f"leyline: budget of {factor:g} x the documents"
    rates, held = list[float](), list[int]()
    for ids in texts:
        session, found = sessions.open(ids, CONTENT)
        rates.append(100 * found / len(ids))
        sessions.close(session)
        held.append(sessions.cache.chunks.num_rows)
    sessions.check_integrity()
    yield Measured(case, arm, "budget", budget, "rows")
    for number in (1, 10, 50, SHUFFLES):
        yield Measured(case, arm, f"rows registered after {number}", held[number - 1], "rows")
    yield Measured(case, arm, "most rows registered", max(held), "rows", SHUFFLES).at_most(budget)
    for start, end in ((1, 10), (10, 50), (50, SHUFFLES)):
        yield Measured(case, arm, f"hit rate of {start + 1} to {end}", _mean(rates[start:end]), "%", end - start)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
