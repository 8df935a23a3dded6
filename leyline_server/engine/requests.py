"""Requests of the local engine: one compute or generate on one sequence, from the queue to its end.

Owns a request's progress and what it may still need. It does not compute anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from leyline_server.cache.slots import Slots
from leyline_server.edit.rows import Contexts, Rows
from leyline_server.engine.engine import GenerateParams, Listener, Namespace, SequenceId
from leyline_server.sampling import Sampler


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence's rows and what the engine remembers of it. `rows` is replaced, never modified."""

    id: SequenceId
    namespace: Namespace
    rows: Rows
    used: int
    request: LocalRequest | None = None
    evicted: bool = False  # idle rows were given up since the last computation
    edited: bool = False  # edited since the last computation
    cold: bool = True  # nothing was ever computed
    # Contexts of the rows that were evicted: a FORGET still finds their text in the prefix tree.
    lost: Contexts = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass(slots=True, eq=False)
class LocalRequest:
    """`params` is None for a compute. `old_last` holds the slot of the last entry while it is computed anew."""

    sequence: SequenceState
    listener: Listener
    params: GenerateParams | None = None
    sampler: Sampler | None = None
    admitted: bool = False
    cancelled: bool = False
    generated: int = 0
    old_last: Slots = field(default_factory=lambda: np.zeros(0, np.int32))

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def still_needs(self) -> int:
        """Slots that it may still allocate: for what is pending, and for the tokens it may yet generate but the last,
        which stays pending."""
        rows = self.sequence.rows
        if self.params is None:
            return rows.num_pending
        fresh = 1 if not self.admitted and len(rows) and rows.slots[-1] >= 0 else 0
        return rows.num_pending + fresh + self.params.max_tokens - 1 - self.generated

    @property
    def decoding(self) -> bool:
        """Whether only its last entry is pending, after the first token."""
        return self.generated > 0
