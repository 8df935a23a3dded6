"""Plans of edits, against Python's own lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyline_server.cache.slots import PENDING
from leyline_server.edit.plan import plan
from leyline_server.engine.engine import RowEdit


def _edit(start, end, ids=(), forget=False):
    return RowEdit(start, end, tuple(ids), f"{start}-{end}", forget=forget)


def test_one_edit(computed):
    rows = computed([1, 2, 3, 4, 5])
    planned = plan(rows, [_edit(1, 3, (9,))])
    assert planned.rows.ids.tolist() == [1, 9, 4, 5]
    assert planned.rows.slots.tolist() == [0, PENDING, 3, 4]
    (edit,) = planned.edits
    assert (edit.at, edit.ids.tolist(), edit.slots.tolist()) == (1, [2, 3], [1, 2])
    assert (planned.tail_slots.tolist(), planned.forget_from) == ([], None)


def test_several_in_any_order_are_answered_in_the_order_given(computed):
    rows = computed(range(10))
    planned = plan(rows, [_edit(7, 9), _edit(1, 2, (50, 51, 52)), _edit(4, 4, (60,))])
    assert planned.rows.ids.tolist() == [0, 50, 51, 52, 2, 3, 60, 4, 5, 6, 9]
    assert [edit.at for edit in planned.edits] == [10, 1, 6]
    assert [edit.ids.tolist() for edit in planned.edits] == [[7, 8], [1], []]


def test_forget_makes_all_behind_its_replacement_pending(computed):
    rows = computed(range(8))
    planned = plan(rows, [_edit(6, 7), _edit(2, 4, (90,), forget=True), _edit(0, 1)])
    assert planned.rows.ids.tolist() == [1, 90, 4, 5, 7]
    assert planned.rows.slots.tolist() == [1, PENDING, PENDING, PENDING, PENDING]
    assert planned.tail_slots.tolist() == [4, 5, 7]
    assert planned.forget_from == 2
    assert planned.edits[0].slots.tolist() == [6]


def test_an_empty_forget_names_a_place_alone(computed):
    planned = plan(computed(range(5)), [_edit(2, 2, forget=True)])
    assert planned.rows.ids.tolist() == [0, 1, 2, 3, 4]
    assert planned.rows.pending.tolist() == [2, 3, 4]


def test_touching_edits_and_insertions_at_one_place(computed):
    planned = plan(computed(range(6)), [_edit(2, 4, (70,)), _edit(4, 5, (80,)), _edit(2, 2, (60,))])
    assert planned.rows.ids.tolist() == [0, 1, 60, 70, 80, 5]
    assert [edit.at for edit in planned.edits] == [3, 4, 2]


def test_planning_changes_nothing(computed, table):
    rows = computed(range(6))
    before = rows.slots.tolist(), table.num_free, table.in_use
    plan(rows, [_edit(2, 4, (70,), forget=True)])
    assert (rows.slots.tolist(), table.num_free, table.in_use) == before
    table.check_integrity([rows.slots], [])


@given(st.data())
def test_any_disjoint_edits_equal_those_of_a_list(data):
    from leyline_server.edit.rows import Rows

    length = data.draw(st.integers(0, 12))
    marks = sorted(data.draw(st.sets(st.integers(0, length), max_size=8)))
    spans = zip(marks[::2], marks[1::2], strict=False)
    edits = [_edit(start, end, data.draw(st.lists(st.integers(50, 60), max_size=3))) for start, end in spans]
    edits = data.draw(st.permutations(edits))
    want = list(range(length))
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        want[edit.start : edit.end] = edit.ids
    planned = plan(Rows.empty().appended(range(length)), edits)
    assert planned.rows.ids.tolist() == want
    for item in planned.edits:
        assert want[item.at : item.at + len(item.edit.ids)] == list(item.edit.ids)
