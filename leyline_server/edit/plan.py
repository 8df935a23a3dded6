"""What a set of edits makes of a list of rows. Pure: a list in, a list out, nothing released or computed.

Owns the arithmetic of several disjoint edits at once. `LocalEngine` carries a plan out; a dry run only reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from leyline_proto.repair import NO_REPAIR
from leyline_server.cache.slots import PENDING, Slots
from leyline_server.edit.rows import Ids, Rows, Span
from leyline_server.engine.engine import RowEdit


@dataclass(frozen=True, slots=True)
class PlannedEdit:
    """One edit's outcome. `at`: where its R stands in the final list. `ids`, `slots`: the span that goes.

    repaired: the slots of entries behind it that it makes pending. num_repaired: entries with KV that it has computed
    again; of those it puts in doubt, its share.
    """

    edit: RowEdit
    at: int
    ids: Ids
    slots: Slots
    repaired: Slots
    num_repaired: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows` is the final list; `tail_ids`, `tail_slots`: entries with KV that stay and lose it to a FORGET; `reached`:
    slots of others that lose it, because their rows were computed from the span elsewhere."""

    rows: Rows
    edits: tuple[PlannedEdit, ...]  # in the order given
    tail_ids: Ids
    tail_slots: Slots
    forget_from: int | None
    reached: Slots = field(default_factory=lambda: np.zeros(0, np.int32))


def plan(rows: Rows, edits: Sequence[RowEdit]) -> Plan:
    """Edits must be in bounds and disjoint."""
    none = np.zeros(0, np.int32)
    order = sorted(range(len(edits)), key=lambda i: (edits[i].start, edits[i].end, i))
    planned: dict[int, PlannedEdit] = {}
    spans: list[Span] = []
    shift = 0
    forget_from: int | None = None
    for index in order:
        edit = edits[index]
        start, end = edit.start + shift, edit.end + shift
        ids = np.asarray(edit.ids, np.int32)
        gone = slice(edit.start, edit.end)
        planned[index] = PlannedEdit(edit, start, rows.ids[gone], rows.slots[gone], none)
        if len(ids) or end > start:
            spans.append((edit.start, edit.end, ids, np.full(len(ids), PENDING, np.int32)))
        shift += len(ids) - (end - start)
        if edit.forget and forget_from is None:
            forget_from = start + len(ids)
    new = rows.edited(spans) if spans else rows
    tail_ids = tail_slots = none
    if forget_from is not None:
        tail_slots = new.slots[forget_from:]
        held = tail_slots >= 0
        tail_ids, tail_slots = new.ids[forget_from:][held], tail_slots[held]
        new = new.pending_from(forget_from)
    until = len(new)
    for index in reversed(order) if any(edit.repair != NO_REPAIR for edit in edits) else ():
        item = planned[index]
        behind = item.at + len(item.edit.ids)
        new, repaired, count = _repaired(new, item.edit, behind, until)
        planned[index] = replace(item, repaired=repaired, num_repaired=count)
        if len(item.edit.ids) or len(item.ids):  # else it stands for another, and does nothing here
            until = item.at
    return Plan(new, tuple(planned[i] for i in range(len(edits))), tail_ids, tail_slots, forget_from)


def _repaired(rows: Rows, edit: RowEdit, start: int, end: int) -> tuple[Rows, Slots, int]:
    """The list with the repair of an edit whose kept entries are [start, end); the slots that go, the entries that are
    computed again."""
    first = len(rows) if edit.repair.share == 1 else edit.repair.first
    known = np.flatnonzero(rows.slots[start : min(end, start + first)] >= 0) + start
    slots = rows.slots[known]
    if len(known):
        rows = rows.made_pending(known)
    if not 0 < edit.repair.share < 1:
        return rows, slots, len(known)
    doubted = rows.doubted([(start, end)], edit.repair.share)
    return doubted, slots, doubted.num_to_repair - rows.num_to_repair
