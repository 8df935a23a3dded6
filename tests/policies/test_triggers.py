"""Triggers, alone, in lists and in AllOf, and what clearing does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_policies import AllOf, Fraction, KeepLast, Tokens, ToolUses, Trigger, Turns
from leyline_policies.triggers import fires
from leyline_sdk import PolicyContext, errors
from leyline_sdk.session import Session
from leyline_sdk.testing import call

History = Callable[..., Session]
YES, NO = Turns(0), Turns(99)


@pytest.fixture
def context(history: History) -> PolicyContext:
    rounds: list[Any] = [(call("read", n=n), "x" * 40) for n in range(3)]
    transcript = history(rounds).transcript
    return PolicyContext(transcript, transcript.num_tokens * 2)


def test_each_must_be_exceeded(context: PolicyContext) -> None:
    tokens = context.num_tokens
    for yes, no in (
        (Tokens(tokens - 1), Tokens(tokens)),
        (ToolUses(2), ToolUses(3)),
        (Turns(3), Turns(4)),
        (Fraction(0.49), Fraction(0.5)),
    ):
        assert yes.fires(context)
        assert not no.fires(context)


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [
        (None, True),
        ([], True),
        (YES, True),
        (NO, False),
        ([NO, YES], True),
        ([NO, NO], False),
        (AllOf(YES, YES), True),
        (AllOf(YES, NO), False),
        ([AllOf(YES, NO), AllOf(YES)], True),
    ],
)
def test_a_list_is_any_and_all_of_is_all(context: PolicyContext, trigger: Any, expected: bool) -> None:
    assert fires(trigger, context) is expected


def test_a_trigger_of_your_own(history: History) -> None:
    class Calls(Trigger):
        def fires(self, context: PolicyContext) -> bool:
            return context.call == "prefill"

    session = history([(call("read"), "x" * 40)], policies=[KeepLast(0, trigger=Calls())])
    session.complete()
    assert session.transcript.of_role("tool")[0].text == "x" * 40
    session.prefill()
    assert session.transcript.of_role("tool")[0].text == "[cleared]"


def test_tool_uses_counts_what_still_stands(history: History) -> None:
    rounds: list[Any] = [(call("read", n=n), "x" * 40) for n in range(8)]
    session = history(rounds, policies=[KeepLast(1, trigger=ToolUses(3))])
    edits = [len(m.edit_ids) for m in session.transcript.of_role("tool")]
    # Fires at 4, then not until 4 stand again: in batches of three, not every turn.
    assert edits == [1, 1, 1, 1, 1, 1, 0, 0]
    assert session.transcript.version == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokens(-1),
        lambda: Tokens(1.5),  # type: ignore[arg-type]
        lambda: ToolUses(True),
        lambda: Turns("3"),  # type: ignore[arg-type]
        lambda: Fraction(1.01),
        lambda: AllOf(),
        lambda: AllOf(3),  # type: ignore[arg-type]
    ],
)
def test_bad_triggers(make: Callable[[], Trigger]) -> None:
    with pytest.raises(errors.ConfigError):
        make()
