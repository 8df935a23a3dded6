"""What a session should look like, in plain Python: messages that are there or hidden by an edit, a version, a log.

Knows no tokens and none of the project's rules: only which messages an operation adds, hides or brings back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from leyline_proto import leyline_pb2 as pb


@dataclass
class Entry:
    id: str
    role: str
    calls: tuple[str, ...] = ()  # valid ones
    answers: str = ""
    hidden_by: str = ""
    before: dict[str, tuple[str, ...]] = field(default_factory=dict)  # edit id -> calls that its R took away


@dataclass
class Model:
    id: str
    entries: list[Entry] = field(default_factory=list)
    version: int = 0
    turn: int = 0
    edits: dict[str, bool] = field(default_factory=dict)  # edit id -> undone

    @property
    def visible(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.hidden_by]

    @property
    def unanswered(self) -> list[str]:
        answered = {entry.answers for entry in self.visible if entry.role == "TOOL"}
        return [call for entry in self.visible for call in entry.calls if call not in answered]

    def fork(self, session_id: str) -> Model:
        return copy.deepcopy(self).renamed(session_id)

    def renamed(self, session_id: str) -> Model:
        self.id = session_id
        return self

    def add(self, span: pb.MessageSpan) -> None:
        """A message that an append or a Generate answered with; one that went on is there already."""
        role = pb.Role.Name(span.role).removeprefix("ROLE_")
        calls = tuple(call.id for call in span.tool_calls)
        old = next((entry for entry in self.visible if entry.id == span.message_id), None)
        if old is not None:
            old.calls = calls
        else:
            self.entries.append(Entry(span.message_id, role, calls, span.tool_call_id))

    def generated(self, done: pb.GenerateDone) -> None:
        self.add(done.message)
        invalid = {call.id for call in done.invalid_tool_calls}
        entry = next(e for e in self.visible if e.id == done.message.message_id)
        entry.calls = tuple(call for call in entry.calls if call not in invalid)
        self.turn += 1

    def edited(self, edit_ids: list[str]) -> None:
        self.version += 1
        self.edits.update(dict.fromkeys(edit_ids, False))

    def hide(self, message_ids: list[str], edit_id: str) -> None:
        for entry in self.visible:
            if entry.id in message_ids:
                entry.hidden_by = edit_id

    def stand_in(self, message_ids: list[str], edit_id: str) -> None:
        """R took the place of these whole messages: of one it keeps the id, of several it is a message of its own."""
        if len(message_ids) == 1:
            entry = next(e for e in self.visible if e.id == message_ids[0])
            entry.before[edit_id], entry.calls = entry.calls, ()
            return
        at = 1 + max(i for i, e in enumerate(self.entries) if e.id in message_ids and not e.hidden_by)
        self.hide(message_ids, edit_id)
        self.entries.insert(at, Entry(f"r-{edit_id}", "RAW"))

    def undone(self, edit_id: str) -> None:
        self.version += 1
        self.edits[edit_id] = True
        self.entries = [e for e in self.entries if e.id != f"r-{edit_id}"]
        for entry in self.entries:
            if entry.hidden_by == edit_id:
                entry.hidden_by = ""
            if edit_id in entry.before:
                entry.calls = entry.before.pop(edit_id)

    def check(self, state: pb.SessionState) -> None:
        """The state of either side is this."""
        seen = [(m.message_id, pb.Role.Name(m.role).removeprefix("ROLE_"), m.tool_call_id) for m in state.messages]
        assert seen == [(e.id, e.role, e.answers) for e in self.visible]
        assert (state.version, state.turn) == (self.version, self.turn)
        assert {edit.edit_id: edit.undone for edit in state.edits} == self.edits
        assert list(state.unanswered_call_ids) == self.unanswered
        check_tiling(state)


def check_tiling(state: pb.SessionState) -> None:
    """Messages tile [0, n) without gap or overlap, and parts tile their message."""
    at = 0
    for message in state.messages:
        assert message.start == at
        for part in message.parts:
            assert part.start == at
            assert part.end >= part.start
            at = part.end
        assert message.end == at
    assert state.num_tokens == at == len(state.token_ids)
    assert 0 <= state.exact_upto <= at
    assert 0 <= state.num_pending <= at
