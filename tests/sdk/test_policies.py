"""Policies: when they run, what they may not do, how their edits are joined, and that none fires twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from leyline_sdk import Edit, Mode, Policy, PolicyContext, clear, clear_reasoning, errors, remove, replace_content
from leyline_sdk.edits import cut_content, forget, remove_span, rerender
from leyline_sdk.planning import plan
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say, call


class ClearOld(Policy):
    def __init__(self, older_than: int = 0, placeholder: str = "[cleared]", mode: Mode = Mode.AMORTIZE) -> None:
        self.older_than, self.placeholder, self.mode = older_than, placeholder, mode

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return [
            clear(message, self.placeholder, mode=self.mode)
            for message in context.tool_results
            if message.age > self.older_than and not message.edited
        ]


class Planned(Policy):
    """Plans what it is told."""

    def __init__(self, *edits: Edit | object, name: str = "Planned") -> None:
        self.edits, self._name = edits, name

    @property
    def name(self) -> str:
        return self._name

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return self.edits  # type: ignore[return-value]  # some are wrong on purpose


def agent(policies: Sequence[Policy] = (), turns: int = 3, **settings: Any) -> Session:
    """A session with a task, `turns` tool rounds, and a last user message. The fake's calls are in `fake`."""
    replies: list[Any] = [Say("", "hm", (call("read", n=n),)) for n in range(turns)]
    fake = FakeServer([*replies, "done"], **settings)
    session = fake.client().session("s", system="sys", policies=policies)
    session.append("the task")
    for n in range(turns):
        (wanted,) = session.complete().tool_calls
        session.tool_result(wanted, f"result {n} " * 5)
    session.complete()
    session.append("what now?")
    session.fake = fake  # type: ignore[attr-defined]
    return session


def test_policies_run_by_themselves_and_are_reported_once() -> None:
    seen = []
    fake = FakeServer([call("read"), "seven", "more"])
    session = fake.client().session(policies=[ClearOld()], on_edit=seen.append)
    session.append("task")
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, "a long result")
    session.complete()
    appended = session.append("next")  # the result has aged one turn
    assert [edit.policy for edit in appended.applied_edits] == ["ClearOld"]
    assert [edit.receipt.label for edit in appended.applied_edits] == ["ClearOld"]
    reply = session.complete()
    assert reply.applied_edits == appended.applied_edits == tuple(seen)
    assert session.complete().applied_edits == ()
    assert fake.calls == ["GetServerInfo", "CreateSession", *["Append", "Generate"] * 3, "Generate"]  # none for edits


def test_a_fresh_policy_on_a_resumed_session_plans_nothing() -> None:
    session = agent([ClearOld()])
    assert [m.text for m in session.transcript.of_role("tool")] == ["[cleared]"] * 3
    with session.fake.client().session("s", policies=[ClearOld()]) as resumed:  # type: ignore[attr-defined]
        assert resumed.preview().applied_edits == ()
        before = resumed.info()
        resumed.append("more")
        assert resumed.info().version == before.version


def test_preview_changes_nothing() -> None:
    session = agent()
    session.policies.append(ClearOld())
    before = session.info(token_ids=True)
    preview = session.preview()
    assert len(preview.applied_edits) == 3
    assert all(edit.edit_id == "" for edit in preview.applied_edits)
    assert session.info(token_ids=True) == before
    assert session.prefill().applied_edits[0].edit_id == "e1.1"


def test_age_and_turn() -> None:
    session = agent(turns=2)
    contexts: list[PolicyContext] = []

    class Look(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            contexts.append(context)
            return ()

    session.policies.append(Look())
    session.complete()
    (context,) = contexts
    assert (context.turn, context.call, context.max_context) == (3, "generate", 100_000)
    assert [message.age for message in context.tool_results] == [2, 1]
    assert context.num_tokens == context.transcript.num_tokens
    assert 0 < context.fraction < 0.01
    assert {m.role for m in context.editable} == {"assistant", "tool"}
    assert context.estimate_tokens("ten bytes!") == 10


def test_a_policy_that_raises_stops_the_call_before_anything_is_sent() -> None:
    class Broken(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            raise ZeroDivisionError("oh")

    session = agent()
    session.policies.append(Broken())
    sent = len(session.fake.calls)  # type: ignore[attr-defined]
    for act in (session.complete, session.prefill, session.preview, lambda: session.append("x")):
        with pytest.raises(errors.PolicyError, match="Broken") as raised:
            act()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(session.fake.calls) == sent  # type: ignore[attr-defined]
    session.policies.clear()
    session.complete()


def _ids(session: Session) -> dict[str, list[str]]:
    return {role: [m.id for m in session.transcript.of_role(role)] for role in ("system", "user", "assistant", "tool")}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda ids, t: clear(ids["system"][0]), "a system message"),
        (lambda ids, t: remove(ids["user"][0]), "the task"),
        (lambda ids, t: replace_content(ids["user"][-1], "x"), "the last user message"),
        (lambda ids, t: remove_span(0, t.num_tokens), "a system message"),
        (lambda ids, t: remove(ids["tool"][0]), "removes the result of tool call"),
        (lambda ids, t: remove(ids["assistant"][0]), "without its result"),
        (lambda ids, t: clear("nobody"), "not in the session"),
        (lambda ids, t: "not an edit", "planned a str"),
    ],
)
def test_what_a_policy_may_not_do(make: Callable[[dict[str, list[str]], Any], Any], match: str) -> None:
    session = agent()
    session.policies.append(Planned(make(_ids(session), session.transcript)))
    sent = len(session.fake.calls)  # type: ignore[attr-defined]
    with pytest.raises(errors.PolicyError, match=match):
        session.complete()
    assert len(session.fake.calls) == sent  # type: ignore[attr-defined]


