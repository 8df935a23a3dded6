"""Rows kept for undo: what an AMORTIZE cut out, until it is undone, forgotten, or evicted.

Owns one reference (kind CACHE) on each kept slot. Evicting takes the slots and leaves the ids: an undo then brings
the text back as pending entries. It does not know where the rows stood; the edit log does.

An edit that holds slots either stands in the order of eviction or waits: sessions hold all of its slots, and the slot
table tells when one of them lets go. One that holds none costs an eviction nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from leyline_server.cache.influence import Influence
from leyline_server.cache.slots import PENDING, Holder, Slots, SlotTable, distinct, indices
from leyline_server.edit.rows import Contexts, Ids

EditKey = tuple[int, str]
"""(sequence, edit id)."""

_Age = tuple[int, int, str, int]
"""(when it was kept, sequence, edit id, number): smaller gives way first. No two edits ever have the same number."""

_NONE: Final = np.zeros(0, np.uint64)
_PEEK: Final = 256  # slots that are looked at first: mostly all of an edit's rows can be freed


@dataclass(slots=True, eq=False)
class _Kept:
    ids: Ids
    slots: Slots
    age: _Age
    lost: Contexts  # of slots that were taken: finds their text in the tree

    @property
    def used(self) -> int:
        return self.age[0]

    @property
    def number(self) -> int:
        return self.age[3]


class KeptRows:
    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._kept: dict[int, dict[str, _Kept]] = {}
        self._holding: dict[int, _Kept] = {}  # by number: those that hold slots
        self._next_number = 1
        # Of each that holds slots and does not wait one entry, and entries of some that hold none any more.
        self._order: list[_Age] = []
        # By number: those that wait, each with others that shared a slot with it and waited before.
        self._waiting: dict[int, set[int]] = {}
        self._waits_for = np.zeros(table.num_slots, np.int64)  # who last began to wait for a slot: a number, or 0
        table.watch_cached.append(self._now_cached)

    def keep(self, key: EditKey, ids: Ids, slots: Slots, now: int) -> None:
        """Retains the slots under this edit, which is not kept yet. The caller still releases its own references."""
        assert not self.has(key), "an edit is kept twice"
        self._table.retain(slots, Holder.CACHE)
        kept = _Kept(ids, slots, (now, *key, self._next_number), np.zeros(0, np.uint64))
        self._next_number += 1
        self._kept.setdefault(key[0], {})[key[1]] = kept
        if (slots >= 0).any():
            self._holding[kept.number] = kept
            self._queue(kept)

    def get(self, key: EditKey) -> tuple[Ids, Slots]:
        kept = self._kept[key[0]][key[1]]
        return kept.ids, kept.slots

    def has(self, key: EditKey) -> bool:
        return key[1] in self._kept.get(key[0], {})

    def add_to(self, influence: Influence, key: EditKey, without: Contexts = _NONE) -> None:
        """Adds what the edit's rows were computed from, also of rows that were taken since; but these contexts."""
        if self.has(key):
            kept = self._kept[key[0]][key[1]]
            own = np.isin(self._table.context[indices(kept.slots)], without, invert=True) & (kept.slots >= 0)
            influence.add_rows(self._table, kept.ids[own], kept.slots[own])
            influence.add_scattered(np.setdiff1d(kept.lost, without))

    def drop(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and text. Returns the slots to release."""
        owned = self._kept.get(key[0], {})
        kept = owned.pop(key[1], None)
        if not owned:
            self._kept.pop(key[0], None)
        if kept is None:
            return np.zeros(0, np.int32)
        self._holds_none(kept)
        return kept.slots

    def drop_slots(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and keeps its text. Returns the slots to release."""
        if not self.has(key):
            return np.zeros(0, np.int32)
        kept = self._kept[key[0]][key[1]]
        slots, kept.slots = kept.slots, np.full_like(kept.slots, PENDING)
        kept.lost = np.concatenate([kept.lost, self._table.context[slots[slots >= 0]]])
        self._holds_none(kept)
        return slots

    def copy(self, source: int, target: int) -> None:
        """A fork can undo what its origin could."""
        for edit_id, kept in list(self._kept.get(source, {}).items()):
            self.keep((target, edit_id), kept.ids, kept.slots, kept.used)
            self._kept[target][edit_id].lost = kept.lost

    def keys(self, owner: int) -> list[EditKey]:
        return [(owner, edit_id) for edit_id in self._kept.get(owner, {})]

    def holding(self, owner: int) -> list[Slots]:
        return [kept.slots for kept in self._kept.get(owner, {}).values()]

    def oldest(self) -> int | None:
        """When the rows that `evict` would take were kept; None when no eviction frees a slot."""
        kept = self._coldest()
        return None if kept is None else kept.used

    def evict(self, wanted: int) -> Slots:
        """Takes the slots of the oldest edit, whatever `wanted`. Returns the slots to release."""
        kept = self._coldest()
        assert kept is not None, "evict without oldest"
        _, owner, edit_id, _ = kept.age
        return self.drop_slots((owner, edit_id))

    def clear(self) -> list[Slots]:
        """Takes the slots of every edit. Returns the slots to release."""
        return [self.drop_slots((owner, edit_id)) for owner in list(self._kept) for edit_id in list(self._kept[owner])]

    def slots(self) -> list[Slots]:
        return [slots for owner in self._kept for slots in self.holding(owner)]

    def check_integrity(self) -> None:
        """Asserts that eviction passes over no edit that has something to free, nor twice over one."""
        kept = [kept for owned in self._kept.values() for kept in owned.values()]
        assert self._holding == {kept.number: kept for kept in kept if (kept.slots >= 0).any()}
        queued = sorted(age[3] for age in self._order if age[3] in self._holding)
        assert queued == sorted(self._holding.keys() - self._waiting.keys())
        assert self._waiting.keys() <= self._holding.keys()
        for number in self._waiting:
            assert not self._table.only_cached(self._holding[number].slots).any(), "eviction would pass over an edit"

    # ------------------------------------------------------------ the order of eviction

    def _coldest(self) -> _Kept | None:
        """The oldest edit that has something to free."""
        while self._order:
            kept = self._holding.get(self._order[0][3])
            if kept is not None and self._frees(kept):
                return kept
            heapq.heappop(self._order)
            if kept is not None:
                self._wait(kept)
        return None

    def _frees(self, kept: _Kept) -> bool:
        return any(self._table.only_cached(slots).any() for slots in (kept.slots[:_PEEK], kept.slots[_PEEK:]))

    def _queue(self, kept: _Kept) -> None:
        heapq.heappush(self._order, kept.age)
        if len(self._order) > 2 * len(self._holding):
            # Nothing else takes the others out while the pool is not full.
            self._order = [age for age in self._order if age[3] in self._holding]
            heapq.heapify(self._order)

    def _wait(self, kept: _Kept) -> None:
        # A slot has room for one number. Who stood there before is woken together with who stands there now; woken for
        # nothing, it waits again once its turn comes.
        held = kept.slots[kept.slots >= 0]
        self._waiting[kept.number] = self._waiting_for(held)
        self._waits_for[indices(held)] = kept.number

    def _now_cached(self, slots: Slots) -> None:
        """No session holds these slots any more: who waits for one of them has something to free."""
        if self._waiting:
            self._wake(self._waiting_for(slots))

    def _waiting_for(self, held: Slots) -> set[int]:
        return self._waiting.keys() & distinct(self._waits_for[indices(held)])

    def _wake(self, numbers: Iterable[int]) -> None:
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number in self._waiting:
                stack.extend(self._waiting.pop(number))
                self._queue(self._holding[number])

    def _holds_none(self, kept: _Kept) -> None:
        # Its number stays in `_waits_for` and means nothing from now on: those behind it may not rely on it.
        self._holding.pop(kept.number, None)
        self._wake(self._waiting.pop(kept.number, ()))
