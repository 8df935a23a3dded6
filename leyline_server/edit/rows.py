"""A session's list of rows: token ids and the slots of their KV. An immutable value; an edit makes another.

Owns every list operation (list in, list out) and the derivation of exactness. Pure integers: no tensors, no
reference counts. DESIGN: "a session is a list of slots, an edit is an edit of that list".

Exactness is derived, not tracked. `context[i]` is a hash of the ids [0, i] *and their positions*; a slot keeps
the context that it was computed from, or 0 when an earlier entry was not exact at that time. So entry i is exact
if and only if its slot's context equals the list's: whatever edits, undos and forks lie between, no bit has to be
cleared or restored, and the position needs no check of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.slots import PENDING, Slots, SlotTable

Ids = NDArray[np.int32]
Contexts = NDArray[np.uint64]
_KEY = np.frombuffer(os.urandom(8), np.uint64)[0]  # a constant of the process: texts can't be made to collide


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """ids [n] int32, slots [n] int32 (PENDING without KV), contexts [n] uint64. Nobody writes into these arrays."""

    ids: Ids
    slots: Slots
    contexts: Contexts

    @staticmethod
    def empty() -> Rows:
        return Rows(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def pending(self) -> NDArray[np.int64]:
        """The indices without KV, ascending."""
        return np.flatnonzero(self.slots == PENDING)

    @property
    def num_pending(self) -> int:
        return int(np.count_nonzero(self.slots == PENDING))

    def appended(self, ids: Sequence[int] | Ids) -> Rows:
        fresh = np.asarray(ids, np.int32)
        last = self.contexts[-1] if len(self) else np.uint64(0)
        return Rows(
            np.concatenate([self.ids, fresh]),
            np.concatenate([self.slots, np.full(len(fresh), PENDING, np.int32)]),
            np.concatenate([self.contexts, _contexts(fresh, len(self), last)]),
        )

    def truncated(self, length: int) -> Rows:
        return Rows(self.ids[:length], self.slots[:length], self.contexts[:length])

    def spliced(self, start: int, end: int, ids: Ids, slots: Slots) -> Rows:
        """[start, end) gives way to these entries; what follows keeps its slots and moves."""
        new_ids = np.concatenate([self.ids[:start], ids, self.ids[end:]])
        last = self.contexts[start - 1] if start else np.uint64(0)
        return Rows(
            new_ids,
            np.concatenate([self.slots[:start], slots, self.slots[end:]]),
            np.concatenate([self.contexts[:start], _contexts(new_ids[start:], start, last)]),
        )

    def pending_from(self, start: int) -> Rows:
        """Every entry from `start` on becomes pending."""
        return self.filled(np.arange(start, len(self)), PENDING)

    def filled(self, index: NDArray[np.int64], slots: Slots | int) -> Rows:
        """The entries at `index` get these slots."""
        new = self.slots.copy()
        new[index] = slots
        return Rows(self.ids, new, self.contexts)

    # ------------------------------------------------------------ what the slots say

    def exact_upto(self, table: SlotTable) -> int:
        """The first index that is pending or not exact; below it the KV equals an honest prefill's."""
        exact = (self.slots >= 0) & (table.context[self.slots] == self.contexts)
        return len(self) if exact.all() else int(np.argmin(exact))

    def turned(self, table: SlotTable) -> NDArray[np.bool_]:
        """[n]: whether the entry stands elsewhere than where its row was written."""
        index = np.arange(len(self), dtype=np.int32)
        return (self.slots >= 0) & (table.written_at[self.slots] != index)

    def delta(self, table: SlotTable) -> NDArray[np.int32]:
        """[n]: by how much each entry's key is to be turned; 0 where it is pending."""
        index = np.arange(len(self), dtype=np.int32)
        return np.where(self.slots >= 0, index - table.written_at[self.slots], 0).astype(np.int32)

    def note_contexts(self, table: SlotTable, index: NDArray[np.int64]) -> None:
        """Writes the contexts of freshly computed entries: those up to the first inexact entry are exact."""
        table.context[self.slots[index]] = self.contexts[index]
        upto = self.exact_upto(table)
        table.context[self.slots[index[index >= upto]]] = 0


def _contexts(ids: Ids, position: int, before: np.uint64) -> Contexts:
    """The contexts of `ids` standing at `position`, after a prefix whose context is `before`.

    A running sum of one well-mixed 64-bit number for each (position, id), keyed per process: it doubles as a hash
    of the prefix and takes a handful of vector operations. The mixer is splitmix64 (Steele, Lea, Flood, OOPSLA
    2014, section 4).
    """
    with np.errstate(over="ignore"):
        x = ids.astype(np.uint64) | (np.arange(position, position + len(ids), dtype=np.uint64) << np.uint64(32))
        x = (x ^ _KEY) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return before + np.cumsum(x, dtype=np.uint64)
