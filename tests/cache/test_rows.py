"""Lists of rows: list operations, and what the slots' contexts say about exactness."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leyline_server.cache.slots import PENDING, SlotTable
from leyline_server.edit.rows import Rows

IDS = st.lists(st.integers(0, 5), max_size=12)


def _pending(count):
    return np.full(count, PENDING, np.int32)


def _ids(*ids):
    return np.array(ids, np.int32)


def test_operations_make_new_values(computed):
    rows = computed([1, 2, 3, 4])
    before = rows.ids.tolist(), rows.slots.tolist(), rows.contexts.tolist()
    rows.appended([5])
    rows.spliced(1, 2, _ids(9), _pending(1))
    rows.pending_from(1)
    rows.filled(np.array([0]), PENDING)
    rows.truncated(2)
    assert (rows.ids.tolist(), rows.slots.tolist(), rows.contexts.tolist()) == before


def test_spliced_keeps_the_slots_around(computed):
    rows = computed([1, 2, 3, 4]).spliced(1, 3, _ids(9), _pending(1))
    assert rows.ids.tolist() == [1, 9, 4]
    assert rows.slots.tolist() == [0, PENDING, 3]
    assert rows.pending.tolist() == [1]


@given(IDS, IDS, st.integers(0, 12), st.integers(0, 12))
def test_contexts_depend_on_the_text_alone(text, added, a, b):
    start, end = sorted((min(a, len(text)), min(b, len(text))))
    spliced = Rows.empty().appended(text).spliced(start, end, _ids(*added), _pending(len(added)))
    whole = Rows.empty().appended([*text[:start], *added, *text[end:]])
    assert spliced.ids.tolist() == whole.ids.tolist()
    assert spliced.contexts.tolist() == whole.contexts.tolist()
    in_parts = Rows.empty().appended(text[:start]).appended(text[start:])
    assert in_parts.contexts.tolist() == Rows.empty().appended(text).contexts.tolist()


@given(IDS, IDS)
def test_contexts_tell_texts_apart(one, other):
    a, b = Rows.empty().appended(one).contexts, Rows.empty().appended(other).contexts
    for i in range(min(len(one), len(other))):
        assert (a[i] == b[i]) == (one[: i + 1] == other[: i + 1])


def test_contexts_know_the_position():
    """The same ids one place on, and in another order: a sum alone would not tell."""
    contexts = [Rows.empty().appended(ids).contexts[-1] for ids in ([1, 2, 1], [2, 1, 1], [1, 1, 2], [1, 2], [0, 1, 2])]
    assert len(set(contexts)) == 5


def test_exactness_follows_the_edits(computed, table):
    rows = computed([1, 2, 3, 4, 5])
    assert rows.exact_upto(table) == 5
    assert not rows.turned(table).any()
    edited = rows.spliced(1, 2, _ids(), _pending(0))
    assert edited.exact_upto(table) == 1
    assert edited.turned(table).tolist() == [False, True, True, True]
    back = edited.spliced(1, 1, _ids(2), rows.slots[1:2])
    assert back.exact_upto(table) == 5
    other = edited.spliced(1, 1, _ids(7), rows.slots[1:2])
    assert other.exact_upto(table) == 1, "the slot was computed from another id"


def test_a_row_in_another_place_is_not_exact(computed, table):
    rows = computed([1, 1, 1])
    moved = rows.spliced(0, 1, _ids(), _pending(0))
    assert moved.exact_upto(table) == 0


def test_only_what_was_computed_over_an_exact_front_is_exact(computed, table):
    rows = computed([1, 2, 3, 4]).spliced(1, 2, _ids(8, 9), _pending(2)).appended([5])
    index = rows.pending
    assert index.tolist() == [1, 2, 5]
    rows = rows.filled(index, table.allocate(index.astype(np.int32)))
    rows.note_contexts(table, index)
    assert rows.exact_upto(table) == 3
    assert (table.context[rows.slots] != 0).tolist() == [True, True, True, True, True, False]
    assert table.context[rows.slots[5]] == 0, "computed over rows of another text"
    # Put back, the old rows are exact again; what was computed between never is.
    assert rows.spliced(1, 3, _ids(2), _ids(1)).exact_upto(table) == 4


def test_pending_entries_end_what_is_exact(computed, table):
    rows = computed([1, 2, 3])
    assert rows.filled(np.array([1]), PENDING).exact_upto(table) == 1
    assert rows.appended([4]).exact_upto(table) == 3
    assert Rows.empty().exact_upto(table) == 0
    assert rows.pending_from(0).num_pending == 3


@given(IDS, st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), IDS), max_size=4))
def test_a_chunked_computation_is_exact_to_its_end(text, edits):
    """FORGET at every edit: whatever came before, the list is exact once all is computed."""
    table = SlotTable(4096)
    rows = Rows.empty().appended(text)
    for where, size, ids in [(0, 0, []), *edits]:
        start = min(where, len(rows))
        rows = rows.spliced(start, min(len(rows), start + size), _ids(*ids), _pending(len(ids))).pending_from(start)
        while rows.num_pending:
            index = rows.pending[:3]
            rows = rows.filled(index, table.allocate(index.astype(np.int32)))
            rows.note_contexts(table, index)
        assert rows.exact_upto(table) == len(rows)
