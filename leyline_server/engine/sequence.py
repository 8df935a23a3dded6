"""A sequence: the engine's list of rows under an id, and what it remembers of it.

Owns the list while tokens are generated: they go to a tail, and become part of the immutable `rows` when somebody
looks. So a decode step costs the same at any length. Engine's thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from leyline_proto.reuse import Reuse
from leyline_server.cache.chunks import SINK
from leyline_server.cache.slots import PENDING, SlotTable
from leyline_server.edit.rows import Contexts, Rows
from leyline_server.engine.engine import Namespace, SequenceId

if TYPE_CHECKING:
    from leyline_server.engine.requests import LocalRequest


class SequenceState:
    """`rows` is replaced, never modified. `used` is the cache's clock."""

    def __init__(
        self, id: SequenceId, namespace: Namespace, reuse: Reuse, rows: Rows, used: int, table: SlotTable
    ) -> None:
        self.id, self.namespace, self.reuse, self.used = id, namespace, reuse, used
        self.request: LocalRequest | None = None
        self.evicted = False  # idle rows were given up since the last computation
        self.edited = False  # edited since the last computation
        self.cold = True  # nothing was ever computed
        # Contexts of the rows of content hits, now in the list or once: of other texts, so none of this one's rows.
        self.borrowed: Contexts = np.zeros(0, np.uint64)
        # Below it no content is reused: a FORGET promises that what stood there is computed again.
        self.takes_content_from = SINK
        # Contexts of the rows that were evicted: a FORGET still finds their text in the prefix tree.
        self.lost: Contexts = np.zeros(0, np.uint64)
        self._rows, self._table = rows, table
        self._tokens: list[int] = []  # appended since
        self._slots: list[int] = []  # of the first pending entries since

    def __len__(self) -> int:
        return len(self._rows) + len(self._tokens)

    @property
    def rows(self) -> Rows:
        if self._tokens or self._slots:
            self._fold()
        return self._rows

    @rows.setter
    def rows(self, rows: Rows) -> None:
        self._tokens, self._slots = [], []
        self._rows = rows

    def grew(self, at: int, by: int) -> None:
        """An edit at this entry made the list so much longer: what stands behind a FORGET moves with it."""
        if self.takes_content_from > SINK and at < self.takes_content_from:
            self.takes_content_from += max(0, by)

    def appended(self, token: int) -> None:
        """A token was generated; its entry is pending."""
        self._tokens.append(token)

    def computed(self, slot: int) -> None:
        """The entry generated last was computed into this slot."""
        self._slots.append(slot)

    def _fold(self) -> None:
        before = self._rows
        rows = before.appended(self._tokens)
        if self._slots:
            # While tokens are generated only the last entry is pending, so those computed follow each other.
            first = len(before) - int(before.slots[-1] == PENDING)
            index = np.arange(first, first + len(self._slots))
            rows = rows.filled(index, np.asarray(self._slots, np.int32))
            rows.note_contexts(self._table, index)
        self.rows = rows
