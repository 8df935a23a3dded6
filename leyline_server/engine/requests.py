"""Requests of the local engine: one compute or generate on one sequence, from the queue to its end.

Owns a request's progress. It knows beforehand which entries it computes next (all that were pending, then one for each
token but the last), so a step can be launched before the one in front of it has been read. It computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.slots import Slots
from leyline_server.engine.engine import GenerateParams, Listener
from leyline_server.engine.sequence import SequenceState
from leyline_server.sampling import Sampler


@dataclass(slots=True, eq=False)
class Share:
    """One request's part of a step: its entries at `index` [n] are computed into `slots`."""

    request: LocalRequest
    index: NDArray[np.int64]
    slots: Slots
    samples: int | None  # which of the request's tokens this samples
    dropped: bool = False  # its request ended, and the slots went, while the step ran


@dataclass(slots=True, eq=False)
class LocalRequest:
    """`params` is None for a compute. `old_last` holds the slot of the last entry while it is computed anew."""

    sequence: SequenceState
    listener: Listener
    params: GenerateParams | None = None
    sampler: Sampler | None = None
    cancelled: bool = False
    old_last: Slots = field(default_factory=lambda: np.zeros(0, np.int32))
    # Since it was admitted:
    row: int | None = None  # of the request table
    held: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))  # slots of its list then, each once
    reserved: int = 0  # slots it was promised beyond those
    length: int = 0  # entries of its list then
    pending: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # indices, ascending
    turned: bool = False  # whether any row stands elsewhere than where it was written
    launched: int = 0  # entries, of `pending` first
    generated: int = 0  # tokens told
    shares: list[Share] = field(default_factory=list)  # launched and not committed

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def admitted(self) -> bool:
        return self.row is not None

    @property
    def needs(self) -> int:
        """Slots for what is pending, and for the tokens it may generate but the last, which stays pending. Not asked
        once it was launched."""
        rows = self.sequence.rows
        if self.params is None:
            return rows.num_pending
        fresh = 1 if len(rows) and rows.slots[-1] >= 0 else 0
        return rows.num_pending + fresh + self.params.max_tokens - 1

    @property
    def to_prefill(self) -> int:
        """Entries not yet launched that were pending at the start."""
        return max(0, len(self.pending) - self.launched)

    @property
    def decodes(self) -> bool:
        """Whether its next entry is that of the token sampled last."""
        return self.params is not None and 0 <= self.launched - len(self.pending) < self.params.max_tokens - 1

    def next(self, count: int) -> tuple[NDArray[np.int64], int | None]:
        """The indices of its next `count` entries, and which token the last of them samples."""
        beyond = self.launched + count - len(self.pending)
        samples = beyond if self.params is not None and beyond >= 0 else None
        if self.launched < len(self.pending):
            assert beyond <= 0, "entries of the prompt and of tokens are not computed together"
            return self.pending[self.launched : self.launched + count], samples
        first = self.length + self.launched - len(self.pending)
        return np.arange(first, first + count), samples

    def forced(self, token: int) -> int | None:
        """The id that the token of this number must be."""
        force_ids = self.params.force_ids if self.params else ()
        return force_ids[token] if token < len(force_ids) else None
