"""TruncateOlderThan and KeepLast with every knob, against the fake server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from leyline_policies import KeepLast, Tokens, TruncateOlderThan
from leyline_sdk import Mode, Policy, errors
from leyline_sdk.planning import plan
from leyline_sdk.session import Session
from leyline_sdk.testing import call
from leyline_sdk.types import EditResult

History = Callable[..., Session]
LONG = "x" * 40


def reads(count: int) -> list[Any]:
    return [(call("read", n=n), f"result {n} {LONG}") for n in range(count)]


def texts(session: Session) -> list[str]:
    return [message.text for message in session.transcript.of_role("tool")]


def run(session: Session, *policies: Policy) -> EditResult:
    """The policies' edits, made; then nothing is left to do, for these objects and in a new process."""
    session.policies[:] = policies
    result = session.prefill()
    assert not session.prefill().applied_edits
    resumed = session.fake.client().session("s", policies=policies)  # type: ignore[attr-defined]
    assert resumed.transcript == session.transcript
    assert not resumed.prefill().applied_edits
    return result


def cleared(session: Session) -> list[int]:
    return [n for n, text in enumerate(texts(session)) if text == "[cleared]"]


# ------------------------------------------------------------ the two rules


@pytest.mark.parametrize(("older_than", "gone"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2]), (2, [0, 1]), (4, [])])
def test_truncate_by_age(history: History, older_than: int, gone: list[int]) -> None:
    session = history(reads(4))
    assert [m.age for m in session.transcript.of_role("tool")] == [4, 3, 2, 1]
    run(session, TruncateOlderThan(older_than))
    assert cleared(session) == gone


def test_an_imported_history_ages_by_its_assistant_messages(history: History) -> None:
    session = history([])
    for n in range(3):
        function = {"name": "read", "arguments": "{}"}
        calls = [{"id": f"c{n}", "type": "function", "function": function}]
        session.append([{"role": "assistant", "content": "", "tool_calls": calls}])
        session.tool_result(f"c{n}", LONG)
    run(session, TruncateOlderThan(1))
    assert cleared(session) == [0]


@pytest.mark.parametrize(("keep", "gone"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2]), (3, [0]), (9, [])])
def test_keep_last(history: History, keep: int, gone: list[int]) -> None:
    session = history(reads(4))
    run(session, KeepLast(keep))
    assert cleared(session) == gone


def test_a_result_that_the_model_has_not_read_stays(history: History) -> None:
    session = history([[(call("read", n=n), LONG) for n in range(3)]], done=False)
    run(session, KeepLast(0), TruncateOlderThan(0, tags={"read": "remove"}))
    assert cleared(session) == []
    session.complete()
    session.prefill()
    assert cleared(session) == [0, 1, 2]


def test_runs_by_itself_each_turn_and_every_result_is_cleared_once(history: History) -> None:
    session = history(reads(6), policies=[TruncateOlderThan(2)])
    session.append("and?")
    assert cleared(session) == [0, 1, 2, 3]
    edited = [m.edit_ids for m in session.transcript.of_role("tool")]
    assert [len(ids) for ids in edited] == [1, 1, 1, 1, 0, 0]
    (edit,) = session.complete().applied_edits  # the fourth, made by the last append
    assert (edit.policy, edit.removed, edit.inserted) == ("TruncateOlderThan", 49, 9)


def test_protected_messages_stay(history: History) -> None:
    session = history(reads(3))
    before = [m for m in session.transcript if m.role in ("system", "user")]
    run(session, KeepLast(0))
    after = [m for m in session.transcript if m.role in ("system", "user")]
    assert [(m.id, m.text) for m in before] == [(m.id, m.text) for m in after]
    assert not session.transcript.unanswered()


# ------------------------------------------------------------ what comes in its place


