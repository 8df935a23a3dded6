"""What the chunk registry, the tree and sessions hold of the same rows, and in which order they let go."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from leyline_server.cache.chunks import SINK
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.edit.rows import Rows

NAMESPACE = ("tenant", "digest")


def make(num_slots: int, budget: int | None = None) -> KVCache:
    pool = Pool(1, num_slots, 1, 1, torch.float32, torch.device("cpu"))
    return KVCache(pool, num_slots if budget is None else budget)


def computed(cache: KVCache, seed: int, length: int) -> Rows:
    """A text whose rows a session holds, published and registered, as at the end of a request."""
    ids = np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)
    rows, index = Rows.empty().appended(ids), np.arange(length)
    rows = rows.filled(index, cache.allocate(index.astype(np.int32)))
    rows.note_contexts(cache.table, index)
    now = cache.tick()
    cache.tree.insert(NAMESPACE, rows.ids, rows.slots, now)
    _, gone = cache.chunks.register(NAMESPACE, rows.ids, rows.slots, 0, now)
    cache.release_cached(gone)
    return rows


def in_tree(cache: KVCache, rows: Rows) -> int:
    return len(cache.tree.match(NAMESPACE, rows.ids, cache.tick()))


def found(cache: KVCache, rows: Rows) -> int:
    return sum(len(hit.slots) for hit in cache.chunks.match(NAMESPACE, rows.ids[SINK:]))


def test_rows_that_both_hold_are_given_up_by_both_and_no_more_of_them_than_it_takes() -> None:
    cache = make(1000)
    old, new = computed(cache, 1, 400), computed(cache, 2, 400)
    cache.release(old.slots)
    cache.release(new.slots)
    cache.allocate(np.arange(250, dtype=np.int32))  # 50 more than are free
    assert found(cache, new) == 400 - SINK
    assert in_tree(cache, new) == 400
    assert 200 <= in_tree(cache, old) <= 350
    assert found(cache, old) >= 200 - SINK


def test_what_content_hits_use_outlives_what_nobody_uses() -> None:
    cache = make(1000)
    old, new = computed(cache, 1, 400), computed(cache, 2, 400)
    cache.release(old.slots)
    cache.release(new.slots)
    hot = old.slots[100:200]
    cache.touch(hot)
    cache.allocate(np.arange(200 + 120, dtype=np.int32))
    assert found(cache, new) == 400 - SINK, "what stands behind the rows in use goes first"
    assert (cache.table.context[hot] == old.contexts[100:200]).all()
    cache.allocate(np.arange(400, dtype=np.int32))
    assert in_tree(cache, new) < 100
    assert found(cache, old) >= 100
    assert (cache.table.context[hot] == old.contexts[100:200]).all()


def test_chunks_of_rows_in_use_are_found_and_nothing_of_them_is_freed() -> None:
    cache = make(600)
    held = computed(cache, 1, 400)
    cache.allocate(np.arange(200, dtype=np.int32))
    with pytest.raises(Exception, match="slots wanted"):
        cache.allocate(np.arange(1, dtype=np.int32))
    assert (cache.table.context[held.slots] == held.contexts).all()


def test_beyond_the_budget_the_least_recently_used_goes() -> None:
    cache = make(2000, budget=3 * 268)
    texts = one, two, three = [computed(cache, seed, 300) for seed in (1, 2, 3)]
    for rows in texts:
        cache.release(rows.slots)
    assert [found(cache, rows) for rows in texts] == [268] * 3
    cache.touch(one.slots[SINK:])
    four = computed(cache, 4, 300)
    assert [found(cache, rows) for rows in (one, two, three, four)] == [268, 0, 268, 268]
    cache.touch(three.slots[SINK:])
    cache.release(computed(cache, 5, 300).slots)
    assert [found(cache, rows) for rows in (one, three, four)] == [0, 268, 268]


def test_what_a_session_holds_stays_whatever_the_budget() -> None:
    cache = make(4000, budget=300)
    pin = computed(cache, 1, 300)
    for seed in range(2, 9):
        cache.release(computed(cache, seed, 300).slots)
        assert cache.chunks.num_rows <= 300 + 268
    assert found(cache, pin) == 268
    cache.release(pin.slots)
    assert cache.chunks.num_rows <= 300


def test_without_a_budget_nothing_is_registered() -> None:
    cache = make(1000, budget=0)
    assert found(cache, computed(cache, 1, 300)) == 0


def test_evicting_from_a_large_pool_takes_no_scan_of_it() -> None:
    """Each round costs what it frees: the pool has 8,000 chunks, all of them young but those of the first texts."""
    cache = make(1_000_000)
    for seed in range(40):
        rows = computed(cache, seed, 25_000)
        cache.release(rows.slots)
    took = []
    for _ in range(5):  # the quickest counts: a loaded machine makes any of them long
        begun = time.perf_counter()
        cache.allocate(np.arange(4096, dtype=np.int32))
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.1
