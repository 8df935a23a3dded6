"""The KV cache: slot table, pool, prefix tree, chunk registry and kept rows as one thing that can be asked for slots.

Owns the clock and the order of eviction: the least recently used of what caches alone hold goes first, whichever
cache holds it. It does not know sessions; the engine gives up idle ones when this is not enough. Called by the
engine's thread alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.chunks import ChunkRegistry
from leyline_server.cache.kept import KeptRows
from leyline_server.cache.pool import Pool
from leyline_server.cache.prefix_tree import PrefixTree
from leyline_server.cache.slots import Holder, Slots, SlotTable

_AT_ONCE: Final = 256  # a full pool gives up at least one slot in so many at once, and not a few in every step


class KVCache:
    """chunk_budget: rows that the chunk registry may hold."""

    def __init__(self, pool: Pool, chunk_budget: int) -> None:
        self.pool = pool
        self.table = SlotTable(pool.num_slots)
        self.tree = PrefixTree(self.table)
        self.chunks = ChunkRegistry(self.table, chunk_budget)
        self.kept = KeptRows(self.table)
        self._now = 0

    def tick(self) -> int:
        """A later time than any before."""
        self._now += 1
        return self._now

    def allocate(self, positions: NDArray[np.int32]) -> Slots:
        """Fresh slots for rows at these positions, evicting what only caches hold. Raises OutOfSlots."""
        short = len(positions) - self.table.num_free
        if short > 0:
            self._evict(max(short, self.table.num_slots // _AT_ONCE))
        return self.table.allocate(positions)

    def retain(self, slots: Slots) -> None:
        """One more session holds these slots."""
        self.table.retain(slots, Holder.SESSION)

    def release(self, slots: Slots) -> int:
        """One session fewer holds these slots. Returns the fall of slots in use."""
        before = self.table.in_use
        self._released(slots, Holder.SESSION)
        return before - self.table.in_use

    def release_cached(self, slots: Slots) -> None:
        """One cache fewer holds these slots."""
        self._released(slots, Holder.CACHE)

    def touch(self, slots: Slots) -> None:
        """These rows were found by their content. In the tree they are used too, so that a node is never older than a
        chunk of its rows: else it would be evicted and nothing be free."""
        now = self.tick()
        self.tree.touch(self.chunks.touch(slots, now), now)

    def clear_caches(self) -> None:
        """Drops the prefix tree, the chunk registry and all rows kept for undo."""
        self.release_cached(self.tree.clear())
        self.release_cached(self.chunks.clear())
        for slots in self.kept.clear():
            self.release_cached(slots)

    def check_integrity(self, sessions: list[Slots]) -> None:
        """Asserts invariants 1 and 2 of the design, given every session's list of slots."""
        self.table.check_integrity(sessions, [*self.tree.slots(), *self.chunks.slots(), *self.kept.slots()])
        self.tree.check_integrity()
        self.chunks.check_integrity()
        self.kept.check_integrity()
        for slots, used in self.chunks.ages():
            assert (self.tree.used(slots) >= used).all(), "the tree would give up rows, and nothing be free"

    def _evict(self, wanted: int) -> None:
        """Frees so many slots, or all that caches alone hold. The cache whose next victim is the least recently used
        gives way, again for each victim."""
        enough = self.table.num_free + wanted
        while self.table.num_free < enough:
            # Of equal age content gives way before a prefix: it is worth less.
            every = (self.chunks, self.tree, self.kept)
            caches = [(used, cache) for cache in every if (used := cache.oldest()) is not None]
            if not caches:
                return
            _, cache = min(caches, key=lambda pair: pair[0])
            self.release_cached(cache.evict(enough - self.table.num_free))

    def _released(self, slots: Slots, holder: Holder) -> None:
        # Zeroed whenever they are free: nothing that a FORGET, an eviction or a closed session let go stays in memory.
        if len(slots):
            self.pool.zero(self.table.release(slots, holder))
            self.chunks.let_go(slots)
            self.release_cached(self.chunks.shrunk())