def test_placeholder(history: History) -> None:
    session = history(reads(2))
    run(session, KeepLast(1, placeholder="(gone)"))
    assert texts(session)[0] == "(gone)"
    session = history(reads(2))
    run(session, KeepLast(1, placeholder=lambda message: f"[{message.tool_name}: {message.content_tokens} tokens]"))
    assert texts(session)[0] == "[read: 49 tokens]"
    for nothing in (None, ""):
        session = history(reads(2))
        run(session, KeepLast(1, placeholder=nothing))
        assert texts(session)[0] == ""


@pytest.mark.parametrize(
    ("preview", "left"),
    [("head", "01234567\n[cleared]"), ("tail", "[cleared]\ncdefghij"), ("both", "0123\n[cleared]\nghij")],
)
def test_preview(history: History, preview: Any, left: str) -> None:
    body = "0123456789" + LONG + "abcdefghij"
    session = history([(call("read"), body), *reads(1)])
    run(session, KeepLast(1, preview_tokens=8, preview=preview))
    assert texts(session)[0] == left
    session = history([(call("read"), body), *reads(1)])
    run(session, KeepLast(1, preview_tokens=8, preview=preview, placeholder=None))
    assert texts(session)[0] == left.replace("[cleared]\n", "").replace("\n[cleared]", "")


def test_a_preview_splits_no_character(history: History) -> None:
    session = history([(call("read"), "äöü€" * 20), *reads(1)])
    run(session, KeepLast(1, preview_tokens=20))
    assert re.fullmatch(r"[äöü€]{8}\n\[cleared\]", texts(session)[0])


def test_nothing_is_done_that_saves_nothing(history: History) -> None:
    session = history([(call("read"), "ok"), (call("read"), "123456789"), (call("read"), "1234567890"), *reads(1)])
    run(session, KeepLast(1))
    assert cleared(session) == [2]
    session = history([(call("read"), ""), (call("read"), LONG), *reads(1)])
    run(session, KeepLast(1, preview_tokens=40))
    assert texts(session)[:2] == ["", LONG]


def test_a_gentle_policy_then_a_hard_one(history: History) -> None:
    session = history(reads(4))
    run(session, TruncateOlderThan(1, preview_tokens=10), TruncateOlderThan(2, placeholder=None))
    assert [len(text) for text in texts(session)] == [0, 0, 20, 49]
    session.policies[:] = []
    session.complete()
    run(session, TruncateOlderThan(1, preview_tokens=10), TruncateOlderThan(2, placeholder=None))
    assert [len(text) for text in texts(session)] == [0, 0, 0, 20]


def test_mode(history: History) -> None:
    session = history(reads(2))
    (edit,) = run(session, KeepLast(1, mode=Mode.FORGET)).applied_edits
    assert edit.receipt.mode is Mode.FORGET
    assert not edit.receipt.influence_remains


# ------------------------------------------------------------ which results


def test_min_tokens(history: History) -> None:
    session = history([(call("read"), "y" * size) for size in (20, 30, 40, 50)])
    run(session, KeepLast(0, min_tokens=30))
    assert cleared(session) == [1, 2, 3]


def test_tool_filters(history: History) -> None:
    rounds = [(call(name), LONG) for name in ("read", "ls", "grep", "read")]
    for knobs, gone in (
        ({"only_tools": ["read"]}, [0, 3]),
        ({"only_tools": "read"}, [0, 3]),
        ({"exclude_tools": ("read", "ls")}, [2]),
        ({"only_tools": []}, []),
        ({"only_tools": {"read", "ls"}, "keep": 2}, [0, 1]),
    ):
        session = history(rounds)
        run(session, KeepLast(**{"keep": 0, **knobs}))  # type: ignore[arg-type]
        assert cleared(session) == gone


def test_tags(history: History) -> None:
    session = history(reads(4))
    first, second, _, last = session.transcript.of_role("tool")
    run(session, KeepLast(2, tags={first.id: "keep", last.tool_call_id: "remove"}))
    assert cleared(session) == [1, 3]
    session = history(reads(3))
    run(session, KeepLast(9, tags=lambda message: "remove" if "result 1" in message.text else None))
    assert cleared(session) == [1]
    session = history([(call("ls"), LONG), (call("read"), LONG)])
    run(session, KeepLast(0, tags={"ls": "keep"}))
    assert cleared(session) == [1]
    assert second.id != first.id


