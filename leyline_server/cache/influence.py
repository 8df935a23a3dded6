"""The rows that were computed from a span, wherever they are: found by their contexts.

Owns a set of contexts and the short form of it. Contexts are hashes of prefixes, so a run of rows that were computed
one after another from one text is found by its first: a text that has any of them has that one, at that position. It
does not know who holds rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.slots import Slots, SlotTable, indices
from leyline_server.edit.rows import Contexts, Ids, added_to_context

_BITS: Final = 22  # of a context that are looked up first: a table of 4 MB, that a cache holds
_SHIFT: Final = np.uint64(64 - _BITS)


class Influence:
    """Grows by `add_*`, then answers. Context 0 is of no text and never in it."""

    def __init__(self) -> None:
        self._at: list[NDArray[np.int32]] = []
        self._firsts: list[Contexts] = []
        self._all: list[Contexts] = []
        self._scattered = False
        self._sorted: Contexts | None = None
        self._seen: NDArray[np.bool_] | None = None

    def add_text(self, contexts: Contexts, start: int) -> None:
        """A text's contexts, from `start` on."""
        if start < len(contexts):
            self._at.append(np.array([start], np.int32))
            self._firsts.append(contexts[start : start + 1])
            self._all.append(contexts[start:])

    def add_rows(self, table: SlotTable, ids: Ids, slots: Slots) -> None:
        """The rows of entries in list order; PENDING is passed over."""
        held = slots >= 0
        ids, slots = ids[held], slots[held]
        index = indices(slots)
        at, contexts = table.written_at[index], table.context[index]
        exact = contexts != 0
        follows = np.zeros(len(slots), np.bool_)
        follows[1:] = contexts[1:] - contexts[:-1] == added_to_context(ids[1:], at[1:])
        follows[1:] &= (at[1:] == at[:-1] + 1) & exact[:-1]
        firsts = np.flatnonzero(exact & ~follows)
        self._at.append(at[firsts])
        self._firsts.append(contexts[firsts])
        self._all.append(contexts[exact])

    def add_scattered(self, contexts: Contexts) -> None:
        """Contexts of which nobody knows any more where they stood."""
        contexts = contexts[contexts != 0]
        self._scattered |= len(contexts) > 0
        self._all.append(contexts)
        self._sorted = None

    # ------------------------------------------------------------ questions

    def first_in_text(self, contexts: Contexts, start: int = 0) -> int | None:
        """The first index of a text's contexts that is one of these; `contexts` are those from position `start` on."""
        at, firsts = self._runs()
        inside = (at >= start) & (at < start + len(contexts))
        index = at[inside] - start
        found = index[contexts[index] == firsts[inside]]
        if self._scattered:
            found = np.concatenate([found, np.flatnonzero(self.among(contexts))[:1]])
        return int(found.min()) if len(found) else None

    def first_in_rows(self, table: SlotTable, slots: Slots, start: int) -> int | None:
        """The same of a text's rows, in order, the first of them standing at `start`."""
        at, firsts = self._runs()
        inside = (at >= start) & (at < start + len(slots))
        index = at[inside] - start
        found = index[table.context[slots[index]] == firsts[inside]]
        if self._scattered:
            found = np.concatenate([found, np.flatnonzero(self.among(table.context[indices(slots)]))[:1]])
        return int(found.min()) if len(found) else None

    def among(self, contexts: Contexts) -> NDArray[np.bool_]:
        """[n]: which of these contexts are in the set."""
        if not len(contexts):
            return np.zeros(0, np.bool_)
        if self._sorted is None or self._seen is None:
            self._sorted = np.sort(np.concatenate([np.zeros(0, np.uint64), *self._all]))
            self._seen = np.zeros(1 << _BITS, np.bool_)
            self._seen[self._sorted >> _SHIFT] = True
        maybe = self._seen[contexts >> _SHIFT]
        index = np.flatnonzero(maybe)
        if len(index):
            asked = contexts[index]
            place = np.minimum(np.searchsorted(self._sorted, asked), len(self._sorted) - 1)
            maybe[index] = self._sorted[place] == asked
        return maybe

    def _runs(self) -> tuple[NDArray[np.int32], Contexts]:
        if len(self._at) != 1:
            self._at = [np.concatenate([np.zeros(0, np.int32), *self._at])]
            self._firsts = [np.concatenate([np.zeros(0, np.uint64), *self._firsts])]
        return self._at[0], self._firsts[0]
