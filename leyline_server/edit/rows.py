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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from leyline_proto.repair import num_of_share
from leyline_server.cache.slots import PENDING, Slots, SlotTable, indices

Ids = NDArray[np.int32]
Contexts = NDArray[np.uint64]
Doubt = NDArray[np.int32]
Span = tuple[int, int, Ids, Slots]
"""[start, end) of a list, and the entries that take its place."""
_KEY = int.from_bytes(os.urandom(16))  # a constant of the process: texts can't be made to collide


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """ids [n] int32, slots [n] int32 (PENDING without KV). Nobody writes into these arrays.

    Contexts are hashed when somebody asks for them: an edit of a long list seldom does. `_hashed` says how many of
    `_contexts` [n] are.

    Two bounds spare others a look at the whole list. They follow from how the list was made, and may be too low:
    known_exact: entries below it are exact. own_text_upto: entries below it hold a row that was computed from this
    very text, or one of context 0, or none.

    doubt [n] int32, None where all is 0: entries of number i are in doubt together. Of those that have KV, a share,
    shares[i - 1], is computed again by the next request: those whose rows deviate most from what they would be now.

    registered_upto: entries below it were given to the chunk registry, which need not look at them again.
    """

    ids: Ids
    slots: Slots
    _contexts: Contexts
    _hashed: int = 0
    known_exact: int = 0
    own_text_upto: int = 0
    doubt: Doubt | None = None
    shares: tuple[float, ...] = ()
    registered_upto: int = 0

    @staticmethod
    def empty() -> Rows:
        return Rows(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint64))

    @staticmethod
    def of(ids: Ids, slots: Slots) -> Rows:
        """A list of which nothing else is known."""
        return Rows.empty().edited([(0, 0, ids, slots)])

    @property
    def contexts(self) -> Contexts:
        """[n] uint64."""
        return self._contexts_upto(len(self))

    def _contexts_upto(self, upto: int) -> Contexts:
        if self._hashed < upto:
            _fill_contexts(self._contexts, self.ids, self._hashed, upto)
            object.__setattr__(self, "_hashed", upto)
        return self._contexts[:upto]

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
        return self.edited([(len(self), len(self), fresh, np.full(len(fresh), PENDING, np.int32))])

    def truncated(self, length: int) -> Rows:
        doubt = None if self.doubt is None else self.doubt[:length]
        return replace(
            self,
            ids=self.ids[:length],
            slots=self.slots[:length],
            _contexts=self._contexts[:length],
            _hashed=min(self._hashed, length),
            known_exact=min(self.known_exact, length),
            own_text_upto=min(self.own_text_upto, length),
            doubt=doubt,
            registered_upto=min(self.registered_upto, length),
        )

    def spliced(self, start: int, end: int, ids: Ids, slots: Slots) -> Rows:
        """[start, end) gives way to these entries; what follows keeps its slots and moves."""
        return self.edited([(start, end, ids, slots)])

    def edited(self, spans: Sequence[Span]) -> Rows:
        """Several disjoint spans, ascending, give way at once."""
        ids, slots, doubts, upto = [], [], [], 0
        for start, end, new_ids, new_slots in spans:
            ids += [self.ids[upto:start], new_ids]
            slots += [self.slots[upto:start], new_slots]
            if self.doubt is not None:
                doubts += [self.doubt[upto:start], np.zeros(len(new_ids), np.int32)]
            upto = end
        doubt = None if self.doubt is None else np.concatenate([*doubts, self.doubt[upto:]])
        all_ids = np.concatenate([*ids, self.ids[upto:]])
        all_slots = np.concatenate([*slots, self.slots[upto:]])
        first = spans[0][0] if spans else len(self)
        contexts = np.empty(len(all_ids), np.uint64)
        hashed = min(self._hashed, first)
        contexts[:hashed] = self._contexts[:hashed]
        own = min(self.own_text_upto, first)
        if own == first == len(self) and all(np.all(new == PENDING) for *_, new in spans):
            own = len(all_ids)
        known, registered = min(self.known_exact, first), min(self.registered_upto, first)
        return Rows(all_ids, all_slots, contexts, hashed, known, own, doubt, self.shares, registered)

    def pending_from(self, start: int) -> Rows:
        """Every entry from `start` on becomes pending."""
        rows = self.made_pending(np.arange(start, len(self)))
        if self.own_text_upto >= start:
            object.__setattr__(rows, "own_text_upto", len(self))
        return rows

    def made_pending(self, index: NDArray[np.int64]) -> Rows:
        """The entries at `index`, ascending, become pending."""
        return self._with_slots(index, PENDING)

    def filled(self, index: NDArray[np.int64], slots: Slots | int) -> Rows:
        """The entries at `index`, ascending, get these slots: fresh ones, or rows computed from this text."""
        rows = self._with_slots(index, slots)
        return rows if self.doubt is None else rows.settled(index)

    def _with_slots(self, index: NDArray[np.int64], slots: Slots | int) -> Rows:
        new = self.slots.copy()
        new[index] = slots
        first = int(index[0]) if len(index) else len(self)
        known, registered = min(self.known_exact, first), min(self.registered_upto, first)
        return replace(self, slots=new, known_exact=known, registered_upto=registered)

    def borrowed(self, index: NDArray[np.int64], slots: Slots) -> Rows:
        """The entries at `index`, ascending, get slots of rows that were computed from another text."""
        rows = self.filled(index, slots)
        return replace(rows, own_text_upto=min(self.own_text_upto, int(index[0]))) if len(index) else rows

    # ------------------------------------------------------------ what is in doubt

    @property
    def in_doubt(self) -> NDArray[np.int64]:
        """The indices of rows in doubt, ascending."""
        none = np.zeros(0, np.int64)
        return none if self.doubt is None else np.flatnonzero((self.doubt > 0) & (self.slots >= 0))

    @property
    def num_to_repair(self) -> int:
        """How many of them will be computed again."""
        return sum(count for _, count in self._doubts())

    def doubted(self, spans: Sequence[tuple[int, int]], share: float) -> Rows:
        """Each [start, end) is in doubt together: this share of it. They are disjoint. What is in doubt with a larger
        share stays so."""
        doubt = np.zeros(len(self), np.int32) if self.doubt is None else self.doubt.copy()
        known = np.array([0.0, *self.shares])
        for number, (start, end) in enumerate(spans, len(self.shares) + 1):
            there = doubt[start:end]
            there[known[there] < share] = number
        return replace(self, doubt=doubt, shares=(*self.shares, *[share] * len(spans)))

    def to_repair(self, deviation: NDArray[np.float32]) -> NDArray[np.int64]:
        """Which of them, ascending: those that deviate most. deviation [number in doubt]; of equal ones the first."""
        by_entry = np.zeros(len(self), np.float32)
        by_entry[self.in_doubt] = deviation
        chosen = [index[np.argsort(-by_entry[index], kind="stable")[:count]] for index, count in self._doubts()]
        return np.sort(np.concatenate([np.zeros(0, np.int64), *chosen]))

    def settled(self, index: NDArray[np.int64] | None = None) -> Rows:
        """The entries at `index`, or all, are in doubt no more."""
        if self.doubt is None or index is None:
            return replace(self, doubt=None, shares=())
        doubt = self.doubt.copy()
        doubt[index] = 0
        return replace(self, doubt=doubt) if doubt.any() else self.settled()

    def _doubts(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """The rows that are in doubt together, and how many of them will be computed again."""
        if self.doubt is None:
            return
        index = self.in_doubt
        together = self.doubt[index]
        for number, share in enumerate(self.shares, 1):
            group = index[together == number]
            yield group, num_of_share(len(group), share)

    # ------------------------------------------------------------ what the slots say

    def exact_upto(self, table: SlotTable) -> int:
        """The first index that is pending or not exact; below it the KV equals an honest prefill's."""
        start = self.known_exact
        if start < len(self) and self.slots[start] == PENDING:
            return start  # as an edit leaves it: nothing has to be hashed
        for upto in (min(start + _PEEK, len(self)), len(self)):
            slots = self.slots[start:upto]
            differs = table.context[indices(slots)] != self._contexts_upto(upto)[start:]
            differs |= slots < 0
            at = int(differs.argmax()) if len(differs) else 0
            start += at if len(differs) and differs[at] else len(differs)
            if start < upto:
                break
        # A row stays what it was computed from as long as a list holds it, so what is exact once is for good.
        object.__setattr__(self, "known_exact", start)
        return start

    def all_exact(self, table: SlotTable) -> bool:
        """Whether every entry that has KV is exact, and none stands behind one that has none."""
        return self.exact_upto(table) == len(self) - self.num_pending

    def turned(self, table: SlotTable, start: int = 0) -> NDArray[np.bool_]:
        """[n - start]: whether the entry stands elsewhere than where its row was written. None that is exact does."""
        slots = self.slots[start:]
        elsewhere = table.written_at[indices(slots)] != np.arange(start, len(self), dtype=np.int32)
        elsewhere &= slots >= 0
        return elsewhere

    def delta(self, table: SlotTable) -> NDArray[np.int32]:
        """[n]: by how much each entry's key is to be turned; 0 where it is pending, and where it is exact."""
        out = np.zeros(len(self), np.int32)
        start = self.exact_upto(table)
        slots = self.slots[start:]
        np.subtract(np.arange(start, len(self), dtype=np.int32), table.written_at[indices(slots)], out=out[start:])
        out[start:][slots < 0] = 0
        return out

    def note_contexts(self, table: SlotTable, index: NDArray[np.int64]) -> None:
        """Writes the contexts of freshly computed entries: those up to the first inexact entry are exact."""
        table.context[self.slots[index]] = self.contexts[index]
        upto = self.exact_upto(table)
        table.context[self.slots[index[index >= upto]]] = 0


_PEEK = 256  # entries looked at first: what ends exactness mostly stands right behind what is known


def added_to_context(ids: Ids, positions: NDArray[np.int32]) -> Contexts:
    """What each id, standing at its position, adds to the context of the entry before it."""
    factors = _factors(_rounded(int(positions.max(initial=0)) + 1))
    return (ids.astype(np.uint64) + np.uint64(1)) * factors[indices(positions)]


def _fill_contexts(contexts: Contexts, ids: Ids, start: int, end: int) -> None:
    """Writes contexts[start:end], given those before.

    A running sum over 64-bit integers of (id + 1) times a secret odd number of the position: multilinear hashing
    (Carter, Wegman 1979; over a ring of 2^64: Lemire, Kaser 2014, "Strongly universal string hashing is fast").
    A text that differs at one entry can't collide; one that differs at several does so with probability 2^(t - 63),
    2^t being the largest power of two that divides all differences, and ids are below 2^31. The numbers are drawn
    anew in each process and never leave it, so that nobody can look for collisions. Being a sum it is the hash of
    every prefix at once, in three passes.
    """
    new = contexts[start:end]
    np.add(ids[start:end], 1, out=new, casting="unsafe")
    new *= _factors(_rounded(end))[start:end]
    if start:
        new[:1] += contexts[start - 1 : start]  # as arrays: numbers would warn that they wrap around
    np.cumsum(new, out=new)


def _rounded(length: int) -> int:
    return max(1 << 16, 1 << (length - 1).bit_length())


@cache
def _factors(count: int) -> Contexts:
    """The secret numbers of positions [0, count): the same for every count."""
    factors = np.random.Philox(key=_KEY).random_raw(count)
    factors |= np.uint64(1)
    return factors