def test_keep_first(history: History) -> None:
    session = history(reads(4))
    run(session, KeepLast(1, keep_first=1))
    assert cleared(session) == [1, 2]


# ------------------------------------------------------------ when, and how much


def test_every(history: History) -> None:
    policy = KeepLast(0, every=3)
    session = history(reads(4), policies=[policy])
    assert cleared(session) == [0, 1]  # at turn 3, the third result was not read yet
    assert session.transcript.turn == 5
    session.complete()  # turn 6 now
    session.prefill()
    assert cleared(session) == [0, 1, 2, 3]


def test_clear_at_least(history: History) -> None:
    session = history(reads(3))
    assert not run(session, KeepLast(1, clear_at_least=81)).applied_edits
    assert len(run(session, KeepLast(1, clear_at_least=80)).applied_edits) == 2  # 2 x (49 - 9)


def test_clear_at_most(history: History) -> None:
    session = history(reads(4))
    limit = session.transcript.num_tokens - 41
    run(session, KeepLast(0, trigger=Tokens(limit), clear_at_most=40))
    assert cleared(session) == [0, 1]
    assert session.transcript.num_tokens <= limit
    session = history(reads(4))
    run(session, KeepLast(0, trigger=Tokens(session.transcript.num_tokens - 1), clear_at_most=100))
    assert cleared(session) == [0, 1, 2]
    session = history(reads(4))
    run(session, KeepLast(0, trigger=Tokens(10), clear_at_most=40))
    assert cleared(session) == [0, 1, 2, 3]


# ------------------------------------------------------------ arguments


def arguments(session: Session) -> list[Any]:
    return [dict(call.arguments) for message in session.transcript for call in message.tool_calls]


def test_clear_tool_inputs(history: History) -> None:
    rounds = [[(call("write", text="a" * 30), LONG), (call("read", path="p"), LONG)], (call("write", text="b"), LONG)]
    session = history(rounds, texts="let me", reasoning="hm")
    ids = [call.id for message in session.transcript for call in message.tool_calls]
    run(session, KeepLast(1, clear_tool_inputs=True))
    assert arguments(session) == [{}, {}, {"text": "b"}]
    assert [call.id for message in session.transcript for call in message.tool_calls] == ids
    first = session.transcript.of_role("assistant")[0]
    assert (first.text, first.reasoning) == ("let me", "hm")
    session = history(rounds)
    run(session, KeepLast(0, clear_tool_inputs="write"))
    assert arguments(session) == [{}, {"path": "p"}, {}]
    session = history(rounds)
    run(session, KeepLast(0))
    assert arguments(session)[0] == {"text": "a" * 30}


def test_long_arguments_with_a_short_result(history: History) -> None:
    rounds = [(call("write", text="t" * 90), "ok"), (call("write", text="t" * 20), "ok"), *reads(1)]
    session = history(rounds)
    (edit,) = run(session, KeepLast(1, clear_tool_inputs=True, min_tokens=60)).applied_edits
    assert arguments(session) == [{}, {"text": "t" * 20}, {"n": 0}]
    assert texts(session)[:2] == ["ok", "ok"]
    assert edit.message_ids == (session.transcript.of_role("assistant")[0].id,)
    run(session, KeepLast(1), KeepLast(1, clear_tool_inputs=True))  # a later policy may still blank
    assert arguments(session) == [{}, {}, {"n": 0}]


def test_arguments_of_a_result_that_was_cleared_before(history: History) -> None:
    session = history([(call("read", path="p" * 20), LONG), *reads(1)])
    run(session, KeepLast(1))
    run(session, KeepLast(1, clear_tool_inputs=True))
    assert arguments(session) == [{}, {"n": 0}]
    assert texts(session)[0] == "[cleared]"


