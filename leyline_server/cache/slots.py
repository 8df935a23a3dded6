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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

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
    of the step that fills it, and stay until it is free again.

    watch_cached: each is called with the slots that caches alone hold from now on, after their last session let go.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.written_at = np.zeros(num_slots, np.int32)
        # The hash of the tokens up to and including this one that the row was computed from, when all of them
        # were exact; 0 when they were not. See edit/rows.py.
        self.context = np.zeros(num_slots, np.uint64)
        self._refs = np.zeros((2, num_slots), np.int32)  # by holder
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack: the lowest slot on top
        self._marks = np.zeros(num_slots, np.bool_)  # all false between calls
        self.num_free = num_slots
        self.in_use = 0  # slots that at least one session holds
        self.watch_cached: list[Callable[[Slots], None]] = []

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
        self.in_use += count
        slots = self._free[self.num_free : self.num_free + count][::-1].copy()
        self._refs[Holder.SESSION][slots] = 1
        self.written_at[slots] = positions
        self.context[slots] = 0
        return slots

    def retain(self, slots: Slots, holder: Holder) -> None:
        """Adds one reference of `holder` to every slot of the list; PENDING is passed over."""
        held, counts = counted(slots)
        own, other = self._refs[holder], self._refs[1 - holder]
        before = own[held]
        fresh = held[before == 0]
        assert np.all(other[fresh] > 0), "a free slot can't be retained"
        own[held] = before + counts
        if holder is Holder.SESSION:
            self.in_use += len(fresh)

    def release(self, slots: Slots, holder: Holder) -> Slots:
        """Takes one reference of `holder` from every slot; returns those that became free, ascending."""
        held, counts = counted(slots)
        own, other = self._refs[holder], self._refs[1 - holder]
        after = own[held] - counts
        assert np.all(after >= 0), "released more often than held"
        own[held] = after
        left = held[after == 0]
        elsewhere = other[left] > 0
        gone = left[~elsewhere]
        self.context[gone] = 0
        freed = gone.astype(np.int32)
        self._free[self.num_free : self.num_free + len(gone)] = freed[::-1]
        self.num_free += len(gone)
        if holder is Holder.SESSION:
            self.in_use -= len(left)
            if len(gone) < len(left):
                now_cached = left[elsewhere].astype(np.int32)
                for told in self.watch_cached:
                    told(now_cached)
        return freed

    def only_cached(self, slots: Slots) -> NDArray[np.bool_]:
        """[n]: whether caches alone hold the slot. PENDING is not held."""
        return (slots >= 0) & (self._refs[Holder.SESSION][indices(slots)] == 0)

    def held_by_session(self, slots: Slots) -> NDArray[np.bool_]:
        """[n]: whether a session holds the slot."""
        return self._refs[Holder.SESSION][indices(slots)] > 0

    def held_by_one_cache(self, slots: Slots) -> NDArray[np.bool_]:
        """[n]: whether one cache alone holds the slot, and nobody else: it is free once that one lets go."""
        index = indices(slots)
        return (self._refs[Holder.SESSION][index] == 0) & (self._refs[Holder.CACHE][index] == 1)

    def last_session(self, slots: Slots) -> int:
        """How many of the slots one session's `release` takes out of use. A list may hold a slot in two places."""
        held, counts = counted(slots)
        return int(np.count_nonzero(self._refs[Holder.SESSION][held] == counts))

    def falls(self, parts: Sequence[Slots]) -> list[int]:
        """The fall of slots in use when one session releases these lists one after another: of each."""
        if len(parts) > 1 and not isinstance(counted(np.concatenate(parts))[1], int):
            upto = [self.last_session(np.concatenate(parts[: index + 1])) for index in range(len(parts))]
            return [fall - before for fall, before in zip(upto, [0, *upto], strict=False)]
        return [self.last_session(part) for part in parts]

    def most_sessions(self, slots: Slots) -> int:
        """The largest number of references that sessions hold on one of the slots."""
        return int(self._refs[Holder.SESSION][indices(_held(slots))].max(initial=0))

    @contextmanager
    def marking(self, slots: Slots) -> Iterator[Callable[[Slots], bool]]:
        """Inside the block: whether a list holds one of these slots."""
        marked = indices(_held(slots))
        self._marks[marked] = True
        try:
            yield lambda others: bool(self._marks[indices(_held(others))].any())
        finally:
            self._marks[marked] = False

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
        by_sessions, by_caches = self._refs
        assert not by_sessions[free].any(), "a free slot is held"
        assert not by_caches[free].any(), "a free slot is held"
        held = np.count_nonzero(by_sessions + by_caches)
        assert held + self.num_free == self.num_slots, "a slot is neither free nor held"
        assert self.in_use == np.count_nonzero(by_sessions), "the count of slots in use is wrong"


def indices(slots: Slots) -> NDArray[np.intp]:
    """The same numbers in the type that numpy indexes with: it is several times slower with any other."""
    return slots.astype(np.intp)


def distinct(numbers: NDArray[np.integer[Any]]) -> set[int]:
    """The numbers, each once. Neighbours are mostly equal: a row of the same becomes one before a set is made."""
    firsts = np.concatenate([numbers[:1], numbers[1:][numbers[1:] != numbers[:-1]]])
    return set(firsts.tolist())


def ascending(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The numbers, each once and ascending. np.unique and its kind, which hash first, take ten times as long."""
    numbers = np.sort(numbers)
    first = np.ones(len(numbers), np.bool_)
    first[1:] = numbers[1:] != numbers[:-1]
    return numbers[first]


def runs(chosen: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of true, ascending."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def common(here: NDArray[np.int32], there: NDArray[np.int32]) -> int:
    """How many numbers they have in common from the first on."""
    length = min(len(here), len(there))
    differs = here[:length] != there[:length]
    return int(differs.argmax()) if differs.any() else length


def _held(slots: Slots) -> Slots:
    """The list without PENDING."""
    return slots if not len(slots) or slots.min() >= 0 else slots[slots >= 0]


def counted(slots: Slots) -> tuple[NDArray[np.intp], NDArray[np.int32] | int]:
    """The slots of a list, each once and ascending, and how often each is in it: nearly always once.

    np.unique takes 10 ms for 32k numbers, this 0.1.
    """
    held = _held(slots)
    if not (held[1:] > held[:-1]).all():
        held = np.sort(held)
        if (held[1:] == held[:-1]).any():
            once, counts = np.unique(held, return_counts=True)
            return indices(once), counts.astype(np.int32)
    return indices(held), 1
