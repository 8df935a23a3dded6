"""A state machine over the SDK and the fake: whatever is done, the mirror is what the server has, a refused call
changed nothing, and the fake's own books agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from leyline_sdk import Edit, Message, Mode, Policy, PolicyContext, clear, errors, forget, remove, remove_span, rerender
from leyline_sdk.edits import InMessage, cut_content
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say, Special, call
from leyline_sdk.testing import rows as kv

TEXT = st.text(st.sampled_from("abc ü€"), max_size=8)
MODE = st.sampled_from(Mode)
PICK = st.integers(0, 1000)
SAYS = st.one_of(
    TEXT,
    st.builds(Say, TEXT, TEXT, st.sampled_from([(), (call("f"),), (call("f", x="ü"), call("g"))])),
    st.just([Special.CALL, 102, Special.ARGS, 123, Special.END_CALL, Special.END]),  # malformed
    st.just([97, Special.CALL, 102]),  # half a call
    st.just([Special.THINK, 97, Special.END]),  # a thought without an end
)


class ClearOld(Policy):
    def plan(self, context: PolicyContext) -> list[Edit]:
        return [clear(m, "[old]") for m in context.tool_results if m.age > 2 and not m.edited]


class Machine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.say: Any = "ok"
        self.fake = FakeServer([lambda messages: self.say] * 10_000, max_replacement=20, max_directives=4)
        self.client = self.fake.client()
        self.open: list[Session] = []

    @rule(target=sessions, policy=st.booleans())
    def create(self, policy: bool) -> Session:
        session = self.client.session(system="system", policies=[ClearOld()] if policy else [])
        self.open.append(session)
        return session

    @rule(target=sessions, session=sessions)
    def fork(self, session: Session) -> Any:
        if len(self.open) > 3:
            return multiple()
        self.open.append(session.fork())
        return self.open[-1]

    @rule(session=consumes(sessions))
    def close(self, session: Session) -> None:
        session.close()
        self.open.remove(session)

    def attempt(self, session: Session, act: Callable[[], object]) -> None:
        """What is refused changes nothing."""
        before = self.fake.sessions["", session.id].state
        refused = None
        try:
            act()
        except errors.APIError as error:
            refused = error
        if refused is not None:
            assert refused.reason
            assert self.fake.sessions["", session.id].state == before

    def picked(self, session: Session, pick: int) -> Message:
        assume(len(session.transcript))
        return session.transcript.messages[pick % len(session.transcript)]

    @rule(session=sessions, text=TEXT, prefill=st.booleans())
    def append(self, session: Session, text: str, prefill: bool) -> None:
        self.attempt(session, lambda: session.append([text, {"role": "user", "content": "u"}], prefill=prefill))

    @rule(session=sessions, text=TEXT)
    def append_text(self, session: Session, text: str) -> None:
        self.attempt(session, lambda: session.append_text(text))

    @rule(session=sessions, text=TEXT, calls=st.integers(1, 2), answered=st.booleans())
    def tool_round(self, session: Session, text: str, calls: int, answered: bool) -> None:
        self.say = Say(text, text, tuple(call("f", n=n) for n in range(calls)))
        self.attempt(session, lambda: session.complete())
        if answered:
            self.answer(session, text)

    @rule(session=sessions, text=TEXT)
    def answer(self, session: Session, text: str) -> None:
        waiting = session.transcript.unanswered()
        if not waiting:
            return
        self.attempt(session, lambda: session.append_results({c.id: text for c in reversed(waiting)}))

    @rule(session=sessions, say=SAYS, max_tokens=st.none() | st.integers(1, 6), raw=st.booleans())
    def generate(self, session: Session, say: Any, max_tokens: int | None, raw: bool) -> None:
        self.say = say

        def act() -> None:
            with session.generate(max_tokens=max_tokens, raw=raw, stop=["c"]) as stream:
                text = "".join(stream.text)
                assert raw or text in stream.final().text  # which may end in half a character
            if stream.final().stop_string:
                session.refresh()

        self.attempt(session, act)

    @rule(session=sessions, say=SAYS, events=st.integers(0, 4))
    def cancel(self, session: Session, say: Any, events: int) -> None:
        self.say = say

        def act() -> None:
            with session.generate() as stream:
                for _ in zip(range(events), stream, strict=False):
                    pass

        self.attempt(session, act)
        session.refresh()

    @rule(session=sessions, picks=st.lists(PICK, min_size=1, max_size=3), mode=MODE, text=TEXT | st.none())
    def edit_content(self, session: Session, picks: list[int], mode: Mode, text: str | None) -> None:
        ids = [self.picked(session, pick).id for pick in picks]
        edits = [Edit(InMessage(message_id), text, mode, allow_sink=True) for message_id in ids]
        self.attempt(session, lambda: session.edit(*edits))

    @rule(session=sessions, pick=PICK, start=st.integers(0, 6), length=st.integers(0, 6), mode=MODE)
    def cut(self, session: Session, pick: int, start: int, length: int, mode: Mode) -> None:
        message = self.picked(session, pick)
        self.attempt(session, lambda: session.edit(cut_content(message, start, start + length, "r", mode=mode)))
        session.refresh()

    @rule(session=sessions, first=PICK, second=PICK, mode=MODE, text=TEXT | st.none(), prefill=st.booleans())
    def span(self, session: Session, first: int, second: int, mode: Mode, text: str | None, prefill: bool) -> None:
        edges = [m.start for m in session.transcript] + [session.transcript.num_tokens]
        start, end = sorted((edges[first % len(edges)], edges[second % len(edges)]))
        self.attempt(session, lambda: session.edit(remove_span(start, end, text, mode=mode), prefill=prefill))

    @rule(session=sessions, pick=PICK, text=TEXT, mode=MODE)
    def render(self, session: Session, pick: int, text: str, mode: Mode) -> None:
        message = self.picked(session, pick)
        if message.role != "raw":
            new = {**message.to_dict(), "content": text}
            self.attempt(session, lambda: session.edit(rerender(message, new, mode=mode)))

    @rule(session=sessions, pick=PICK, mode=MODE)
    def remove_pair(self, session: Session, pick: int, mode: Mode) -> None:
        message = self.picked(session, pick)
        results = [session.transcript.result_of(c.id) for c in message.tool_calls]
        gone = [message, *(result for result in results if result is not None)]
        self.attempt(session, lambda: session.edit(*(remove(m, mode=mode) for m in gone)))

    @rule(session=sessions, pick=PICK)
    def undo(self, session: Session, pick: int) -> None:
        edits = [edit for edit in session.info().edits if edit.undoable or not pick % 5]
        if edits:
            self.attempt(session, lambda: session.undo(edits[pick % len(edits)].edit_id))

    @rule(session=sessions, pick=PICK)
    def forget_edit(self, session: Session, pick: int) -> None:
        edits = session.info().edits
        if edits:
            self.attempt(session, lambda: session.edit(forget(edits[pick % len(edits)].edit_id)))

    @rule(session=sessions)
    def preview(self, session: Session) -> None:
        before = self.fake.sessions["", session.id].state
        session.preview()
        assert self.fake.sessions["", session.id].state == before

    @rule(session=sessions)
    def prefill(self, session: Session) -> None:
        self.attempt(session, session.prefill)

    @invariant()
    def mirrors_are_right(self) -> None:
        for session in self.open:
            mirror = session.transcript
            session.refresh()
            assert mirror == session.transcript

    @invariant()
    def books_agree(self) -> None:
        for session in self.fake.sessions.values():
            rows, table = session.state.rows, session.state.conversation.table
            assert len(table) == len(rows)
            assert session.running is None or session.running.over
            for index, row in enumerate(rows):
                assert not row.exact or (row.slot and row.written_at == index)
            assert len(kv.slots(rows)) == len(rows) - kv.num_pending(rows)

    def teardown(self) -> None:
        for session in self.open:
            session.close()
        assert self.client.server_info().pool.in_use == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
