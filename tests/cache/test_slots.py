"""The slot table: exact slots, exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_server.cache.slots import Holder, OutOfSlots, SlotTable, ascending


def _slots(*numbers):
    return np.array(numbers, np.int32)


def _positions(count, start=0):
    return np.arange(start, start + count, dtype=np.int32)


def test_slots_come_lowest_first_and_come_back():
    table = SlotTable(6)
    first = table.allocate(_positions(4))
    assert first.tolist() == [0, 1, 2, 3]
    assert table.release(first[1:3], Holder.SESSION).tolist() == [1, 2]
    assert table.allocate(_positions(3)).tolist() == [1, 2, 4]
    assert (table.num_free, table.in_use, table.cached) == (1, 5, 0)


def test_a_refused_allocation_takes_nothing():
    table = SlotTable(3)
    table.allocate(_positions(2))
    with pytest.raises(OutOfSlots) as caught:
        table.allocate(_positions(2))
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert table.num_free == 1
    assert table.allocate(_positions(1)).tolist() == [2]


def test_facts_of_a_slot_are_fresh_at_each_allocation():
    table = SlotTable(3)
    slots = table.allocate(_positions(3, start=7))
    table.context[slots] = 5
    table.release(slots, Holder.SESSION)
    again = table.allocate(_positions(2, start=1))
    assert table.written_at[again].tolist() == [1, 2]
    assert table.context[again].tolist() == [0, 0]


def test_a_slot_is_free_when_its_last_holder_of_either_kind_goes():
    table = SlotTable(4)
    slots = table.allocate(_positions(2))
    table.retain(slots, Holder.SESSION)
    table.retain(slots[:1], Holder.CACHE)
    assert table.last_session(slots) == 0
    table.release(slots, Holder.SESSION)
    assert table.last_session(slots) == 2
    assert not table.only_cached(slots).any()
    table.release(slots, Holder.SESSION)
    assert table.only_cached(slots[:1]).tolist() == [True]
    assert (table.num_free, table.in_use, table.cached) == (3, 0, 1)
    table.release(slots[:1], Holder.CACHE)
    assert table.num_free == 4


def test_a_list_may_hold_a_slot_twice():
    """An undo can bring a row back beside a hit of the same row in the tree."""
    table = SlotTable(2)
    slots = table.allocate(_positions(2))
    table.retain(slots[:1], Holder.SESSION)
    twice = _slots(0, 1, 0)
    assert table.last_session(slots) == 1
    assert table.last_session(twice) == 2
    table.check_integrity([twice], [])
    table.release(twice, Holder.SESSION)
    assert table.num_free == 2


def test_pending_entries_are_passed_over():
    table = SlotTable(2)
    slots = _slots(-1, *table.allocate(_positions(1)), -1)
    table.retain(slots, Holder.CACHE)
    assert table.only_cached(slots).tolist() == [False, False, False]
    assert table.last_session(slots) == 1
    table.release(slots, Holder.CACHE)
    table.release(slots, Holder.SESSION)
    assert table.num_free == 2


def test_release_names_what_became_free():
    table = SlotTable(4)
    slots = table.allocate(_positions(3))
    table.retain(slots[:1], Holder.CACHE)
    assert table.release(slots, Holder.SESSION).tolist() == [1, 2]
    assert table.release(slots[:1], Holder.CACHE).tolist() == [0]


def test_mistakes_are_caught():
    table = SlotTable(4)
    slots = table.allocate(_positions(2))
    with pytest.raises(AssertionError, match="free slot"):
        table.retain(_slots(3), Holder.SESSION)
    with pytest.raises(AssertionError, match="more often"):
        table.release(slots, Holder.CACHE)


@pytest.mark.parametrize("wrong", ["a session more", "a session less", "a cache less"])
def test_integrity_finds_a_wrong_count(wrong):
    table = SlotTable(4)
    slots = table.allocate(_positions(2))
    table.retain(slots, Holder.CACHE)
    table.check_integrity([slots], [slots])
    sessions = {"a session more": [slots, slots[:1]], "a session less": [], "a cache less": [slots]}[wrong]
    with pytest.raises(AssertionError, match="differ from their holders"):
        table.check_integrity(sessions, [] if wrong == "a cache less" else [slots])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=30))
def test_any_order_of_operations_keeps_the_books(operations):
    table, sessions, caches = SlotTable(12), [], []
    for kind, size, cache in operations:
        lists, holder = (caches, Holder.CACHE) if cache else (sessions, Holder.SESSION)
        if kind <= 1 and size <= table.num_free:
            sessions.append(table.allocate(_positions(size)))
        elif kind == 2 and sessions:
            held = sessions[size % len(sessions)]
            table.retain(held, holder)
            lists.append(held)
        elif kind == 3 and lists:
            table.release(lists.pop(size % len(lists)), holder)
        table.check_integrity(sessions, caches)
    for holder, lists in ((Holder.SESSION, sessions), (Holder.CACHE, caches)):
        for held in lists:
            table.release(held, holder)
    table.check_integrity([], [])
    assert table.num_free == 12


def test_ascending_has_each_number_once():
    numbers = np.array([7, 1, 2**63 + 5, 7, 1], np.uint64)
    assert ascending(numbers).tolist() == [1, 7, 2**63 + 5]
    assert ascending(numbers[:0]).tolist() == []
