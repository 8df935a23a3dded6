"""Rows kept for undo: what an AMORTIZE cut out, until it is undone, forgotten, or evicted.

Owns one reference (kind CACHE) on each kept slot. Evicting takes the slots and leaves the ids: an undo then brings
the text back as pending entries. It does not know where the rows stood; the edit log does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leyline_server.cache.slots import PENDING, Holder, Slots, SlotTable
from leyline_server.edit.rows import Contexts, Ids

EditKey = tuple[int, str]
"""(sequence, edit id)."""


@dataclass(slots=True)
class _Kept:
    ids: Ids
    slots: Slots
    contexts: Contexts  # of the slots when they were kept: finds their text in the tree after an eviction
    used: int


class KeptRows:
    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._kept: dict[EditKey, _Kept] = {}

    def keep(self, key: EditKey, ids: Ids, slots: Slots, now: int) -> None:
        """Retains the slots under this edit. The caller still releases its own references."""
        self._table.retain(slots, Holder.CACHE)
        contexts = np.where(slots >= 0, self._table.context[slots], np.uint64(0))
        self._kept[key] = _Kept(ids, slots, contexts, now)

    def get(self, key: EditKey) -> tuple[Ids, Slots]:
        kept = self._kept[key]
        return kept.ids, kept.slots

    def has(self, key: EditKey) -> bool:
        return key in self._kept

    def contexts(self, key: EditKey) -> Contexts:
        """What the edit's rows were computed from; 0 where that was not exact."""
        return self._kept[key].contexts if key in self._kept else np.zeros(0, np.uint64)

    def drop(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and text. Returns the slots to release."""
        kept = self._kept.pop(key, None)
        return np.zeros(0, np.int32) if kept is None else kept.slots

    def drop_slots(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and keeps its text. Returns the slots to release."""
        kept = self._kept.get(key)
        if kept is None:
            return np.zeros(0, np.int32)
        slots, kept.slots = kept.slots, np.full_like(kept.slots, PENDING)
        return slots

    def copy(self, source: int, target: int) -> None:
        """A fork can undo what its origin could."""
        for (owner, edit_id), kept in list(self._kept.items()):
            if owner == source:
                self.keep((target, edit_id), kept.ids, kept.slots, kept.used)
                self._kept[target, edit_id].contexts = kept.contexts

    def keys(self, owner: int) -> list[EditKey]:
        return [key for key in self._kept if key[0] == owner]

    def holding(self, owner: int) -> list[Slots]:
        return [kept.slots for key, kept in self._kept.items() if key[0] == owner]

    def oldest(self) -> int | None:
        """When the rows that `evict` would take were kept; None when no eviction frees a slot."""
        key = self._coldest()
        return None if key is None else self._kept[key].used

    def evict(self, wanted: int) -> Slots:
        """Takes the slots of the oldest edit, whatever `wanted`. Returns the slots to release."""
        key = self._coldest()
        assert key is not None, "evict without oldest"
        return self.drop_slots(key)

    def clear(self) -> list[Slots]:
        return [self.drop_slots(key) for key in list(self._kept)]

    def slots(self) -> list[Slots]:
        return [kept.slots for kept in self._kept.values()]

    def _coldest(self) -> EditKey | None:
        freeable = (key for key, kept in self._kept.items() if self._table.only_cached(kept.slots).any())
        return min(freeable, key=lambda key: self._kept[key].used, default=None)
