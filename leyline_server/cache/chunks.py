"""The chunk registry: exact rows of texts, found again by content at any position.

Owns one reference (kind CACHE) on each slot it names. A chunk is a stretch of a text's rows, some 128 to 255 of them,
or what a FORGET left of them; what it is found by are the fingerprints of its text, and a hit is what agrees with it id
by id, to the left and to the right of a fingerprint and on into the chunks beside it. So a hit has no grain, and a hash
that collides finds nothing. Namespaces never answer each other. It does not know sessions; that only exact rows enter
is the engine's care.

The pool asks it for rows that nobody else holds; beyond its own budget it lets the least recently used
chunks go that no session holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from leyline_server.cache.chunk import Chunk, Namespace
from leyline_server.cache.fingerprint_index import FingerprintIndex
from leyline_server.cache.fingerprints import GRAM, SHORTEST, fingerprints
from leyline_server.cache.influence import Influence
from leyline_server.cache.order import EvictionOrder
from leyline_server.cache.slots import Holder, Slots, SlotTable, common, distinct, indices, runs
from leyline_server.edit.rows import Ids

_NONE: Final = np.zeros(0, np.int32)
_CHUNK: Final = 128
SINK: Final = 32
"""Rows of the first positions are like no others, whatever stands there (Xiao et al., arXiv 2309.17453): they are
neither registered nor replaced by a hit."""


class Hit(NamedTuple):
    """Entries [start, start + len(slots)) of a list are those whose rows are in `slots`."""

    start: int
    slots: Slots


class ChunkRegistry:
    """All namespaces' chunks, of `budget` rows together. `now` is the clock of the cache: a larger value is later."""

    def __init__(self, table: SlotTable, budget: int) -> None:
        self.budget = budget
        self.num_rows = 0
        self._table = table
        self._chunks: dict[int, Chunk] = {}
        self._next_number = 0
        self._index = FingerprintIndex()
        self._chunk_of = np.full(table.num_slots, -1, np.int32)  # the number of the chunk that names a slot
        self._place = np.zeros(table.num_slots, np.int32)  # and where in it
        self._freeing = EvictionOrder(self._chunks, self._frees)
        self._idle = EvictionOrder(self._chunks, self._is_idle)

    # ------------------------------------------------------------ finding

    def match(self, namespace: Namespace, ids: Ids) -> list[Hit]:
        """Disjoint stretches of `ids` that are here, ascending; each is SHORTEST entries or more, or the end of so many
        that are here together. The caller retains what it takes, and looks only where a hit may stand."""
        known = self._index.of(namespace)
        if not known:
            return []
        hits: list[Hit] = []
        upto = 0
        starts, hashes = fingerprints(ids)
        for at, fingerprint in zip(starts.tolist(), hashes.tolist(), strict=True):
            if fingerprint not in known or at + GRAM <= upto:
                continue
            # What ends the hit before this one may begin this one too: it counts towards its length.
            least = max(0, upto - SHORTEST)
            agreeing = [self._agreeing(ids, at, slot, least) for slot in known[fingerprint]]
            start, slots = max(agreeing, key=lambda one: len(one[1]))
            end = start + len(slots)
            if len(slots) >= SHORTEST and end > upto:
                hits.append(Hit(max(start, upto), slots[max(start, upto) - start :]))
                upto = end
        return hits

    def touch(self, slots: Slots, now: int) -> Slots:
        """These rows were used. Returns all those of their chunks."""
        touched = [self._chunks[number] for number in distinct(self._chunk_of[indices(slots)])]
        for chunk in touched:
            chunk.used = now
        return np.concatenate([_NONE, *(chunk.slots for chunk in touched)])

    def _agreeing(self, ids: Ids, at: int, slot: int, least: int) -> tuple[int, Slots]:
        """The stretch around ids[at] that is equal to the one around the row in `slot`, from `least` on: where it
        begins, and its slots."""
        chunk, place = self._chunks[self._chunk_of[slot]], int(self._place[slot])
        end, right = at, list[Slots]()
        here, offset = chunk, place
        while True:
            same = common(here.ids[offset:], ids[end:])
            right.append(here.slots[offset : offset + same])
            end += same
            after = here.after(int(ids[end])) if offset + same == len(here.ids) and end < len(ids) else None
            if after is None:
                break
            here, offset = after, 0
        start, left = at, list[Slots]()
        here, offset = chunk, place
        while True:
            same = common(here.ids[:offset][::-1], ids[least:start][::-1])
            left.append(here.slots[offset - same : offset])
            start -= same
            if same < offset or here.before is None or start == least:
                break
            here = here.before
            offset = len(here.ids)
        return start, np.concatenate(left[::-1] + right)

    # ------------------------------------------------------------ registering

    def register(self, namespace: Namespace, ids: Ids, slots: Slots, examined: int, now: int) -> tuple[int, Slots]:
        """Registers the rows of a text from its beginning on, all of it exact, that are not here yet.

        ids, slots [n]: all have KV. examined: entries below it were looked at by an earlier call. Returns up to where
        they are now, and the slots of chunks that gave way, whose references the caller now holds and must release.
        """
        fresh = np.zeros(len(ids), np.bool_)
        begin = max(SINK, examined)
        fresh[begin:] = self._chunk_of[indices(slots[begin:])] < 0
        if not fresh.any() or not self.budget:
            return len(ids), _NONE
        before = self.num_rows
        examined = len(ids)
        for start, end in runs(fresh):
            if end - start >= SHORTEST:
                self._add(namespace, ids, slots, start, end, now)
            elif end == len(ids):
                examined = start  # once it is longer it is looked at again
        if self.num_rows == before:
            return examined, _NONE
        first = max(SINK, int(fresh.argmax()) - SHORTEST)  # a run that is chosen may begin in front of what is new
        starts, hashes = fingerprints(ids[first:])
        for slot, fingerprint in zip(slots[first + starts].tolist(), hashes.tolist(), strict=True):
            number = int(self._chunk_of[slot])
            if number >= 0 and self._index.add(namespace, fingerprint, slot):
                self._chunks[number].fingerprints.append((fingerprint, slot))
        return examined, self.shrunk()

    def _add(self, namespace: Namespace, ids: Ids, slots: Slots, start: int, end: int, now: int) -> None:
        count = max(1, (end - start) // _CHUNK)
        bounds = np.linspace(start, end, count + 1).astype(int).tolist()
        parent, behind = self._last(slots[:start])
        gap = [self._table.context[indices(slots[behind:start])]]
        for low, high in pairwise(bounds):
            chunk = Chunk(self._next_number, namespace, low, ids[low:high].copy(), slots[low:high].copy(), now)
            self._next_number += 1
            self._chunks[chunk.number] = chunk
            self._idle.add(chunk)
            self._chunk_of[chunk.slots] = chunk.number
            self._place[chunk.slots] = np.arange(len(chunk.slots))
            chunk.hang(parent, gap)
            parent, gap = chunk, []
        follower, _ = self._last(slots[end : end + 1])
        if follower is not None and follower.start == end:  # what is new fills the gap in front of it
            follower.hang(parent, [])
        self._table.retain(slots[start:end], Holder.CACHE)
        self.num_rows += end - start

    def _last(self, slots: Slots) -> tuple[Chunk | None, int]:
        """The chunk of the last of these slots that is in any, and the index behind it."""
        numbers = self._chunk_of[indices(slots)]
        named = np.flatnonzero(numbers >= 0)
        return (self._chunks[int(numbers[named[-1]])], int(named[-1]) + 1) if len(named) else (None, 0)

    # ------------------------------------------------------------ letting go

    def cut(self, namespace: Namespace, influence: Influence) -> Slots:
        """Drops every row of this influence, and all that was computed from it; what a chunk has in front of them stays
        where it can be found. Returns the slots to release."""
        reached = self._reached(namespace, influence)
        cut = [self._shorten(chunk, first) for chunk, first in reached if first]
        return np.concatenate([self._drop([chunk for chunk, first in reached if not first]), *cut])

    def reached(self, namespace: Namespace, influence: Influence) -> Slots:
        """The slots of all rows here that were computed from rows of this influence, or are among them."""
        return np.concatenate([_NONE, *(chunk.slots[first:] for chunk, first in self._reached(namespace, influence))])

    def _reached(self, namespace: Namespace, influence: Influence) -> list[tuple[Chunk, int]]:
        """Chunks with a row of this influence, or one in the gap in front of them, and all below these; each with the
        place of its first row that is one of it or was computed from one."""
        if not self._chunks:
            return []
        slots, behind_gaps = np.flatnonzero(self._chunk_of >= 0), self._behind_gaps(influence)
        found = distinct(self._chunk_of[slots[influence.among(self._table.context[slots])]])
        own = [self._chunks[n] for n in found | behind_gaps if self._chunks[n].namespace == namespace]
        below = {one.number: one for chunk in own for one in chunk.below() if one is not chunk}
        out = [(one, 0) for one in below.values()]
        for chunk in own:
            if chunk.number not in below:
                among = influence.among(self._table.context[indices(chunk.slots)])
                out.append((chunk, 0 if chunk.number in behind_gaps else int(among.argmax())))
        return out

    def _behind_gaps(self, influence: Influence) -> set[int]:
        """The numbers of chunks with a row of this influence in the gap in front of them."""
        gaps = [(chunk.number, part) for chunk in self._chunks.values() for part in chunk.gap if len(part)]
        if not gaps:
            return set()
        numbers = np.repeat([number for number, _ in gaps], [len(part) for _, part in gaps])
        return distinct(numbers[influence.among(np.concatenate([part for _, part in gaps]))])

    def oldest(self) -> int | None:
        """When the chunk that `evict` would take was last used; None when no eviction frees a slot."""
        chunk = self._freeing.first()
        return None if chunk is None else chunk.used

    def evict(self, wanted: int) -> Slots:
        """Takes the least recently used chunk of those that have a row which nobody else holds, whatever `wanted`.
        Returns the slots to release."""
        chunk = self._freeing.first()
        assert chunk is not None, "evict without oldest"
        return self._drop([chunk])

    def let_go(self, slots: Slots) -> None:
        """Somebody holds these slots no more: their chunks may have something to free now."""
        if self._chunks:
            for number in distinct(self._chunk_of[indices(slots)]) - {-1}:
                self._freeing.add(self._chunks[number])
                self._idle.add(self._chunks[number])

    def clear(self) -> Slots:
        """Drops everything. Returns the slots to release."""
        return self._drop(list(self._chunks.values())[::-1])  # ends first: nothing is left to hang elsewhere

    def slots(self) -> list[Slots]:
        return [chunk.slots for chunk in self._chunks.values()]

    def ages(self) -> list[tuple[Slots, int]]:
        """Each chunk's slots, and when it was last used."""
        return [(chunk.slots, chunk.used) for chunk in self._chunks.values()]

    def check_integrity(self) -> None:
        """Asserts that slots and fingerprints name the chunks that are here, and no other."""
        assert self.num_rows == sum(len(chunk.ids) for chunk in self._chunks.values())
        assert self.num_rows <= self.budget or self._idle.first() is None
        for chunk in self._chunks.values():
            assert (self._chunk_of[chunk.slots] == chunk.number).all()
            assert (self._place[chunk.slots] == np.arange(len(chunk.ids))).all()
            assert chunk in self._idle or not self._is_idle(chunk), "the budget would pass over a chunk"
            assert chunk in self._freeing or not self._frees(chunk), "eviction would pass over a chunk"
            assert chunk.parent is None or self._chunks[chunk.parent.number].children.count(chunk) == 1
            assert all(child.parent is chunk and child.start > chunk.start for child in chunk.children)
        assert np.count_nonzero(self._chunk_of >= 0) == self.num_rows
        led = sorted((chunk.namespace, *one) for chunk in self._chunks.values() for one in chunk.fingerprints)
        assert led == sorted(self._index)

    def shrunk(self) -> Slots:
        """Drops the least recently used of the chunks that no session holds until the rest keeps to the budget. Returns
        the slots to release."""
        gone = [_NONE]
        while self.num_rows > self.budget and (chunk := self._idle.first()) is not None:
            gone.append(self._drop([chunk]))
        return np.concatenate(gone)

    def _is_idle(self, chunk: Chunk) -> bool:
        return not self._table.held_by_session(chunk.slots).any()

    def _frees(self, chunk: Chunk) -> bool:
        return bool(self._table.held_by_one_cache(chunk.slots).any())

    def _shorten(self, chunk: Chunk, length: int) -> Slots:
        """Drops the rows of a chunk from this one on. Returns the slots to release."""
        gone = chunk.slots[length:]
        chunk.ids, chunk.slots = chunk.ids[:length], chunk.slots[:length]
        self._chunk_of[gone] = -1
        self.num_rows -= len(gone)
        self._idle.add(chunk)  # what held it may have held these
        dropped = set(gone.tolist())
        self._index.remove(chunk.namespace, [one for one in chunk.fingerprints if one[1] in dropped])
        chunk.fingerprints = [one for one in chunk.fingerprints if one[1] not in dropped]
        return gone

    def _drop(self, chunks: Iterable[Chunk]) -> Slots:
        gone = [_NONE]
        for chunk in chunks:
            gone.append(chunk.slots)
            del self._chunks[chunk.number]
            self._chunk_of[chunk.slots] = -1
            self.num_rows -= len(chunk.ids)
            self._index.remove(chunk.namespace, chunk.fingerprints)
            chunk.leave(self._table.context[indices(chunk.slots)])
        return np.concatenate(gone)
