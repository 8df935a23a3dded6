"""Rows kept for undo, and the order in which the caches give way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_server.cache.influence import Influence
from leyline_server.cache.kept import KeptRows
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.cache.slots import Holder, OutOfSlots
from leyline_server.edit.rows import Rows

NAMESPACE = ("a", "m")


@pytest.fixture
def cache():
    return KVCache(Pool(2, 12, 4, 2, torch.float32, torch.device("cpu")))


def _computed(cache, ids):
    rows = Rows.empty().appended(ids)
    index = np.arange(len(ids))
    rows = rows.filled(index, cache.allocate(index.astype(np.int32)))
    rows.note_contexts(cache.table, index)
    slots = torch.as_tensor(rows.slots).long()
    for layer in range(2):
        cache.pool.write(layer, slots, torch.ones(len(ids), 4), torch.ones(len(ids), 2))
    return rows


def test_kept_rows_outlive_their_session_and_can_be_copied(table, computed):
    kept = KeptRows(table)
    rows = computed([1, 2, 3])
    kept.keep((1, "e"), rows.ids, rows.slots, now=1)
    table.release(rows.slots, Holder.SESSION)
    assert (table.in_use, table.cached) == (0, 3)
    kept.copy(1, 2)
    assert kept.keys(2) == [(2, "e")]
    table.check_integrity([], kept.slots())
    table.release(kept.drop((1, "e")), Holder.CACHE)
    assert table.cached == 3
    ids, slots = kept.get((2, "e"))
    assert (ids.tolist(), slots.tolist()) == ([1, 2, 3], rows.slots.tolist())
    assert not kept.has((1, "e"))
    assert len(kept.drop((1, "e"))) == 0


def test_dropped_slots_leave_the_text_and_its_contexts(table, computed):
    kept = KeptRows(table)
    rows = computed([1, 2, 3])
    kept.keep((1, "e"), rows.ids, rows.slots, now=1)
    assert kept.drop_slots((1, "e")).tolist() == rows.slots.tolist()
    ids, slots = kept.get((1, "e"))
    assert (ids.tolist(), slots.tolist()) == ([1, 2, 3], [-1, -1, -1])
    influence = Influence()
    kept.add_to(influence, (1, "e"))
    table.release(rows.slots, Holder.SESSION)
    assert influence.among(rows.contexts).all()
    assert not influence.among(rows.contexts + np.uint64(1)).any()


def test_the_oldest_edit_whose_rows_no_session_holds_gives_way(table, computed):
    kept = KeptRows(table)
    held, old, new = computed([1]), computed([2, 3]), computed([4])
    for now, rows in enumerate((held, old, new)):
        kept.keep((1, f"e{now}"), rows.ids, rows.slots, now)
    assert kept.oldest() is None
    table.release(old.slots, Holder.SESSION)
    table.release(new.slots, Holder.SESSION)
    assert kept.oldest() == 1
    assert kept.evict(1).tolist() == old.slots.tolist()
    assert kept.oldest() == 2


def test_the_least_recently_used_gives_way_whichever_cache_holds_it(cache):
    tree_old, kept_mid, tree_new = (_computed(cache, [i, 9, 9, 9]) for i in range(3))
    cache.tree.insert(NAMESPACE, tree_old.ids, tree_old.slots, cache.tick())
    cache.kept.keep((1, "e"), kept_mid.ids, kept_mid.slots, cache.tick())
    cache.tree.insert(NAMESPACE, tree_new.ids, tree_new.slots, cache.tick())
    for rows in (tree_old, kept_mid, tree_new):
        cache.release(rows.slots)
    taken = cache.allocate(np.arange(3, dtype=np.int32))
    assert set(taken) == set(tree_old.slots[1:]), "from the end of the oldest text"
    taken = np.concatenate([taken, cache.allocate(np.arange(2, dtype=np.int32))])
    assert len(cache.tree.match(NAMESPACE, tree_old.ids, cache.tick())) == 0
    assert (cache.kept.get((1, "e"))[1] == -1).all()
    assert len(cache.tree.match(NAMESPACE, tree_new.ids, cache.tick())) == 4
    cache.check_integrity([taken])


def test_more_than_all_caches_hold_is_refused_and_sessions_lose_nothing(cache):
    session, cached = _computed(cache, [1, 2, 3, 4]), _computed(cache, [5, 6])
    cache.tree.insert(NAMESPACE, cached.ids, cached.slots, cache.tick())
    cache.release(cached.slots)
    with pytest.raises(OutOfSlots):
        cache.allocate(np.arange(9, dtype=np.int32))
    cache.check_integrity([session.slots])
    assert cache.table.in_use == 4


def test_release_says_how_far_use_fell(cache):
    rows = _computed(cache, [1, 2, 3])
    cache.retain(rows.slots[:1])
    cache.kept.keep((1, "e"), rows.ids, rows.slots, 1)
    assert cache.release(rows.slots) == 2
    assert cache.table.in_use == 1


def test_rows_are_zeroed_when_the_last_holder_lets_go(cache):
    rows = _computed(cache, [1, 2, 3])
    cache.tree.insert(NAMESPACE, rows.ids, rows.slots, 1)
    cache.release(rows.slots)
    assert (cache.pool.c_kv[:, :3] == 1).all()
    cache.clear_caches()
    assert (cache.pool.c_kv[:, :3] == 0).all()
    assert (cache.pool.k_pe[:, :3] == 0).all()
