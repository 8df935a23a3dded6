"""The slot table: which rows of the pool are free, who holds the others, and what each was computed from.

Owns the free list, the reference counts and the per-slot facts that are written once. Torch-free, and it does
not know what a session is: holders come in two kinds, sessions and caches (rows kept for undo, the prefix
tree). Called by the engine's thread alone.

    free --allocate--> held by a session --release--> free
                          |    ^                       ^
                       retain  retain               release
                          v    |                       |
                       also held by a cache  -----> cached: evicted before anything is refused
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int32]
"""Slot numbers [n] int32."""

PENDING = -1
"""In a list of slots: the entry has no KV yet."""


class OutOfSlots(Exception):
    """`allocate` was asked for more slots than are free. Nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} slots wanted, {free} free")
        self.wanted, self.free = wanted, free


class Holder(IntEnum):
    SESSION = 0
    CACHE = 1


class SlotTable:
    """Books of `num_slots` slots. A slot's `written_at` and `context` are written at allocation and at the end
    of the step that fills it, and stay until it is free again."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.written_at = np.zeros(num_slots, np.int32)
        # The hash of the tokens up to and including this one that the row was computed from, when all of them
        # were exact; 0 when they were not. See edit/rows.py.
        self.context = np.zeros(num_slots, np.uint64)
        self._refs = np.zeros((2, num_slots), np.int32)
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack: the lowest slot on top
        self.num_free = num_slots

    @property
    def in_use(self) -> int:
        """Slots that at least one session holds."""
        return int(np.count_nonzero(self._refs[Holder.SESSION]))

    @property
    def cached(self) -> int:
        """Slots that caches alone hold."""
        return self.num_slots - self.num_free - self.in_use

    def allocate(self, positions: NDArray[np.int32]) -> Slots:
        """One fresh slot for each position, held by one session. Raises OutOfSlots."""
        count = len(positions)
        if count > self.num_free:
            raise OutOfSlots(count, self.num_free)
        self.num_free -= count
        slots = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._refs[Holder.SESSION, slots] = 1
        self.written_at[slots] = positions
        self.context[slots] = 0
        return slots

    def retain(self, slots: Slots, holder: Holder) -> None:
        """Adds one reference of `holder` to every slot of the list; PENDING is passed over."""
        held = slots[slots >= 0]
        assert np.all(self._refs[:, held].sum(0) > 0), "a free slot can't be retained"
        np.add.at(self._refs[holder], held, 1)

    def release(self, slots: Slots, holder: Holder) -> Slots:
        """Takes one reference of `holder` from every slot; returns those that became free."""
        held = slots[slots >= 0]
        np.subtract.at(self._refs[holder], held, 1)
        assert np.all(self._refs[holder, held] >= 0), "released more often than held"
        gone = np.unique(held[self._refs[:, held].sum(0) == 0])
        self.context[gone] = 0
        self._free[self.num_free : self.num_free + len(gone)] = gone[::-1]
        self.num_free += len(gone)
        return gone

    def only_cached(self, slots: Slots) -> NDArray[np.bool_]:
        """[n]: whether caches alone hold the slot. PENDING is not held."""
        return (slots >= 0) & (self._refs[Holder.SESSION, slots] == 0)

    def last_session(self, slots: Slots) -> int:
        """How many of the slots one session's `release` takes out of use. A list may hold a slot in two places."""
        held, counts = np.unique(slots[slots >= 0], return_counts=True)
        return int(np.count_nonzero(self._refs[Holder.SESSION, held] == counts))

    def check_integrity(self, sessions: list[Slots], caches: list[Slots]) -> None:
        """Asserts that the counts equal the holders given and that free and held slots are all there are."""
        for holder, lists in ((Holder.SESSION, sessions), (Holder.CACHE, caches)):
            expected = np.zeros(self.num_slots, np.int32)
            for slots in lists:
                np.add.at(expected, slots[slots >= 0], 1)
            wrong = np.flatnonzero(expected != self._refs[holder])
            assert not len(wrong), f"{holder.name} references of slots {wrong[:8]} differ from their holders"
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a slot is free twice"
        assert not self._refs[:, free].any(), "a free slot is held"
        held = np.count_nonzero(self._refs.sum(0))
        assert held + self.num_free == self.num_slots, "a slot is neither free nor held"
