"""Directives and undos on a session: the conversation's value and the engine's list change together.

Every check is made before anything changes, so an edit is all or none. Called by the engine's thread alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from leyline_proto import leyline_pb2 as pb
from leyline_proto.changes import AppliedCut
from leyline_proto.conversation import Conversation
from leyline_proto.directives import Cut, resolve
from leyline_server.engine.engine import RowEdit, RowReceipt, SequenceId
from leyline_server.sessions.session import Serving, Session

Names = Callable[[], dict[SequenceId, str]]


@dataclass(frozen=True, slots=True)
class PlannedEdits:
    """Checked directives that have changed nothing yet. `after` is the conversation with them."""

    cuts: list[Cut]
    applied: dict[int, AppliedCut]  # by the index of the directive
    rows: list[RowEdit]
    after: Conversation


@dataclass(frozen=True, slots=True)
class Edited:
    """The outcome of directives: receipts in their order, and the changed messages as they stand."""

    receipts: list[pb.Receipt]
    messages: list[pb.MessageSpan]


def plan(serving: Serving, session: Session, directives: Sequence[pb.Directive]) -> PlannedEdits:
    """Directives as one version; none of them, the version as it is. Raises what `resolve` and `edit` raise."""
    before = session.conversation
    if not directives:
        return PlannedEdits([], {}, [], before)
    cuts = resolve(directives, before.table, before.log, serving.rules(session), before.tools)
    hashes = [_hash(serving.engine.ids(session.sequence, cut.start, cut.end)) for cut in cuts]
    after, applied = before.edit(cuts, hashes)
    by_index = {item.index: item for item in applied}
    rows = [_row_edit(cut, by_index[index], after) for index, cut in enumerate(cuts)]
    return PlannedEdits(cuts, by_index, rows, after)


def carry_out(serving: Serving, session: Session, planned: PlannedEdits, names: Names, dry_run: bool = False) -> Edited:
    """Changes list and conversation; with `dry_run` only says what would change.

    names: tells the tenant's sessions by sequence, for `held_elsewhere`.
    """
    if not planned.cuts:
        return Edited([], [])
    receipts = serving.engine.splice(session.sequence, planned.rows, dry_run)
    messages = planned.after.edited(list(planned.applied.values()))
    if not dry_run:
        session.conversation = planned.after
        if any(cut.mode == pb.MODE_FORGET for cut in planned.cuts):
            session.scrub_streams()
        for span in messages:
            fill_content(serving, session, span)
    by_directive = zip(planned.cuts, receipts, strict=True)
    return Edited(
        [_receipt(cut, planned.applied[i], row, names, dry_run) for i, (cut, row) in enumerate(by_directive)],
        messages,
    )


def undo(serving: Serving, session: Session, edit_id: str) -> pb.UndoResponse:
    """Raises UNKNOWN_EDIT, NOT_UNDOABLE, UNPAIRED_TOOL_CALL."""
    after, undone = session.conversation.undo(edit_id)
    restored = [serving.engine.undo(session.sequence, one.edit_id, one.at, one.inserted) for one in undone]
    session.conversation = after
    return pb.UndoResponse(
        version=after.version,
        num_tokens=len(after.table),
        restored=sum(one.restored for one in restored),
        restored_with_kv=sum(one.with_kv for one in restored),
        exact_upto=serving.engine.exact_upto(session.sequence),
        session=state(serving, session),
    )


def state(serving: Serving, session: Session) -> pb.SessionState:
    """The session as its client mirrors it, without tokens and content."""
    out = session.conversation.state()
    # The engine's list is longer while a Generate runs: its message enters the conversation at its end.
    out.num_pending = serving.engine.num_pending(session.sequence, out.num_tokens)
    out.exact_upto = min(out.num_tokens, serving.engine.exact_upto(session.sequence))
    out.busy = session.run is not None
    session.reuse.tell(out)
    return out


def fill_content(serving: Serving, session: Session, span: pb.MessageSpan) -> None:
    """Writes a message's text and reasoning into its span, from the ids that stand there now."""
    for part in span.parts:
        if part.kind in (pb.PART_KIND_TEXT, pb.PART_KIND_REASONING):
            ids = serving.engine.ids(session.sequence, part.start, part.end)
            if part.kind == pb.PART_KIND_TEXT:
                span.text += serving.format.content(span.role, ids)
            else:
                span.reasoning += serving.format.decode(ids)


def _hash(ids: Sequence[int]) -> str:
    return str(xxhash.xxh64_hexdigest(struct.pack(f"<{len(ids)}i", *ids)))


def _row_edit(cut: Cut, applied: AppliedCut, after: Conversation) -> RowEdit:
    if cut.mode != pb.MODE_FORGET:
        return RowEdit(cut.start, cut.end, cut.ids, applied.edit_id, repair=cut.repair)
    log, edit_id = after.log, applied.edit_id
    forgotten = log.lost_to(edit_id, cut.forgets)
    stale = [one for one in log.behind(edit_id) if one not in forgotten]
    return RowEdit(cut.start, cut.end, cut.ids, edit_id, True, tuple(forgotten), tuple(stale))


def _receipt(cut: Cut, applied: AppliedCut, row: RowReceipt, names: Names, dry_run: bool) -> pb.Receipt:
    elsewhere = names() if row.held_elsewhere else {}
    return pb.Receipt(
        edit_id="" if dry_run else applied.edit_id,
        mode=cut.mode,
        at=row.at,
        removed=row.removed,
        inserted=row.inserted,
        shift=row.inserted - row.removed,
        kept=row.kept,
        turned=row.turned,
        to_compute=row.to_compute,
        freed=row.freed,
        exact_upto=row.exact_upto,
        influence_remains=row.influence_remains,
        held_elsewhere=sorted(elsewhere[s] for s in row.held_elsewhere if s in elsewhere),
        removed_message_ids=applied.removed_message_ids,
        label=cut.label,
        repaired=row.repaired,
    )
