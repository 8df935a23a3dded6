"""What the chunk registry finds: the text's own ids, each entry once, whatever the texts have in common."""

from __future__ import annotations

import numpy as np
import pytest

from leyline_server.cache.chunks import SINK, ChunkRegistry
from leyline_server.cache.fingerprints import SHORTEST
from leyline_server.cache.slots import Holder, SlotTable

NAMESPACE = ("tenant", "model")


class Texts:
    """A registry and the texts whose rows it names."""

    def __init__(self, budget: int = 4096) -> None:
        self.table = SlotTable(8192)
        self.chunks = ChunkRegistry(self.table, budget)
        self.ids_of = np.zeros(8192, np.int32)

    def add(self, ids):
        slots = self.table.allocate(np.arange(len(ids), dtype=np.int32))
        self.ids_of[slots] = ids
        self.table.release(self.chunks.register(NAMESPACE, ids, slots, 0, 1)[1], Holder.CACHE)
        self.chunks.check_integrity()

    def spans(self, ids):
        """What is found, each entry of it once and equal."""
        out, upto = [], 0
        for start, slots in self.chunks.match(NAMESPACE, ids):
            assert start >= upto, "hits overlap"
            assert len(slots) >= SHORTEST
            upto = start + len(slots)
            assert np.array_equal(self.ids_of[slots], ids[start:upto])
            out.append((start, upto))
        return out


def ids_of(rng, count):
    return rng.integers(0, 100_000, count).astype(np.int32)


@pytest.mark.parametrize("seed", range(20))
def test_texts_that_overlap_are_found_once(seed):
    """One text ends with what another begins with, and the question is both: a fingerprint may lie across the seam."""
    rng, texts = np.random.default_rng(seed), Texts()
    first, shared, second = ids_of(rng, 50), ids_of(rng, 14), ids_of(rng, 60)
    texts.add(np.concatenate([ids_of(rng, 40), first, shared, ids_of(rng, 60)]))
    texts.add(np.concatenate([ids_of(rng, 80), shared, second, ids_of(rng, 40)]))
    assert texts.spans(np.concatenate([first, shared, second])) == [(0, 64), (64, 124)]


def test_a_text_longer_than_the_budget_is_known_by_its_beginning():
    rng, texts = np.random.default_rng(1), Texts(budget=200)
    text = ids_of(rng, 1000)
    texts.add(text)
    assert texts.chunks.num_rows == 200
    assert texts.spans(text) == [(SINK, SINK + 200)]


def test_a_row_of_equal_ids_from_the_first_on_is_found():
    """Its one fingerprint begins where the text does, were the sink not left out."""
    texts = Texts()
    texts.add(np.full(300, 7, np.int32))
    assert texts.spans(np.full(200, 7, np.int32)) == [(0, 200)]
