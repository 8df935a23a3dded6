"""Rows kept for undo: what an AMORTIZE cut out, until it is undone, forgotten, or evicted.

Owns one reference (kind CACHE) on each kept slot. Evicting takes the slots and leaves the ids: an undo then brings
the text back as pending entries. It does not know where the rows stood; the edit log does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leyline_server.cache.influence import Influence
from leyline_server.cache.slots import PENDING, Holder, Slots, SlotTable
from leyline_server.edit.rows import Contexts, Ids

EditKey = tuple[int, str]
"""(sequence, edit id)."""


@dataclass(slots=True)
class _Kept:
    ids: Ids
    slots: Slots
    used: int
    lost: Contexts  # of slots that were taken: finds their text in the tree


class KeptRows:
    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._kept: dict[int, dict[str, _Kept]] = {}

    def keep(self, key: EditKey, ids: Ids, slots: Slots, now: int) -> None:
        """Retains the slots under this edit. The caller still releases its own references."""
        self._table.retain(slots, Holder.CACHE)
        self._kept.setdefault(key[0], {})[key[1]] = _Kept(ids, slots, now, np.zeros(0, np.uint64))

    def get(self, key: EditKey) -> tuple[Ids, Slots]:
        kept = self._kept[key[0]][key[1]]
        return kept.ids, kept.slots

    def has(self, key: EditKey) -> bool:
        return key[1] in self._kept.get(key[0], {})

    def add_to(self, influence: Influence, key: EditKey) -> None:
        """Adds what the edit's rows were computed from, also of rows that were taken since."""
        if self.has(key):
            kept = self._kept[key[0]][key[1]]
            influence.add_rows(self._table, kept.ids, kept.slots)
            influence.add_scattered(kept.lost)

    def drop(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and text. Returns the slots to release."""
        owned = self._kept.get(key[0], {})
        kept = owned.pop(key[1], None)
        if not owned:
            self._kept.pop(key[0], None)
        return np.zeros(0, np.int32) if kept is None else kept.slots

    def drop_slots(self, key: EditKey) -> Slots:
        """Forgets an edit's rows and keeps its text. Returns the slots to release."""
        if not self.has(key):
            return np.zeros(0, np.int32)
        kept = self._kept[key[0]][key[1]]
        slots, kept.slots = kept.slots, np.full_like(kept.slots, PENDING)
        kept.lost = np.concatenate([kept.lost, self._table.context[slots[slots >= 0]]])
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
        key = self._coldest()
        return None if key is None else self._kept[key[0]][key[1]].used

    def evict(self, wanted: int) -> Slots:
        """Takes the slots of the oldest edit, whatever `wanted`. Returns the slots to release."""
        key = self._coldest()
        assert key is not None, "evict without oldest"
        return self.drop_slots(key)

    def clear(self) -> list[Slots]:
        return [self.drop_slots((owner, edit_id)) for owner in list(self._kept) for edit_id in list(self._kept[owner])]

    def slots(self) -> list[Slots]:
        return [slots for owner in self._kept for slots in self.holding(owner)]

    def _coldest(self) -> EditKey | None:
        by_age = sorted(
            (kept.used, owner, edit_id) for owner, owned in self._kept.items() for edit_id, kept in owned.items()
        )
        for _, owner, edit_id in by_age:
            if self._table.only_cached(self._kept[owner][edit_id].slots).any():
                return owner, edit_id
        return None
