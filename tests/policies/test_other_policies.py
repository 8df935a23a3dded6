"""ClearThinking, SlidingWindow, Redact, Compose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from leyline_policies import (
    ClearThinking,
    Compose,
    KeepLast,
    Redact,
    SlidingWindow,
    StaleToolDetector,
    Tokens,
    TruncateOlderThan,
)
from leyline_sdk import Edit, Mode, Policy, PolicyContext, clear, errors
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say, call
from leyline_sdk.types import EditResult

History = Callable[..., Session]
LONG = "x" * 40
KEY = "sk-12345678"


def reads(count: int) -> list[Any]:
    return [(call("read", n=n), f"result {n} {LONG}") for n in range(count)]


def run(session: Session, *policies: Policy) -> EditResult:
    session.policies[:] = policies
    result = session.prefill()
    assert not session.prefill().applied_edits
    assert not session.transcript.unanswered()
    return result


def roles(session: Session) -> str:
    return "".join(message.role[0] for message in session.transcript)


# ------------------------------------------------------------ thinking


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (2, 2), (9, 3)])
def test_clear_thinking(history: History, keep: int, left: int) -> None:
    session = history(reads(3), reasoning="let me think", texts="reading")
    run(session, ClearThinking(keep))
    thinking = [m.reasoning for m in session.transcript.of_role("assistant")]
    assert thinking == [""] * (3 - left) + ["let me think"] * left + [""]
    assert [m.text for m in session.transcript.of_role("assistant")][:3] == ["reading"] * 3


def test_clear_thinking_has_the_common_knobs(history: History) -> None:
    session = history(reads(3), reasoning="let me think")
    assert not run(session, ClearThinking(0, min_tokens=13)).applied_edits
    assert not run(session, ClearThinking(0, clear_at_least=37)).applied_edits
    assert not run(session, ClearThinking(0, trigger=Tokens(10_000))).applied_edits
    assert len(run(session, ClearThinking(0, keep_first=1)).applied_edits) == 2


# ------------------------------------------------------------ window


def test_sliding_window_removes_whole_exchanges(history: History) -> None:
    session = history(reads(5))
    assert roles(session) == "su" + "at" * 5 + "au"
    run(session, SlidingWindow(1, 2))
    assert roles(session) == "su" + "at" * 2 + "au"
    assert [m.text[:8] for m in session.transcript.of_role("tool")] == ["result 0", "result 4"]


def test_sliding_window_takes_all_calls_of_a_turn(history: History) -> None:
    session = history([reads(3), *reads(2)])
    run(session, SlidingWindow(0, 2))
    assert roles(session) == "su" + "at" + "au"


def test_sliding_window_keeps_the_last_user_message_of_a_long_run(history: History) -> None:
    session = history(reads(1), texts="hm")
    for n in range(3):
        session.fake.script._left.append(Say(tool_calls=(call("read", n=n),)))  # type: ignore[attr-defined]
        (wanted,) = session.complete().tool_calls
        session.tool_result(wanted, LONG)
    run(session, SlidingWindow(0, 1))
    assert roles(session) == "su" + "u" + "at"
    assert [m.text for m in session.transcript.of_role("user")] == ["the task", "the last question"]


def test_sliding_window_in_batches(history: History) -> None:
    policy = SlidingWindow(0, 2, clear_at_least=150)
    session = history(reads(3), policies=[policy])
    assert roles(session) == "su" + "at" * 3 + "au"
    session = history(reads(6), policies=[policy])
    assert len(session.transcript.of_role("tool")) < 6


def test_sliding_window_leaves_what_an_undo_brought_back(history: History) -> None:
    session = history(reads(4))
    edit = run(session, KeepLast(3)).applied_edits[0]
    session.undo(edit.edit_id)
    run(session, SlidingWindow(0, 1))
    assert roles(session) == "su" + "at" + "au"
    assert session.transcript.of_role("tool")[0].text.startswith("result 0")


def test_sliding_window_needs_a_window() -> None:
    with pytest.raises(errors.ConfigError, match="window=0"):
        SlidingWindow(0, 0)


# ------------------------------------------------------------ redact


def everything(session: Session) -> str:
    return json.dumps(session.transcript.to_messages())


def test_redact_reaches_every_part(history: History) -> None:
    rounds = [(call("login", key=KEY, deep={"list": [f"a {KEY}", 7, True, None]}), f"ok {KEY} ok"), *reads(1)]
    session = history(rounds, reasoning=f"use {KEY}", texts=f"calling with {KEY}")
    session.append(f"it is {KEY}, and only that")
    calls = [c.id for m in session.transcript for c in m.tool_calls]
    result = run(session, Redact(r"sk-\d+"))
    assert KEY not in everything(session)
    assert all(edit.receipt.mode is Mode.FORGET for edit in result.applied_edits)
    assert not any(edit.receipt.influence_remains for edit in result.applied_edits)
    assert session.transcript.of_role("user")[-1].text == "it is [redacted], and only that"
    assert [c.id for m in session.transcript for c in m.tool_calls] == calls
    first = session.transcript.of_role("assistant")[0]
    assert first.reasoning == "use [redacted]"
    assert first.tool_calls[0].arguments["deep"] == {"list": ["a [redacted]", 7, True, None]}
    resumed = session.fake.client().session("s", policies=[Redact(r"sk-\d+")])  # type: ignore[attr-defined]
    assert not resumed.prefill().applied_edits


def test_redact_cuts_before_anything_is_computed(history: History) -> None:
    session = history([], policies=[Redact(r"sk-\d+")])
    session.append(f"my key is {KEY}")
    computed = session.complete().usage
    assert KEY not in everything(session)
    assert computed.context + computed.generated == session.transcript.num_tokens


def test_redact_and_protected_messages(history: History) -> None:
    session = history([(call("read"), f"{KEY} {LONG}"), *reads(1)])
    session.append(f"my key is {KEY}")
    last = session.transcript.of_role("user")[-1]
    with pytest.raises(errors.PolicyError, match=f"{last.id}.*the last user message") as error:
        run(session, Redact(r"sk-\d+", protected="raise"))
    assert error.value.message_id == last.id
    run(session, Redact(r"sk-\d+", protected="leave"))
    assert session.transcript.of_role("tool")[0].text == f"[redacted] {LONG}"
    assert session.transcript.of_role("user")[-1].text == f"my key is {KEY}"
    run(session, Redact(r"sk-\d+"))
    assert KEY not in everything(session)


def test_redact_in_the_system_prompt_and_the_task() -> None:
    session = FakeServer().client().session("s", system=f"use {KEY}", messages=[f"try {KEY}"])
    run(session, Redact([re.compile(r"sk-\d+"), "try"], "***"))
    assert [m.text for m in session.transcript] == ["use ***", "*** ***"]


def test_redact_knobs(history: History) -> None:
    rounds = [(call("pay", card=4111111111111111), "card 4111111111111111 charged"), *reads(1)]
    session = history(rounds)
    run(session, Redact(r"\b(\d{4})\d{12}\b", r"\1..", roles="tool", mode=Mode.AMORTIZE))
    assert session.transcript.of_role("tool")[0].text == "card 4111.. charged"
    assert "4111111111111111" in everything(session)
    run(session, Redact(r"\b(\d{4})\d{12}\b", r"\1.."))
    assert "4111111111111111" not in everything(session)


def test_redact_reaches_what_an_undo_brought_back(history: History) -> None:
    session = history([(call("read"), f"{KEY} {LONG}"), *reads(1)])
    edit = run(session, KeepLast(1)).applied_edits[0]
    session.undo(edit.edit_id)
    run(session, Redact(r"sk-\d+"))
    assert KEY not in everything(session)


def test_redact_must_come_to_rest(history: History) -> None:
    session = history(reads(1), policies=[])
    session.policies[:] = [Redact("result", "a result")]
    with pytest.raises(errors.PolicyError, match="come to rest"):
        session.complete()


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": [7]}, "no regular expression"),
        ({"pattern": []}, "needs a pattern"),
        ({"pattern": "a", "protected": "maybe"}, "protected='maybe'"),
        ({"pattern": "a", "mode": "x"}, "mode='x'"),
    ],
)
def test_redact_names_bad_knobs(knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.ConfigError, match=named):
        Redact(**knobs)


def test_a_redacted_result_is_still_cleared_with_age(history: History) -> None:
    session = history([(call("read"), f"{KEY} {LONG}"), *reads(2)], policies=[Redact("sk-[0-9]+"), KeepLast(1)])
    assert [m.text for m in session.transcript.of_role("tool")][:2] == ["[cleared]", "[cleared]"]


# ------------------------------------------------------------ compose


class Recorder(Policy):
    """Sees what earlier policies left."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        self.seen.append([message.text for message in context.tool_results])
        return []