def test_a_pair_may_go_together() -> None:
    session = agent()
    ids = _ids(session)
    session.policies.append(Planned(remove(ids["assistant"][0]), remove(ids["tool"][0])))
    session.prefill()
    assert ids["tool"][0] not in _ids(session)["tool"]


def test_needless_edits_are_left_out() -> None:
    session = agent()
    tool = session.transcript.of_role("tool")[0]
    assistant = session.transcript.of_role("assistant")[0]
    same = [
        replace_content(tool, tool.text),
        rerender(assistant, assistant.to_dict()),
        clear_reasoning(session.transcript.of_role("assistant")[-1]),
        cut_content(tool, 500),
        remove_span(20, 20),
    ]
    assert plan([Planned(*same)], session.transcript, 1000, "generate").edits == ()


def test_later_policies_see_earlier_edits() -> None:
    session = agent()
    seen: list[list[str]] = []

    class Look(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            seen.append([m.text for m in context.tool_results])
            assert all(m.edited for m in context.tool_results)
            assert context.num_tokens < session.transcript.num_tokens
            return ()

    plan([ClearOld(), Look()], session.transcript, 1000, "generate")
    assert seen == [["[cleared]"] * 3]


def test_edits_of_one_message_are_joined() -> None:
    session = agent()
    tool = session.transcript.of_role("tool")[0]
    assistant = session.transcript.of_role("assistant")[0]

    def joined(*edits: Edit) -> tuple[Edit, ...]:
        policies = [Planned(edit, name=f"p{i}") for i, edit in enumerate(edits)]
        return plan(policies, session.transcript, 1000, "generate").edits

    (edit,) = joined(replace_content(tool, "secret", mode=Mode.FORGET), clear(tool, "[x]"))
    assert (edit.replacement, edit.mode, edit.label) == ("[x]", Mode.FORGET, "p0+p1")
    (edit,) = joined(cut_content(tool, 3), clear(tool))
    assert edit.replacement is None
    (edit,) = joined(clear_reasoning(assistant), rerender(assistant, {**assistant.to_dict(), "content": "new"}))
    assert edit.replacement["content"] == "new"  # type: ignore[index, call-overload]
    (edit,) = joined(rerender(assistant, {**assistant.to_dict(), "content": "new"}), clear_reasoning(assistant))
    assert edit.replacement["reasoning"] == ""  # type: ignore[index, call-overload]
    assert len(joined(clear_reasoning(assistant), replace_content(assistant, "text"))) == 2
    with pytest.raises(errors.PolicyError, match="in the same call"):
        joined(clear(tool, "long enough"), cut_content(tool, 3))
    with pytest.raises(errors.PolicyError, match="in the same call"):
        joined(remove_span(tool.start + 2, tool.end - 1), clear(tool))
    (edit,) = joined(remove_span(tool.start, tool.end, "R"))  # a result may become R and still answers its call
    assert edit.label == "p0"


def test_more_edits_than_a_call_may_have_go_in_several_with_pairs_together() -> None:
    session = agent(turns=9, max_directives=4)
    ids = _ids(session)
    edits = [remove(message_id) for message_id in [*ids["assistant"][:9], *ids["tool"]]]
    session.policies.append(Planned(*edits))
    session.append("on")
    assert [m.role for m in session.transcript] == ["system", "user", "assistant", "user", "user"]
    assert session.info().version == 5
    session.policies.clear()
    assert len(session.complete().applied_edits) == 18


def test_what_was_undone_by_hand_is_left_alone() -> None:
    session = agent([ClearOld()], turns=2)
    edit_id = session.transcript.of_role("tool")[0].edit_ids[0]
    session.undo(edit_id)
    assert session.transcript.of_role("tool")[0].text.startswith("result 0")
    session.complete()
    assert session.transcript.of_role("tool")[0].text.startswith("result 0")
    assert session.preview().applied_edits == ()


def test_a_refused_plan_changes_nothing_here_or_there() -> None:
    session = agent(max_replacement=10)
    session.policies.append(ClearOld(placeholder="far longer than allowed"))
    before, mirror = session.info(token_ids=True), session.transcript
    with pytest.raises(errors.TooLong):
        session.complete()
    assert session.info(token_ids=True) == before
    assert session.transcript == mirror


def test_a_hook_that_raises_leaves_the_mirror_whole() -> None:
    def hook(edit: object) -> None:
        raise KeyError("hook")

    session = agent()
    session.policies.append(ClearOld())
    session._core.on_edit = hook
    with pytest.raises(KeyError):
        session.append("x")
    mirror = session.transcript
    session.refresh()
    assert mirror == session.transcript
    session._core.on_edit = None
    session.complete()


def test_forget_by_edit_id_from_a_policy_is_a_directive() -> None:
    session = agent()
    edit_id = session.edit(clear(session.transcript.of_role("tool")[0])).applied_edits[0].edit_id
    done = plan([Planned(forget(edit_id), forget(edit_id))], session.transcript, 1000, "generate")
    assert done.edits == (replace(forget(edit_id), label="Planned"),)
