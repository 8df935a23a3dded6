"""The fake's KV: for each token whether it has a row, where that was written, and whether it is exact.

Owns what edits and computation do to the list; numbers good enough for receipts and cache reports. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from leyline_proto import leyline_pb2 as pb
from leyline_proto.directives import Cut
from leyline_proto.repair import Repair, num_of_share

_slots = count(1)
_doubts = count(1)
Doubt = tuple[float, int]
"""The share of its like that is computed again, and a number that these have in common."""
NO_DOUBT: Doubt = (0.0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """`slot` 0: the token is pending. A slot's number is never used twice."""

    token: int
    slot: int = 0
    written_at: int = 0
    exact: bool = False
    doubt: Doubt = NO_DOUBT

    @property
    def pending(self) -> Row:
        return Row(self.token)


Rows = tuple[Row, ...]


def pending(ids: Iterable[int]) -> Rows:
    return tuple(map(Row, ids))


def tokens(rows: Sequence[Row]) -> list[int]:
    return [row.token for row in rows]


def slots(rows: Iterable[Row]) -> set[int]:
    return {row.slot for row in rows if row.slot}


def num_pending(rows: Sequence[Row]) -> int:
    return sum(not row.slot for row in rows)


def exact_upto(rows: Sequence[Row]) -> int:
    return next((i for i, row in enumerate(rows) if not row.exact), len(rows))


def num_turned(rows: Sequence[Row], start: int = 0) -> int:
    """Rows that stand elsewhere than where they were written."""
    return sum(bool(row.slot) and row.written_at != i for i, row in enumerate(rows) if i >= start)


def num_to_repair(rows: Sequence[Row]) -> int:
    """How many of the rows in doubt will be computed again."""
    return sum(_to_repair(rows).values())


def repaired(rows: Rows) -> Rows:
    """With the rows to repair pending. Nothing here deviates: the first of them are taken."""
    left = _to_repair(rows)
    out: list[Row] = []
    for row in rows:
        again = bool(row.slot) and left[row.doubt] > 0
        left[row.doubt] -= again
        out.append(row.pending if again else replace(row, doubt=NO_DOUBT) if row.doubt != NO_DOUBT else row)
    return tuple(out)


def _to_repair(rows: Sequence[Row]) -> Counter[Doubt]:
    together = Counter(row.doubt for row in rows if row.slot and row.doubt != NO_DOUBT)
    return Counter({doubt: num_of_share(count, doubt[0]) for doubt, count in together.items()})


def computed(rows: Sequence[Row]) -> Rows:
    """With a row for every pending token, exact where all before it is."""
    out: list[Row] = []
    exact = True
    for index, row in enumerate(rows):
        if not row.slot:
            row = Row(row.token, next(_slots), index, exact)
        exact = exact and row.exact
        out.append(row)
    return tuple(out)


def spliced(rows: Rows, cut: Cut) -> Rows:
    """After one cut: FORGET makes what follows pending, AMORTIZE keeps it and takes its exactness."""
    rest = rows[cut.end :]
    if cut.mode == pb.MODE_FORGET:
        rest = tuple(row.pending for row in rest)
    elif cut.ids or cut.end > cut.start:
        rest = tuple(replace(row, exact=False) for row in rest)
    return (*rows[: cut.start], *pending(cut.ids), *rest)


def with_repair(rows: Rows, repair: Repair, start: int, end: int) -> tuple[Rows, int]:
    """The list with the repair of a cut whose kept rows are [start, end), and how many are computed again."""
    first = len(rows) if repair.share == 1 else repair.first
    behind = rows[start:end]
    if 0 < repair.share < 1:
        doubt = (repair.share, next(_doubts))
        behind = tuple(replace(row, doubt=doubt) if row.doubt < (repair.share, 0) else row for row in behind)
        after = (*rows[:start], *behind, *rows[end:])
        return after, num_to_repair(after) - num_to_repair(rows)
    known = len(slots(behind[:first]))
    behind = (*(row.pending for row in behind[:first]), *behind[first:])
    return (*rows[:start], *behind, *rows[end:]), known


def restored(rows: Rows, at: int, inserted: int, back: Rows) -> Rows:
    """After an undo: what was removed stands in R's place; nothing from there on is exact."""
    tail = (*back, *rows[at + inserted :])
    return (*rows[:at], *(replace(row, exact=False) for row in tail))
