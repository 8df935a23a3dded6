"""The same operations on the fake and on a real server: the same structure, the same refusals, and a plain model's.

Text is digits, which are one token each on both sides, so that whatever lies outside tool calls has the same lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leyline_proto import leyline_pb2 as pb
from tests.contract.both_sides import BothSides, Build
from tests.contract.comparing import attempt, bare_length, summary
from tests.contract.model import Model
from tests.contract.scene import READ, call, fresh, message
from tests.contract.sides import Side

DIGITS = st.text("0123456789", min_size=1, max_size=6)
MODES = st.sampled_from([pb.MODE_AMORTIZE, pb.MODE_FORGET])
PICK = st.integers(0, 10**6)
ARGUMENTS = '{"path":"a"}'
BODIES: dict[str, Callable[[Side], list[int]]] = {
    "text": lambda s: s.says("123"),
    "one call": lambda s: s.says("4", [("read", ARGUMENTS)]),
    "two calls": lambda s: s.says("", [("read", ARGUMENTS), ("read", '{"path":"b"}')]),
    "no JSON": lambda s: s.says("", [("read", "{")]),
    "no such tool": lambda s: s.says("", [("write", ARGUMENTS)]),
    "cut short": lambda s: s.encode("56"),
    "cut short after a call": lambda s: s.says("", [("read", ARGUMENTS)])[:-1],
    "half a call": lambda s: [*s.encode("7"), *s.call_ids("read", ARGUMENTS)[:3]],
}
REPAIR = st.sampled_from([None, pb.Repair(first=0), pb.Repair(first=5), pb.Repair(share=0.3), pb.Repair(share=1.0)])


class Machine(BothSides):
    # ------------------------------------------------------------ sessions

    @initialize(text=DIGITS)
    def create(self, text: str) -> None:
        session_id = fresh("machine")
        first = [message("system", "0" + text, message_id="sys"), message("user", "12345", message_id="task")]
        model = Model(session_id)
        for side in self.sides.values():
            request = pb.CreateSessionRequest(request_id=fresh(), session_id=session_id, tools=[READ], messages=first)
            state = side.call(request).session
        for span in state.messages:
            model.add(span)
        self.models.append(model)
        self.check(model)

    @precondition(lambda self: len(self.models) < 4)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        model, session_id = self.model(pick), fresh("machine")
        self.both(
            model,
            lambda side, state: pb.ForkSessionRequest(
                request_id=fresh(), session_id=model.id, new_session_id=session_id, expected_version=state.version
            ),
        )
        copy = model.fork(session_id)
        self.models.append(copy)
        self.check(copy)

    @precondition(lambda self: len(self.models) > 1)
    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        model = self.model(pick)
        self.both(model, lambda side, state: pb.CloseSessionRequest(request_id=fresh(), session_id=model.id))
        self.models.remove(model)
        for side in self.sides.values():
            assert attempt(side, pb.GetSessionRequest(session_id=model.id))[1] == "SESSION_NOT_FOUND"

    # ------------------------------------------------------------ append and generate

    @rule(pick=PICK, text=DIGITS, role=st.sampled_from(["user", "assistant", "system"]), prefill=st.booleans())
    def append(self, pick: int, text: str, role: str, prefill: bool) -> None:
        new = message(role, text, message_id=self.new_message_id())
        self.appended(pick, {"messages": pb.Messages(messages=[new])}, prefill)

    @rule(pick=PICK, text=DIGITS, as_ids=st.booleans())
    def append_raw(self, pick: int, text: str, as_ids: bool) -> None:
        model = self.model(pick)
        if as_ids:
            answer = self.both(
                model,
                lambda side, state: pb.AppendRequest(
                    request_id=fresh(), session_id=model.id, token_ids=pb.TokenIds(ids=side.encode(text))
                ),
            )
            self.took(model, answer)
        else:
            self.appended(pick, {"text": text}, False)

    @rule(pick=PICK, count=st.integers(1, 2))
    def append_calls(self, pick: int, count: int) -> None:
        calls = [call(self.new_message_id()) for _ in range(count)]
        new = message("assistant", "8", message_id=self.new_message_id(), tool_calls=calls)
        self.appended(pick, {"messages": pb.Messages(messages=[new])}, False)

    @rule(pick=PICK, text=DIGITS, count=st.integers(1, 2), prefill=st.booleans(), backwards=st.booleans())
    def answer(self, pick: int, text: str, count: int, prefill: bool, backwards: bool) -> None:
        waiting = self.model(pick).unanswered[:count] or ["nobody"]
        results = [message("tool", text, message_id=self.new_message_id(), tool_call_id=c) for c in waiting]
        messages = pb.Messages(messages=results[::-1] if backwards else results)
        self.appended(pick, {"messages": messages}, prefill)

    def appended(self, pick: int, content: dict[str, Any], prefill: bool) -> None:
        model = self.model(pick)
        answer = self.both(
            model,
            lambda side, state: pb.AppendRequest(
                request_id=fresh(), session_id=model.id, expected_len=state.num_tokens, prefill=prefill, **content
            ),
        )
        self.took(model, answer)

    def took(self, model: Model, answer: Any) -> None:
        if not isinstance(answer, str):
            for span in answer.messages:
                model.add(span)

    @rule(pick=PICK, body=st.sampled_from(sorted(BODIES)))
    def generate(self, pick: int, body: str) -> None:
        self.generated(pick, lambda side: {"force_token_ids": BODIES[body](side)})

    @rule(pick=PICK, text=DIGITS)
    def generate_raw(self, pick: int, text: str) -> None:
        self.generated(pick, lambda side: {"force_token_ids": side.encode(text)}, raw=True)

    def generated(self, pick: int, fields: Callable[[Side], dict[str, Any]], raw: bool = False) -> None:
        model = self.model(pick)

        def build(side: Side, state: pb.SessionState) -> pb.GenerateRequest:
            own = fields(side)
            return pb.GenerateRequest(
                request_id=fresh(), session_id=model.id, max_tokens=len(own["force_token_ids"]), raw=raw, **own
            )

        expected = "EMPTY_SESSION" if not model.visible else "UNANSWERED_TOOL_CALL" if model.unanswered else ""
        if not expected and raw and self.states[model.id]["real"].messages[-1].open:
            expected = "INVALID_ARGUMENT"  # a message that was cut short goes on without raw
        answer = self.both(model, build)
        assert (answer if isinstance(answer, str) else "") == expected
        if not expected:
            model.generated(answer[-1].done)

    # ------------------------------------------------------------ edits

    @rule(pick=PICK, which=PICK, text=st.none() | DIGITS, mode=MODES, prefill=st.booleans())
    def edit_content(self, pick: int, which: int, text: str | None, mode: Any, prefill: bool) -> None:
        model = self.model(pick)
        target = pb.MessageTarget(message_id=self.message_id(model, which))
        self.edited(
            model,
            lambda side, state: pb.Directive(message=target, text=text, mode=mode),
            [],
            prefill,
            content_of=target.message_id,
        )

    @rule(pick=PICK, which=PICK, start=st.integers(0, 3), length=st.integers(0, 3), text=st.none() | DIGITS)
    def edit_part_of_the_content(self, pick: int, which: int, start: int, length: int, text: str | None) -> None:
        model = self.model(pick)
        message_id = self.message_id(model, which)
        if bare_length(self.states[model.id]["real"], message_id) is not None:
            length = max(1, length)  # at the edge of a message without markers an insertion stands for itself
        target = pb.MessageTarget(message_id=message_id, content_start=start, content_end=start + length)
        self.edited(
            model, lambda side, state: pb.Directive(message=target, text=text), [], content_of=target.message_id
        )

    @rule(pick=PICK, which=PICK, count=st.integers(1, 3), text=st.none() | DIGITS, mode=MODES, sink=st.booleans())
    def edit_whole_messages(self, pick: int, which: int, count: int, text: str | None, mode: Any, sink: bool) -> None:
        model = self.model(pick)
        if not model.visible:
            return
        first = which % len(model.visible)
        ids = [entry.id for entry in model.visible[first : first + count]]

        def build(side: Side, state: pb.SessionState) -> pb.Directive:
            spans = [m for m in state.messages if m.message_id in ids]
            if spans[0].start == spans[-1].end:
                return pb.Directive(span=pb.Span(start=2**40, end=2**40))  # nothing left of it: out of range, on both
            span = pb.Span(start=spans[0].start, end=spans[-1].end)
            return pb.Directive(span=span, text=text, mode=mode, allow_sink=sink)

        self.edited(model, build, ids, replaced=text is not None)

    @rule(pick=PICK, which=PICK, text=DIGITS)
    def rerender(self, pick: int, which: int, text: str) -> None:
        model = self.model(pick)
        message_id = self.message_id(model, which)

        def build(side: Side, state: pb.SessionState) -> pb.Directive:
            old = next((m for m in state.messages if m.message_id == message_id), pb.MessageSpan())
            new = pb.Message(role=old.role, content=text, tool_calls=old.tool_calls)
            target = pb.MessageTarget(message_id=message_id, whole=True)
            return pb.Directive(message=target, rendered=new)

        self.edited(model, build, [])

    @rule(pick=PICK, which=PICK, text=DIGITS, repair=REPAIR)
    def edit_a_result(self, pick: int, which: int, text: str, repair: pb.Repair | None) -> None:
        model = self.model(pick)
        answered = [entry.answers for entry in model.visible if entry.role == "TOOL"] or ["nobody"]
        call_id = answered[which % len(answered)]
        self.edited(model, lambda side, state: pb.Directive(tool_call_id=call_id, text=text, repair=repair), [])

    @rule(pick=PICK, which=PICK)
    def forget_an_edit(self, pick: int, which: int) -> None:
        model = self.model(pick)
        known = [*model.edits] or ["e99"]
        edit_id = known[which % len(known)]
        self.edited(model, lambda side, state: pb.Directive(edit_id=edit_id, mode=pb.MODE_FORGET), [])

    def edited(
        self,
        model: Model,
        build: Build,
        whole: list[str],
        prefill: bool = False,
        replaced: bool = False,
        content_of: str = "",
    ) -> None:
        before = self.states[model.id]["real"]
        answer = self.both(
            model,
            lambda side, state: pb.ApplyDirectivesRequest(
                request_id=fresh(),
                session_id=model.id,
                directives=[build(side, state)],
                expected_version=state.version,
                prefill=prefill,
            ),
        )
        if isinstance(answer, str):
            return
        (receipt,) = answer.receipts
        model.edited([receipt.edit_id])
        if content_of and not receipt.inserted and receipt.removed == bare_length(before, content_of):
            whole = [content_of]  # a message without markers is its content
        if whole and replaced:
            model.stand_in(whole, receipt.edit_id)
        elif whole:
            model.hide(whole, receipt.edit_id)

    @rule(pick=PICK, which=PICK)
    def undo(self, pick: int, which: int) -> None:
        model = self.model(pick)
        known = [*model.edits] or ["e99"]
        edit_id = known[which % len(known)]
        undoable = {e.edit_id: e.undoable for e in self.states[model.id]["real"].edits}
        answer = self.both(
            model, lambda side, state: pb.UndoRequest(request_id=fresh(), session_id=model.id, edit_id=edit_id)
        )
        if isinstance(answer, str):
            known_reasons = {"UNPAIRED_TOOL_CALL"} if undoable.get(edit_id) else {"NOT_UNDOABLE", "UNKNOWN_EDIT"}
            assert answer in known_reasons
        else:
            assert undoable[edit_id]
            model.undone(edit_id)

    # ------------------------------------------------------------ retries and stale views

    @precondition(lambda self: self.last is not None and self.last[2] in {m.id for m in self.models})
    @rule()
    def retry(self) -> None:
        assert self.last is not None
        requests, outcome, session_id = self.last
        model = next(m for m in self.models if m.id == session_id)
        if isinstance(outcome, str):
            return  # a refusal is not remembered: it may act now
        again = self.both(model, lambda side, state: requests[side.name], remember=False)
        assert summary(again) == outcome

    @rule(pick=PICK, off=st.sampled_from([-1, 1, 5]))
    def stale(self, pick: int, off: int) -> None:
        model = self.model(pick)
        answer = self.both(
            model,
            lambda side, state: pb.GenerateRequest(
                request_id=fresh(), session_id=model.id, max_tokens=1, expected_version=state.version + off
            ),
        )
        assert answer == "STALE_VERSION"


def test_both_sides_do_the_same(sides: dict[str, Side]) -> None:
    quick = settings(max_examples=60, stateful_step_count=25, phases=[Phase.generate])  # shrinking takes minutes
    run_state_machine_as_test(lambda: Machine(sides), settings=quick)
