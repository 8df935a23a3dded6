"""The prefix tree: exact ids, splits, the order of eviction, cuts by context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_server.cache.influence import Influence
from leyline_server.cache.prefix_tree import PrefixTree
from leyline_server.cache.slots import Holder, SlotTable
from leyline_server.edit.rows import Rows

A, B = ("a", "m"), ("b", "m")


@pytest.fixture
def tree(table):
    return PrefixTree(table)


def _ids(*ids):
    return np.array(ids, np.int32)


def _insert(tree, rows, now=1, namespace=A):
    tree.insert(namespace, rows.ids, rows.slots, now)
    tree.check_integrity()


def _influence(contexts):
    influence = Influence()
    influence.add_scattered(contexts)
    return influence


def _close(table, rows):
    table.release(rows.slots, Holder.SESSION)


def test_the_longest_common_prefix_is_found(tree, computed):
    rows = computed([1, 2, 3, 4])
    _insert(tree, rows)
    for ids, length in [((1, 2, 3, 4, 5), 4), ((1, 2, 3), 3), ((1, 2, 9), 2), ((9,), 0), ((), 0)]:
        assert tree.match(A, _ids(*ids), 2).tolist() == rows.slots[:length].tolist()


def test_namespaces_are_apart(tree, computed):
    mine, theirs = computed([1, 2, 3]), computed([1, 2, 3])
    _insert(tree, mine)
    assert len(tree.match(B, _ids(1, 2, 3), 2)) == 0
    _insert(tree, theirs, namespace=B)
    assert tree.match(A, _ids(1, 2, 3), 3).tolist() == mine.slots.tolist()
    assert tree.match(B, _ids(1, 2, 3), 3).tolist() == theirs.slots.tolist()
    assert len(tree.cut(A, _influence(mine.contexts))) == 3
    assert len(tree.match(B, _ids(1, 2, 3), 4)) == 3


def test_a_split_keeps_both_branches_and_takes_only_what_is_new(tree, computed, table):
    first, second = computed([1, 2, 3, 4]), computed([1, 2, 7, 8])
    _insert(tree, first)
    _insert(tree, second)
    assert tree.match(A, _ids(1, 2, 3, 4), 2).tolist() == first.slots.tolist()
    assert tree.match(A, _ids(1, 2, 7, 8), 2).tolist() == [*first.slots[:2], *second.slots[2:]]
    _close(table, second)
    assert table.cached == 2, "its first two rows were there already, and are free now"


def test_inserting_what_is_there_takes_no_reference(tree, computed, table):
    rows = computed([1, 2, 3])
    for length in (3, 2, 3):
        tree.insert(A, rows.ids[:length], rows.slots[:length], 1)
    table.check_integrity([rows.slots], tree.slots())
    _insert(tree, computed([1, 2, 3, 4]))
    assert sum(map(len, tree.slots())) == 4


def test_eviction_takes_the_least_recently_used_leaf_from_its_end(tree, computed, table):
    old, new = computed([1, 2, 3, 4]), computed([1, 2, 7, 8])
    _insert(tree, old, now=1)
    _insert(tree, new, now=2)
    _close(table, old)
    _close(table, new)
    tree.match(A, _ids(1, 2, 7), 3)
    assert tree.oldest() == 1
    assert tree.evict(1).tolist() == [old.slots[3]]
    table.release(old.slots[3:], Holder.CACHE)
    assert tree.evict(5).tolist() == [old.slots[2]], "no more than the node has"
    table.release(old.slots[2:3], Holder.CACHE)
    assert tree.oldest() == 3
    assert tree.evict(2).tolist() == new.slots[2:].tolist()
    table.release(new.slots[2:], Holder.CACHE)
    assert tree.evict(2).tolist() == old.slots[:2].tolist()
    table.release(old.slots[:2], Holder.CACHE)
    assert tree.oldest() is None
    table.check_integrity([], tree.slots())
    assert table.num_free == 64


def test_a_match_makes_a_leaf_younger(tree, computed, table):
    for now, ids in enumerate(([1, 2], [3, 4]), 1):
        rows = computed(ids)
        _insert(tree, rows, now=now)
        _close(table, rows)
    tree.match(A, _ids(1, 2), 9)
    assert table.written_at[tree.evict(1)].tolist() == [1]
    assert len(tree.match(A, _ids(3, 4), 10)) == 1
    assert len(tree.match(A, _ids(1, 2), 10)) == 2


def test_rows_that_a_session_holds_are_not_evicted(tree, computed, table):
    rows = computed([1, 2, 3, 4])
    _insert(tree, rows)
    assert tree.oldest() is None
    table.release(rows.slots[:2], Holder.SESSION)
    assert tree.oldest() == 1
    gone = tree.evict(1)
    assert rows.slots[1] in gone
    table.release(gone, Holder.CACHE)
    assert table.num_free == 61, "of what was given up, the session still holds two"


def test_cut_drops_what_was_computed_from_a_context_and_all_behind_it(tree, computed, table):
    first, second, third = computed([1, 2, 3, 4]), computed([1, 2, 3, 9]), computed([1, 5])
    for rows in (first, second, third):
        _insert(tree, rows)
    gone = tree.cut(A, _influence(first.contexts[2:3]))
    assert sorted(gone) == sorted([*first.slots[2:], second.slots[3]])
    tree.check_integrity()
    assert len(tree.match(A, _ids(1, 2, 3, 4), 2)) == 2
    assert len(tree.match(A, _ids(1, 5), 2)) == 2
    assert len(tree.cut(A, _influence(first.contexts[2:]))) == 0
    assert len(tree.cut(B, _influence(first.contexts))) == 0


def test_clear_gives_everything_back(tree, computed, table):
    for ids in ([1, 2], [1, 3], [4]):
        _insert(tree, computed(ids))
    gone = tree.clear()
    assert sorted(gone) == [0, 1, 3, 4]
    assert tree.slots() == []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.data())
def test_it_answers_as_a_dictionary_of_prefixes_would(texts, data):
    table = SlotTable(128)
    tree, model = PrefixTree(table), {}
    for now, ids in enumerate(texts):
        rows = Rows.empty().appended(ids)
        index = np.arange(len(ids))
        rows = rows.filled(index, table.allocate(index.astype(np.int32)))
        rows.note_contexts(table, index)
        tree.insert(A, rows.ids, rows.slots, now)
        for length in range(1, len(ids) + 1):
            model.setdefault(tuple(ids[:length]), int(rows.slots[length - 1]))
        table.release(rows.slots, Holder.SESSION)
        if data.draw(st.booleans()) and tree.oldest() is not None:
            gone = tree.evict(data.draw(st.integers(1, 4)))
            model = {prefix: slot for prefix, slot in model.items() if slot not in gone}
            table.release(gone, Holder.CACHE)
        tree.check_integrity()
        table.check_integrity([], tree.slots())
        for asked in texts:
            want = [model.get(tuple(asked[:n])) for n in range(1, len(asked) + 1)]
            want = want[: want.index(None)] if None in want else want
            assert tree.match(A, _ids(*asked), now).tolist() == want
