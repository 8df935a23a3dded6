"""A session's edit log: where each edit's R stands now, and what would bring its span back.

Owns the coordinates of earlier edits under later ones. Records are kept in the order in which their R
stand in the list, so that an edit moves exactly the records to its right; a record whose R a later edit
cut is held inside that edit and comes back when it is undone. It does not know KV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_proto.spans import Piece


@dataclass(frozen=True, slots=True)
class EditRecord:
    """One edit. `at` is where its R stands, or, inside a covering record, the offset from that record's start."""

    edit_id: str
    mode: pb.Mode.ValueType
    version: int
    at: int
    removed: int
    inserted: int
    removed_xxh64: str
    pieces: tuple[Piece, ...] = ()
    covered: tuple[EditRecord, ...] = ()
    undone: bool = False
    forgotten: bool = False

    @property
    def undoable(self) -> bool:
        return self.mode == pb.MODE_AMORTIZE and not self.undone and not self.forgotten


@dataclass(frozen=True, slots=True)
class EditLog:
    """`live` in list order, `undone` in the order in which they were undone."""

    live: tuple[EditRecord, ...] = ()
    undone: tuple[EditRecord, ...] = ()

    def recorded(self, record: EditRecord) -> EditLog:
        """The log after `record` replaced [record.at, record.at + record.removed)."""
        start, end = record.at, record.at + record.removed
        shift = record.inserted - record.removed
        left: list[EditRecord] = []
        covered: list[EditRecord] = []
        right: list[EditRecord] = []
        for old in self.live:
            if old.at + old.inserted <= start:
                left.append(old)
            elif old.at >= end:
                right.append(replace(old, at=old.at + shift))
            else:
                covered.append(replace(old, at=old.at - start))
        return replace(self, live=(*left, replace(record, covered=tuple(covered)), *right))

    def without(self, edit_id: str) -> EditLog:
        """The log after `edit_id` was undone: what it covered is live again, what stands right of it moves."""
        index = next(i for i, record in enumerate(self.live) if record.edit_id == edit_id)
        record = self.live[index]
        shift = record.removed - record.inserted
        back = [replace(old, at=old.at + record.at) for old in record.covered]
        right = [replace(old, at=old.at + shift) for old in self.live[index + 1 :]]
        undone = replace(record, undone=True, pieces=(), covered=())
        return EditLog((*self.live[:index], *back, *right), (*self.undone, undone))

    def forget(self, edit_id: str) -> EditLog:
        """Marks an earlier edit as forgotten: its span can't come back."""
        return replace(self, live=_forget(self.live, edit_id))

    def find(self, edit_id: str) -> tuple[EditRecord, int, bool]:
        """(record, where its R stands now, whether its R is intact). Raises UNKNOWN_EDIT."""
        for record in self.live:
            found = _find(record, edit_id, record.at)
            if found is not None:
                return found
        for record in self.undone:
            if record.edit_id == edit_id:
                return record, record.at, False
        raise Refusal("UNKNOWN_EDIT", f"no edit {edit_id!r} in this session", edit_id=edit_id)

    def check_undoable(self, edit_id: str) -> EditRecord:
        """Raises UNKNOWN_EDIT or NOT_UNDOABLE, saying why."""
        record, _, intact = self.find(edit_id)
        if record.undone:
            why = "it was undone already"
        elif record.mode != pb.MODE_AMORTIZE or record.forgotten:
            why = "what FORGET removed is gone"
        elif not intact:
            cover = next(r.edit_id for r in self.live if _find(r, edit_id, 0) is not None)
            why = f"its R was cut by the later edit {cover!r}; undo that one first"
        else:
            return record
        raise Refusal("NOT_UNDOABLE", f"edit {edit_id!r} can't be undone: {why}", edit_id=edit_id)

    def entries(self) -> list[pb.EditEntry]:
        """All edits in the order of their versions."""
        found: list[pb.EditEntry] = []
        for record in self.live:
            _collect(record, record.at, True, found)
        found.extend(_entry(record, record.at, False) for record in self.undone)
        return sorted(found, key=lambda entry: (entry.version, entry.edit_id))


def _forget(records: tuple[EditRecord, ...], edit_id: str | None = None) -> tuple[EditRecord, ...]:
    return tuple(
        replace(
            record,
            forgotten=record.forgotten or edit_id in (None, record.edit_id),
            covered=_forget(record.covered, edit_id if edit_id != record.edit_id else None),
        )
        for record in records
    )


def _find(record: EditRecord, edit_id: str, at: int) -> tuple[EditRecord, int, bool] | None:
    if record.edit_id == edit_id:
        return record, at, True
    for inner in record.covered:
        found = _find(inner, edit_id, at)
        if found is not None:
            return found[0], at, False
    return None


def _collect(record: EditRecord, at: int, intact: bool, out: list[pb.EditEntry]) -> None:
    out.append(_entry(record, at, intact))
    for inner in record.covered:
        _collect(inner, at, False, out)


def _entry(record: EditRecord, at: int, intact: bool) -> pb.EditEntry:
    return pb.EditEntry(
        edit_id=record.edit_id,
        mode=record.mode,
        version=record.version,
        at=at,
        removed=record.removed,
        inserted=record.inserted,
        undone=record.undone,
        undoable=record.undoable and intact,
        removed_xxh64=record.removed_xxh64,
    )
