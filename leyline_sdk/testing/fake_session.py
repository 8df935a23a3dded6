"""One session of the fake: its conversation and rows, and what each verb does to them.

Owns the order of a call's effects: directives, then the verb, then the bounds, then the commit. A Refusal on the way
leaves the session as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from leyline_proto import leyline_pb2 as pb
from leyline_proto.changes import AppliedCut
from leyline_proto.conversation import Conversation
from leyline_proto.directives import Rules, resolve
from leyline_proto.repair import NO_REPAIR
from leyline_proto.reuse import PREFIX, Reuse
from leyline_sdk.testing import rows as kv
from leyline_sdk.testing.byte_format import ByteFormat
from leyline_sdk.testing.generating import Generating
from leyline_sdk.testing.rows import Rows


@dataclass(frozen=True, slots=True)
class World:
    """What a session needs from its server. `held_by` names other sessions that hold one of these slots, and
    `in_use` counts the slots of all others together with these."""

    format: ByteFormat
    limits: pb.Limits
    amortize_refused: str
    held_by: Callable[[set[int]], list[str]]
    in_use: Callable[[set[int]], int]


@dataclass(frozen=True, slots=True)
class State:
    """What a call changes: assigned as a whole or not at all. `kept` are rows for undo, by edit id."""

    conversation: Conversation
    rows: Rows = ()
    kept: Mapping[str, Rows] = field(default_factory=dict)
    edited: bool = False  # since rows were last computed

    def rules(self, world: World) -> Rules:
        limits = world.limits
        return Rules(
            world.format,
            limits.max_replacement,
            limits.max_directives,
            limits.sink_tokens,
            lambda start, end: kv.tokens(self.rows[start:end]),
            world.amortize_refused,
        )


@dataclass(slots=True)
class FakeSession:
    state: State
    idle_since: float = 0.0
    reuse: Reuse = PREFIX  # as asked for: there are no caches here, and nothing is hit
    running: Generating | None = None

    @property
    def busy(self) -> bool:
        return self.running is not None and not self.running.over


def edit(
    state: State, directives: Sequence[pb.Directive], world: World
) -> tuple[State, list[pb.Receipt], list[AppliedCut]]:
    """The state after the directives, and their receipts in their order. No directives change nothing."""
    if not directives:
        return state, [], []
    conversation = state.conversation
    cuts = resolve(directives, conversation.table, conversation.log, state.rules(world), conversation.tools)
    hashes = [xxhash.xxh64_hexdigest(array("i", kv.tokens(state.rows[c.start : c.end])).tobytes()) for c in cuts]
    conversation, applied = conversation.edit(cuts, hashes)
    rows, kept = state.rows, dict(state.kept)
    receipts: dict[int, pb.Receipt] = {}
    forget_from = min((cut.start for cut in cuts if cut.mode == pb.MODE_FORGET), default=len(rows))
    until = len(rows)
    for one in applied:
        cut = one.cut
        before, removed, rest = rows, rows[cut.start : cut.end], rows[cut.end :]
        rows = kv.spliced(rows, cut)
        forgets = cut.mode == pb.MODE_FORGET
        behind, shift = cut.start + len(cut.ids), len(cut.ids) - len(removed)
        repair = cut.repair if cut.start < forget_from else NO_REPAIR
        rows, num_repaired = kv.with_repair(rows, repair, behind, until + shift)
        if removed or cut.ids:
            until = cut.start
        if forgets:
            kept = {edit_id: tuple(row.pending for row in back) for edit_id, back in kept.items()}
        else:
            kept[one.edit_id] = removed
        kept.pop(cut.forgets, None)
        dropped = kv.slots((*removed, *rest)) if forgets else set[int]()
        receipts[one.index] = pb.Receipt(
            edit_id=one.edit_id,
            mode=cut.mode,
            removed=len(removed),
            inserted=len(cut.ids),
            shift=shift,
            kept=len(kv.slots(rows[behind:])),
            turned=kv.num_turned(rows, behind),
            to_compute=kv.num_pending(rows) + kv.num_to_repair(rows),
            freed=world.in_use(kv.slots(before)) - world.in_use(kv.slots(rows)),
            exact_upto=kv.exact_upto(rows),
            influence_remains=bool(kv.slots(removed)) and not forgets and bool(kv.slots(rows[behind:])),
            held_elsewhere=world.held_by(dropped),
            removed_message_ids=one.removed_message_ids,
            label=cut.label,
            repaired=num_repaired,
        )
    for one in applied:
        receipts[one.index].at = conversation.log.where(one.edit_id)
    after = State(conversation, rows, kept, edited=True)
    return after, [receipts[index] for index in range(len(cuts))], applied


def computed(state: State, again_from: int | None = None) -> tuple[State, pb.CacheReport]:
    """With KV for every token; a Generate computes the last one anew (`again_from`)."""
    rows = state.rows
    if again_from is not None:
        rows = (*rows[:again_from], *(row.pending for row in rows[again_from:]))
    cold = not kv.slots(rows)
    rows = kv.repaired(rows)
    first = next((i for i, row in enumerate(rows) if not row.slot), None)
    report = pb.CacheReport(
        kept=len(rows) - kv.num_pending(rows),
        turned=kv.num_turned(rows),
        computed=kv.num_pending(rows),
        first_divergence=first,
        reason=pb.CacheReport.REASON_COLD
        if cold
        else pb.CacheReport.REASON_EDIT
        if state.edited
        else pb.CacheReport.REASON_APPEND,
    )
    return State(state.conversation, kv.computed(rows), state.kept), report


def undone(state: State, edit_id: str) -> tuple[State, pb.UndoResponse]:
    conversation, undone_edits = state.conversation.undo(edit_id)
    kept, rows = dict(state.kept), state.rows
    backs = []
    for one in undone_edits:
        backs.append(kept.pop(one.edit_id))
        rows = kv.restored(rows, one.at, one.inserted, backs[-1])
    after = State(conversation, rows, kept, edited=True)
    return after, pb.UndoResponse(
        version=conversation.version,
        num_tokens=len(rows),
        restored=sum(map(len, backs)),
        restored_with_kv=sum(len(kv.slots(back)) for back in backs),
        exact_upto=kv.exact_upto(rows),
    )


def with_text(span: pb.MessageSpan, state: State, format: ByteFormat) -> pb.MessageSpan:
    """The span with its content decoded."""
    for kind, field_name in ((pb.PART_KIND_TEXT, "text"), (pb.PART_KIND_REASONING, "reasoning")):
        ids = [
            token for part in span.parts if part.kind == kind for token in kv.tokens(state.rows[part.start : part.end])
        ]
        setattr(span, field_name, format.decode(ids))
    return span


def described(
    session: FakeSession, format: ByteFormat, *, token_ids: bool = False, content: bool = False
) -> pb.SessionState:
    """The session as GetSession answers."""
    state = session.state
    out = state.conversation.state()
    out.num_pending = kv.num_pending(state.rows)
    out.exact_upto = kv.exact_upto(state.rows)
    out.busy = session.busy
    session.reuse.tell(out)
    if token_ids:
        out.token_ids.extend(kv.tokens(state.rows))
    for span in out.messages if content else ():
        with_text(span, state, format)
    return out
