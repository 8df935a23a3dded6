"""What a set of edits makes of a list of rows. Pure: a list in, a list out, nothing released or computed.

Owns the arithmetic of several disjoint edits at once. `LocalEngine` carries a plan out; a dry run only reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leyline_server.cache.slots import PENDING, Slots
from leyline_server.edit.rows import Ids, Rows, Span
from leyline_server.engine.engine import RowEdit


@dataclass(frozen=True, slots=True)
class PlannedEdit:
    """One edit's outcome. `at`: where its R stands in the final list. `ids`, `slots`: the span that goes."""

    edit: RowEdit
    at: int
    ids: Ids
    slots: Slots


@dataclass(frozen=True, slots=True)
class Plan:
    """`rows` is the final list; `tail_ids`, `tail_slots`: entries with KV that stay and lose it to a FORGET."""

    rows: Rows
    edits: tuple[PlannedEdit, ...]  # in the order given
    tail_ids: Ids
    tail_slots: Slots
    forget_from: int | None


def plan(rows: Rows, edits: Sequence[RowEdit]) -> Plan:
    """Edits must be in bounds and disjoint."""
    planned: dict[int, PlannedEdit] = {}
    spans: list[Span] = []
    shift = 0
    forget_from: int | None = None
    for index in sorted(range(len(edits)), key=lambda i: (edits[i].start, edits[i].end, i)):
        edit = edits[index]
        start, end = edit.start + shift, edit.end + shift
        ids = np.asarray(edit.ids, np.int32)
        planned[index] = PlannedEdit(edit, start, rows.ids[edit.start : edit.end], rows.slots[edit.start : edit.end])
        if len(ids) or end > start:
            spans.append((edit.start, edit.end, ids, np.full(len(ids), PENDING, np.int32)))
        shift += len(ids) - (end - start)
        if edit.forget and forget_from is None:
            forget_from = start + len(ids)
    new = rows.edited(spans) if spans else rows
    tail_ids = tail_slots = np.zeros(0, np.int32)
    if forget_from is not None:
        tail_slots = new.slots[forget_from:]
        held = tail_slots >= 0
        tail_ids, tail_slots = new.ids[forget_from:][held], tail_slots[held]
        new = new.pending_from(forget_from)
    return Plan(new, tuple(planned[i] for i in range(len(edits))), tail_ids, tail_slots, forget_from)
