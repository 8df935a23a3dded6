"""What the chunk registry finds: the text's own ids, each entry once, whatever the texts have in common."""

from __future__ import annotations

import numpy as np
import pytest

from leyline_server.cache.chunks import SINK, ChunkRegistry
from leyline_server.cache.fingerprints import SHORTEST
from leyline_server.cache.influence import Influence
from leyline_server.cache.slots import Holder, SlotTable

NAMESPACE = ("tenant", "model")


class Texts:
    """A registry and the texts whose rows it names."""

    def __init__(self, budget: int = 4096) -> None:
        self.table = SlotTable(8192)
        self.chunks = ChunkRegistry(self.table, budget)
        self.ids_of = np.zeros(8192, np.int32)

    def add(self, ids):
        slots = self.rows(ids)
        self.register(ids, slots)
        return slots

    def rows(self, ids):
        slots = self.table.allocate(np.arange(len(ids), dtype=np.int32))
        self.ids_of[slots] = ids
        return slots

    def register(self, ids, slots, examined=0):
        examined, gone = self.chunks.register(NAMESPACE, ids, slots, examined, 1)
        self.let_go(gone, Holder.CACHE)
        return examined

    def let_go(self, slots, holder=Holder.SESSION):
        self.table.release(slots, holder)
        self.chunks.let_go(slots)
        self.table.release(self.chunks.shrunk(), Holder.CACHE)
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
    slots = texts.add(text)
    assert texts.spans(text) == [(SINK, 1000)], "as long as a session holds it"
    texts.let_go(slots)
    (span,) = texts.spans(text)
    assert span[0] == SINK
    assert 50 < texts.chunks.num_rows == span[1] - span[0] <= 200


def test_of_texts_that_agree_in_little_the_one_that_agrees_most_is_found():
    """Each has the fingerprints of the short run that all have in common."""
    rng, texts = np.random.default_rng(1), Texts()
    shared, longer = ids_of(rng, 28), ids_of(rng, 20)
    for _ in range(2):
        texts.add(np.concatenate([ids_of(rng, 60), shared, ids_of(rng, 60)]))
    texts.add(np.concatenate([ids_of(rng, 60), shared, longer, ids_of(rng, 60)]))
    assert texts.spans(np.concatenate([ids_of(rng, 50), shared, longer, ids_of(rng, 50)])) == [(50, 98)]


def test_a_second_copy_is_found_once_the_first_is_gone():
    rng, texts = np.random.default_rng(1), Texts()
    shared = ids_of(rng, 100)
    first = texts.add(np.concatenate([ids_of(rng, 60), shared]))
    texts.add(np.concatenate([ids_of(rng, 50), shared]))
    gone = Influence()
    texts.table.context[first] = np.arange(1, len(first) + 1, dtype=np.uint64)
    gone.add_scattered(texts.table.context[first])
    texts.table.release(texts.chunks.cut(NAMESPACE, gone), Holder.CACHE)
    assert texts.spans(shared) == [(0, 100)]


def test_a_row_of_equal_ids_from_the_first_on_is_found():
    """Its one fingerprint begins where the text does, were the sink not left out."""
    texts = Texts()
    texts.add(np.full(300, 7, np.int32))
    assert texts.spans(np.full(200, 7, np.int32)) == [(0, 200)]


def test_what_hangs_below_a_reached_chunk_is_reached_from_its_first_row():
    """Though a later row of it is reached in its own right."""
    rng, texts = np.random.default_rng(1), Texts()
    slots = texts.add(ids_of(rng, SINK + 256))  # two chunks, one below the other
    texts.table.context[slots] = np.arange(1, len(slots) + 1, dtype=np.uint64)
    gone = Influence()
    gone.add_scattered(texts.table.context[slots[[40, 200]]])
    assert set(texts.chunks.reached(NAMESPACE, gone).tolist()) == set(slots[40:].tolist())


def assert_every_window_is_found(texts, ids, around):
    """Of 32 to 60 ids, on both sides of it."""
    for start in range(around - 60, around):
        for length in (SHORTEST, 40, 60):
            assert texts.spans(ids[start : start + length]) == [(0, length)]


def test_a_hit_goes_on_into_the_chunks_beside_it():
    texts, ids = Texts(), ids_of(np.random.default_rng(1), SINK + 256)
    texts.add(ids)
    assert_every_window_is_found(texts, ids, SINK + 128)


def test_a_text_that_grew_is_found_across_what_is_new():
    texts, ids = Texts(), ids_of(np.random.default_rng(1), 400)
    slots = texts.rows(ids)
    examined = texts.register(ids[:200], slots[:200])
    texts.register(ids, slots, examined)
    assert_every_window_is_found(texts, ids, 200)


def test_what_was_too_short_is_registered_once_it_is_longer():
    texts, ids = Texts(), ids_of(np.random.default_rng(1), 230)
    slots, examined = texts.rows(ids), 0
    for upto in (190, 205, 230):
        examined = texts.register(ids[:upto], slots[:upto], examined)
    assert texts.spans(ids[170:]) == [(0, 60)]


def test_a_gap_that_is_filled_is_passed():
    """The front of a text is let go, computed anew and registered in front of the end that stayed."""
    texts, ids = Texts(budget=100), ids_of(np.random.default_rng(1), SINK + 256)
    slots = texts.add(ids)
    texts.let_go(slots[: SINK + 128])
    assert texts.spans(ids) == [(SINK + 128, SINK + 256)]
    texts.register(ids, np.concatenate([texts.rows(ids[: SINK + 128]), slots[SINK + 128 :]]))
    assert texts.spans(ids[100:220]) == [(0, 120)]
