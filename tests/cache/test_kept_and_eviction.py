"""Rows kept for undo, and the order in which the caches give way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leyline_server.cache.influence import Influence
from leyline_server.cache.kept import KeptRows
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.cache.slots import PENDING, Holder, OutOfSlots
from leyline_server.edit.rows import Rows

NAMESPACE = ("a", "m")


@pytest.fixture
def cache():
    return KVCache(Pool(2, 12, 4, 2, torch.float32, torch.device("cpu")), chunk_budget=0)


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


def test_edits_that_share_slots_are_found_when_one_lets_go(table, computed):
    kept = KeptRows(table)
    rows = computed([1, 2, 3, 4])
    for now, (start, end) in enumerate([(0, 2), (1, 3), (0, 4), (3, 4)]):
        kept.keep((1, f"e{now}"), rows.ids[start:end], rows.slots[start:end], now)
    assert kept.oldest() is None
    table.release(kept.drop((1, "e2")), Holder.CACHE)
    assert kept.oldest() is None
    table.release(rows.slots[1:2], Holder.SESSION)
    assert kept.oldest() == 0
    kept.check_integrity()
    table.retain(rows.slots[1:2], Holder.SESSION)
    assert kept.oldest() is None
    table.release(rows.slots[2:3], Holder.SESSION)
    assert kept.oldest() == 1
    kept.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_is_always_what_a_search_of_all_finds(table, computed, seed):
    """Any order of keeping, copying, holding, letting go and evicting, with edits that overlap."""
    rng = np.random.default_rng(seed)
    kept = KeptRows(table)
    rows = computed(range(12))
    held = rng.integers(0, 2, 12) + 1  # references of sessions, by index
    table.retain(rows.slots[held == 2], Holder.SESSION)
    edits = {}  # by key: when it was kept, and which rows
    anchor = rows.slots.copy()
    table.retain(anchor, Holder.CACHE)  # so that no slot is ever free
    evicted = 0
    for now in range(300):
        what = rng.integers(6)
        index = np.unique(rng.integers(0, 12, 3))
        if what == 0 and len(edits) < 8:
            key = (int(rng.integers(3)), f"e{now}")
            kept.keep(key, rows.ids[index], rows.slots[index], now // 7)
            edits[key] = (now // 7, index)
        elif what == 1 and edits:
            key = list(edits)[rng.integers(len(edits))]
            drop = kept.drop if rng.integers(2) else kept.drop_slots
            table.release(drop(key), Holder.CACHE)
            del edits[key]
        elif what == 2:
            table.retain(rows.slots[index], Holder.SESSION)
            held[index] += 1
        elif what <= 4:
            index = index[held[index] > 0]
            table.release(rows.slots[index], Holder.SESSION)
            held[index] -= 1
        free = sorted((used, *key) for key, (used, index) in edits.items() if (held[index] == 0).any())
        if rng.integers(2):
            assert kept.oldest() == (free[0][0] if free else None)
        if what == 5 and free:
            table.release(kept.evict(1), Holder.CACHE)
            key = free[0][1:]
            assert (kept.get(key)[1] == PENDING).all()
            del edits[key]
            evicted += 1
        kept.check_integrity()
        table.check_integrity([np.repeat(rows.slots, held)], [anchor, *kept.slots()])
    assert evicted > 3


def test_edits_without_rows_and_edits_that_wait_are_not_looked_at_again(table, computed, monkeypatch):
    kept = KeptRows(table)
    waits, old, new = computed([1]), computed([2]), computed([3])
    for n in range(50):
        kept.keep((1, f"w{n}"), waits.ids, waits.slots, 0)
        kept.keep((1, f"p{n}"), old.ids, np.full(1, PENDING, np.int32), 0)
        kept.keep((1, f"o{n}"), old.ids, old.slots, 1)
    kept.keep((1, "new"), new.ids, new.slots, 2)
    table.release(old.slots, Holder.SESSION)
    table.release(new.slots, Holder.SESSION)
    while kept.oldest() == 1:
        table.release(kept.evict(1), Holder.CACHE)
    looked = []
    only_cached = table.only_cached
    monkeypatch.setattr(table, "only_cached", lambda slots: looked.append(slots) or only_cached(slots))
    assert kept.oldest() == 2
    assert [slots.tolist() for slots in looked] == [new.slots.tolist()]
    kept.check_integrity()


def test_the_order_forgets_what_was_dropped_while_the_pool_is_not_full(table, computed):
    kept = KeptRows(table)
    rows = computed([1])
    for n in range(100):
        kept.keep((1, f"e{n}"), rows.ids, rows.slots, n)
        table.release(kept.drop((1, f"e{n}")), Holder.CACHE)
    assert len(kept._order) <= 2


def test_both_caches_are_told_when_the_last_session_lets_go(cache):
    text, cut = _computed(cache, [1, 2]), _computed(cache, [3])
    cache.tree.insert(NAMESPACE, text.ids, text.slots, 1)
    cache.kept.keep((1, "e"), cut.ids, cut.slots, 2)
    assert (cache.tree.oldest(), cache.kept.oldest()) == (None, None)
    cache.release(np.concatenate([text.slots, cut.slots]))
    assert (cache.tree.oldest(), cache.kept.oldest()) == (1, 2)
    cache.check_integrity([])


@pytest.mark.parametrize("held_by", ["tree", "kept"])
def test_a_large_full_pool_gives_up_several_slots_at_once(held_by):
    """One in 256, or as many as are wanted: else every step of a full pool would evict."""
    cache = KVCache(Pool(2, 1024, 4, 2, torch.float32, torch.device("cpu")), chunk_budget=0)
    rows = _computed(cache, range(1024))
    if held_by == "tree":
        cache.tree.insert(NAMESPACE, rows.ids, rows.slots, cache.tick())
    else:
        for n in range(1024):
            cache.kept.keep((1, f"e{n}"), rows.ids[n : n + 1], rows.slots[n : n + 1], cache.tick())
    cache.release(rows.slots)
    taken = cache.allocate(np.arange(1, dtype=np.int32))
    assert cache.table.num_free == 3
    taken = np.concatenate([taken, cache.allocate(np.arange(3, dtype=np.int32))])
    assert cache.table.num_free == 0
    taken = np.concatenate([taken, cache.allocate(np.arange(9, dtype=np.int32))])
    assert cache.table.num_free == 0
    cache.check_integrity([taken])


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
