"""A session's edit log: where each edit's R stands now, and what would bring its span back.

Owns the coordinates of earlier edits under later ones. Every edit has two anchors, the start and end of its R. All
anchors that stand in the list are kept in one sequence in list order, so that those at the same token have sides; those
inside a span that a later edit removed wait in that edit's record and come back with it. An edit can be undone when no
later edit that still stands has touched its R. It does not know KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_proto.spans import Piece


@dataclass(frozen=True, slots=True)
class Anchor:
    """One end of an edit's R: `at` in the list, or, while it waits in a record, from the start of the removed span."""

    edit_id: str
    is_end: bool
    at: int

    def moved(self, by: int) -> Anchor:
        return Anchor(self.edit_id, self.is_end, self.at + by)


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit. `inside`: the anchors that stood inside what it removed. `touched_by`: later edits that cut its R."""

    edit_id: str
    mode: pb.Mode.ValueType
    version: int
    removed: int
    inserted: int
    removed_xxh64: str
    pieces: tuple[Piece, ...] = ()
    inside: tuple[Anchor, ...] = ()
    touched_by: frozenset[str] = frozenset()
    undone: bool = False
    forgotten: bool = False


@dataclass(frozen=True, slots=True)
class EditLog:
    """`records` in the order in which they were made, `anchors` in the order in which they stand."""

    records: dict[str, EditRecord] = field(default_factory=dict)
    anchors: tuple[Anchor, ...] = ()
    places: dict[tuple[str, bool], int] = field(init=False, compare=False, repr=False)
    """(edit id, is_end): where that anchor stands; for one that a later edit swallowed, where that edit's R does."""

    def __post_init__(self) -> None:
        places = {(anchor.edit_id, anchor.is_end): anchor.at for anchor in self.anchors}
        for record in reversed(self.records.values()):  # what swallows another was made later
            for anchor in record.inside:
                places[anchor.edit_id, anchor.is_end] = places[record.edit_id, anchor.is_end]
        object.__setattr__(self, "places", places)

    # ------------------------------------------------------------ changes

    def recorded(self, record: EditRecord, start: int) -> EditLog:
        """The log after `record` replaced [start, start + removed) by its R."""
        end, shift = start + record.removed, record.inserted - record.removed
        left, inside, right = self._split(start, end)
        own = (
            Anchor(record.edit_id, False, start),
            Anchor(record.edit_id, True, start + record.inserted),
        )
        standing = {(anchor.edit_id, anchor.is_end) for anchor in self.anchors}
        records = {
            edit_id: replace(old, touched_by=old.touched_by | {record.edit_id})
            if self._touched(old, standing, start, end)
            else old
            for edit_id, old in self.records.items()
        }
        records[record.edit_id] = replace(record, inside=tuple(anchor.moved(-start) for anchor in inside))
        return EditLog(records, (*left, *own, *(anchor.moved(shift) for anchor in right)))

    def without(self, edit_id: str) -> EditLog:
        """The log after an undoable edit was undone."""
        record = self.records[edit_id]
        first = self._index(edit_id)
        start, shift = self.anchors[first].at, record.removed - record.inserted
        back = (anchor.moved(start) for anchor in record.inside)
        right = (anchor.moved(shift) for anchor in self.anchors[first + 2 :])
        records = {other: replace(old, touched_by=old.touched_by - {edit_id}) for other, old in self.records.items()}
        records[edit_id] = replace(record, undone=True, pieces=(), inside=())
        return EditLog(records, (*self.anchors[:first], *back, *right))

    def forget(self, *edit_ids: str) -> EditLog:
        """Marks edits whose span can't come back any more, and lets go of what they kept."""
        records = dict(self.records)
        for edit_id in edit_ids:
            records[edit_id] = replace(records[edit_id], forgotten=True, pieces=())
        return replace(self, records=records)

    # ------------------------------------------------------------ questions

    def where(self, edit_id: str, is_end: bool = False) -> int:
        """Where the edit's R starts, or ends; for an anchor that a later edit swallowed, where that one's R does."""
        return self.places.get((edit_id, is_end), 0)  # undone: it stands nowhere

    def find(self, edit_id: str) -> EditRecord:
        """Raises UNKNOWN_EDIT."""
        record = self.records.get(edit_id)
        if record is None:
            raise Refusal("UNKNOWN_EDIT", f"no edit {edit_id!r} in this session", edit_id=edit_id)
        return record

    def of_version(self, edit_id: str) -> list[str]:
        """The edit of this id; or, when it names a call of several directives, all edits of that call, from left to
        right. Raises UNKNOWN_EDIT."""
        if edit_id not in self.records:
            several = [one for one in self.records if one.startswith(f"{edit_id}.")]
            if several:
                return sorted(several, key=lambda one: (self.where(one), one))
        return [self.find(edit_id).edit_id]

    def why_not_undoable(self, edit_id: str) -> str:
        """Why the edit can't be undone now; empty when it can."""
        record = self.find(edit_id)
        if record.undone:
            return "it was undone already"
        if record.mode != pb.MODE_AMORTIZE or record.forgotten:
            return "what FORGET removed is gone"
        if record.touched_by:
            later = max(record.touched_by, key=lambda one: self.records[one].version)
            return f"its R was cut by the later edit {later!r}; undo that one first"
        return ""

    def lost_to(self, edit_id: str, forgets: str = "") -> list[str]:
        """The edits that can never be undone once the FORGET `edit_id` stands: those it touched, the one it `forgets`,
        and those that any of these touched."""
        found = {edit_id, forgets}
        for record in reversed(self.records.values()):
            if record.touched_by & found and not record.undone:
                found.add(record.edit_id)
        return sorted(found - {edit_id, ""})

    def behind(self, edit_id: str) -> list[str]:
        """The edits that stand, or stood when they were swallowed, behind this one."""
        here = self._index(edit_id)
        there = {anchor.edit_id for anchor in self.anchors[here + 2 :]}
        for record in reversed(self.records.values()):
            if record.edit_id in there:
                there |= {anchor.edit_id for anchor in record.inside}
        return sorted(there)

    def entries(self) -> list[pb.EditEntry]:
        """All edits in the order in which they were made."""
        return [
            pb.EditEntry(
                edit_id=record.edit_id,
                mode=record.mode,
                version=record.version,
                at=self.where(record.edit_id),
                removed=record.removed,
                inserted=record.inserted,
                undone=record.undone,
                undoable=not self.why_not_undoable(record.edit_id),
                removed_xxh64=record.removed_xxh64,
            )
            for record in sorted(self.records.values(), key=lambda r: (r.version, r.edit_id))
        ]

    # ------------------------------------------------------------ anchors

    def _index(self, edit_id: str) -> int:
        """The place of the edit's start anchor among those that stand; -1 when it waits in another record."""
        return next((i for i, a in enumerate(self.anchors) if a.edit_id == edit_id and not a.is_end), -1)

    def _split(self, start: int, end: int) -> tuple[tuple[Anchor, ...], tuple[Anchor, ...], tuple[Anchor, ...]]:
        """Anchors left of, inside and right of a cut. An insertion goes in front of the first R that starts there."""
        anchors = self.anchors
        if start < end:
            first = next((i for i, a in enumerate(anchors) if a.at > start), len(anchors))
            last = next((i for i, a in enumerate(anchors) if a.at >= end), len(anchors))
        else:
            first = last = next((i for i, a in enumerate(anchors) if self._behind_insertion(a, start)), len(anchors))
        return anchors[:first], anchors[first:last], anchors[last:]

    def _behind_insertion(self, anchor: Anchor, at: int) -> bool:
        starts_here = anchor.at == at and not anchor.is_end and self.records[anchor.edit_id].inserted > 0
        return anchor.at > at or starts_here

    def _touched(self, record: EditRecord, standing: set[tuple[str, bool]], start: int, end: int) -> bool:
        """Whether a cut takes from the edit's R, or comes between its tokens."""
        if record.undone:
            return False
        first, last = (record.edit_id, False), (record.edit_id, True)
        begins, ends = self.places[first], self.places[last]
        if not (first in standing and last in standing):
            # A part of R waits at one of these ends: what comes there comes between.
            return start <= ends and end >= begins
        return start < ends and end > begins if ends > begins else start < begins < end