def test_compose_runs_in_order_and_later_ones_see_earlier_edits(history: History) -> None:
    session = history(reads(3))
    recorder = Recorder()
    run(session, Compose([KeepLast(1, placeholder="[first]"), recorder, KeepLast(0, placeholder="[second one]")]))
    assert recorder.seen[0][:2] == ["[first]", "[first]"]
    assert [m.text for m in session.transcript.of_role("tool")] == ["[first]", "[first]", "[second one]"]


def test_compose_is_the_same_as_a_list_of_policies(history: History) -> None:
    policies = [
        Redact("result"),
        StaleToolDetector("n"),
        TruncateOlderThan(1, preview_tokens=5, clear_tool_inputs=True),
        ClearThinking(0),
        SlidingWindow(1, 3),
    ]
    rounds = [*reads(2), *reads(2), *reads(2)]
    composed = history(rounds, policies=[Compose(policies[:2]), Compose([Compose(policies[2:])])], reasoning="hm")
    listed = history(rounds, policies=policies, reasoning="hm")
    composed.prefill()
    listed.prefill()
    assert [m.to_dict() for m in composed.transcript] == [m.to_dict() for m in listed.transcript]
    assert listed.transcript.num_tokens == composed.transcript.num_tokens


def test_compose_labels_and_joins(history: History) -> None:
    session = history(reads(2), reasoning="hm")
    both = Compose([KeepLast(1, clear_tool_inputs=True), ClearThinking(0)], name="mine")
    result = run(session, both)
    assert {edit.policy for edit in result.applied_edits} == {"mine"}
    assert {edit.receipt.label for edit in result.applied_edits} == {
        "KeepLast",
        "KeepLast+ClearThinking",
        "ClearThinking",
    }


def test_compose_holds_each_policy_to_its_own_bounds(history: History) -> None:
    class Rude(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            return [clear(context.transcript.of_role("user")[-1])]

    session = history(reads(1), policies=[])
    session.policies[:] = [Compose([Redact("question"), Rude()])]
    with pytest.raises(errors.PolicyError, match="Rude may not edit"):
        session.complete()
    session.policies[:] = [Compose([Redact("question")])]
    session.complete()
    assert session.transcript.of_role("user")[-1].text == "the last [redacted]"
    with pytest.raises(errors.ConfigError, match="not a str"):
        Compose(["KeepLast"])  # type: ignore[list-item]


def test_your_own_policy_is_ten_lines(history: History) -> None:
    class DropOldListings(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            return [
                clear(message, "[listing]")
                for message in context.tool_results
                if message.tool_name == "list_files" and message.age > 1 and not message.edited
            ]

    session = history([(call("list_files"), LONG), *reads(2)])
    run(session, DropOldListings())
    assert session.transcript.of_role("tool")[0].text == "[listing]"