def test_blanking_one_call_after_the_other(history: History) -> None:
    rounds = [[(call("a", x=1), LONG), (call("b", y=2), LONG)], *reads(1)]
    session = history(rounds)
    run(session, KeepLast(2, clear_tool_inputs=True))
    assert arguments(session) == [{}, {"y": 2}, {"n": 0}]
    run(session, KeepLast(1, clear_tool_inputs=True))
    assert arguments(session) == [{}, {}, {"n": 0}]


def test_invalid_calls_are_cleared_but_not_rendered_anew(history: History) -> None:
    from leyline_sdk.testing import FakeServer, Special

    ids = [Special.CALL, *b"read", Special.ARGS, *b"{oops", Special.END_CALL, Special.END]
    fake = FakeServer([ids, "done"])
    session = fake.client().session("s", system="sys")
    session.append("task")
    (bad,) = session.complete().invalid_tool_calls
    session.tool_result(bad.id, LONG)
    session.complete()
    session.append("next")
    session.fake = fake  # type: ignore[attr-defined]
    run(session, KeepLast(0, clear_tool_inputs=True))
    assert cleared(session) == [0]


# ------------------------------------------------------------ bad knobs, purity


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TruncateOlderThan(-1), "older_than=-1"),
        (lambda: TruncateOlderThan(True), "older_than=True"),
        (lambda: KeepLast(1.5), "keep=1.5"),  # type: ignore[arg-type]
        (lambda: KeepLast(min_tokens=-1), "min_tokens=-1"),
        (lambda: KeepLast(every=0), "every=0"),
        (lambda: KeepLast(preview="middle"), "preview='middle'"),  # type: ignore[arg-type]
        (lambda: KeepLast(preview_tokens=-2), "preview_tokens=-2"),
        (lambda: KeepLast(trigger=1000), "trigger=1000"),  # type: ignore[arg-type]
        (lambda: KeepLast(trigger=[Tokens(1), "x"]), "trigger="),  # type: ignore[list-item]
        (lambda: KeepLast(clear_at_most=10), "needs a trigger"),
        (lambda: KeepLast(clear_at_least=20, clear_at_most=10, trigger=Tokens(1)), "clear_at_most=10"),
        (lambda: KeepLast(only_tools=["a", "b"], exclude_tools=["b"]), r"\['b'\]"),
        (lambda: KeepLast(only_tools=3), "only_tools=3"),  # type: ignore[arg-type]
        (lambda: KeepLast(tags={"a": "drop"}), "tags='drop'"),  # type: ignore[dict-item]
        (lambda: KeepLast(mode="SOMETIMES"), "mode='SOMETIMES'"),  # type: ignore[arg-type]
    ],
)
def test_bad_knobs_are_named(make: Callable[[], Policy], named: str) -> None:
    with pytest.raises(errors.ConfigError, match=named):
        make()


def test_a_placeholder_that_is_no_text_stops_the_call(history: History) -> None:
    session = history(reads(2), policies=[])
    session.policies[:] = [KeepLast(0, placeholder=lambda message: 7)]  # type: ignore[arg-type,return-value]
    with pytest.raises(errors.PolicyError, match="placeholder gave 7"):
        session.complete()


def test_plan_is_pure(history: History) -> None:
    session = history(reads(4))
    policy = TruncateOlderThan(0, clear_tool_inputs=True)
    first = plan([policy], session.transcript, 1000, "generate")
    assert first == plan([policy], session.transcript, 1000, "generate")
    assert not plan([policy], first.after, 1000, "generate").edits
    assert json.dumps(session.transcript.to_messages())  # still as it was
    assert cleared(session) == []


def test_undo_is_respected(history: History) -> None:
    session = history(reads(3))
    first, *_ = run(session, KeepLast(1)).applied_edits
    session.undo(first.edit_id)
    assert not session.prefill().applied_edits
    assert texts(session)[0].startswith("result 0")
