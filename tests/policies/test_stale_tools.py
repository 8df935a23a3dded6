"""StaleToolDetector: its three rules, its key, and how it tells a failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from leyline_policies import StaleToolDetector
from leyline_policies.stale_tools import looks_failed
from leyline_sdk import errors
from leyline_sdk.session import Session
from leyline_sdk.testing import call
from leyline_sdk.transcript import Message

History = Callable[..., Session]
OLD, NEW, ERROR = "old view of the file " * 2, "new view of the file " * 2, "error: no such file, try another one"


def gone(session: Session, policy: StaleToolDetector) -> list[int]:
    session.policies[:] = [policy]
    session.prefill()
    assert not session.prefill().applied_edits
    assert not session.transcript.unanswered()
    return [n for n, m in enumerate(session.transcript.of_role("tool")) if m.text == "[cleared]"]


def test_repeated(history: History) -> None:
    rounds = [
        (call("read", path="a", n=1), OLD),
        (call("read", n=1, path="a"), OLD),  # the order of arguments does not matter
        (call("read", path="b", n=1), OLD),  # another call
        (call("read", path="a", n=1), NEW),  # another result
        (call("cat", path="a", n=1), OLD),  # another tool
        (call("read", path="b", n=1), OLD),
    ]
    assert gone(history(rounds), StaleToolDetector(rule="repeated")) == [0, 2]


def test_superseded_by_all_arguments_or_by_a_key(history: History) -> None:
    rounds = [
        (call("read", path="a", start=1), OLD),
        (call("read", path="a", start=9), OLD),
        (call("stat", path="a"), OLD),
        (call("read", path="a", start=1), NEW),
        (call("run"), OLD),
    ]
    assert gone(history(rounds), StaleToolDetector(rule="superseded")) == [0]
    assert gone(history(rounds), StaleToolDetector("path", rule="superseded")) == [0, 1]
    assert gone(history(rounds), StaleToolDetector(["path", "start"], rule="superseded")) == [0]
    assert gone(history(rounds), StaleToolDetector((), rule="superseded")) == [0, 1]
    by_path = StaleToolDetector(lambda call: call.arguments.get("path"), rule="superseded")
    assert gone(history(rounds), by_path) == [0, 1, 2]


def test_a_failure_supersedes_nothing(history: History) -> None:
    rounds = [(call("read", path="a"), OLD), (call("read", path="a"), ERROR)]
    assert gone(history(rounds), StaleToolDetector("path")) == []


def test_failed_then_succeeded(history: History) -> None:
    rounds = [
        (call("read", path="a"), ERROR),
        (call("read", path="b"), ERROR),
        (call("read", path="a"), ERROR),
        (call("read", path="a"), OLD),
        (call("read", path="a"), NEW),
    ]
    assert gone(history(rounds), StaleToolDetector(rule="failed_then_succeeded")) == [0, 2]
    assert gone(history(rounds), StaleToolDetector((), rule="failed_then_succeeded")) == [0, 1, 2]


def test_the_call_of_a_failure_can_be_blanked(history: History) -> None:
    rounds = [(call("write", path="a", text="t" * 50), ERROR), (call("write", path="a", text="t"), NEW)]
    session = history(rounds)
    assert gone(session, StaleToolDetector("path", clear_tool_inputs=True)) == [0]
    assert [dict(c.arguments) for m in session.transcript for c in m.tool_calls] == [{}, {"path": "a", "text": "t"}]


def test_rules_together_and_knobs(history: History) -> None:
    rounds = [
        (call("read", path="a"), ERROR),
        (call("read", path="a"), OLD),
        (call("read", path="a"), OLD),
        (call("read", path="a"), NEW),
    ]
    assert gone(history(rounds), StaleToolDetector()) == [0, 1, 2]
    assert gone(history(rounds), StaleToolDetector(rule=["repeated", "failed_then_succeeded"])) == [0, 1]
    assert gone(history(rounds), StaleToolDetector(keep_first=2)) == [2]
    assert gone(history(rounds), StaleToolDetector(exclude_tools="read")) == []
    assert gone(history(rounds), StaleToolDetector(min_tokens=40)) == [1, 2]


def test_the_only_view_left_stays(history: History) -> None:
    session = history([(call("read", path="a"), OLD), (call("read", path="a"), NEW)])
    newest = session.transcript.of_role("tool")[-1]
    assert gone(session, StaleToolDetector(rule="repeated", tags={newest.id: "remove"})) == [1]
    assert gone(session, StaleToolDetector("path")) == [1]  # the newer view is gone: the older one is all there is


def test_how_a_failure_is_recognised(history: History) -> None:
    rounds = [
        (call("sh", c=1), "<returncode>1</returncode>" + OLD),
        (call("sh", c=1), "<returncode>0</returncode>" + OLD),
    ]
    rule: Any = "failed_then_succeeded"
    assert gone(history(rounds), StaleToolDetector(rule=rule)) == []
    assert gone(history(rounds), StaleToolDetector(rule=rule, failed=r"<returncode>[1-9]")) == [0]
    assert gone(history(rounds), StaleToolDetector(rule=rule, failed=re.compile("code>1"))) == [0]
    assert gone(history(rounds), StaleToolDetector(rule=rule, failed=lambda m: ">1<" in m.text)) == [0]


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("error: x", True),
        ("  Error\nx", True),
        ("ERROR 404", True),
        ("Traceback (most recent call last):\n", True),
        ('{"error": "no"}', True),
        ('{"error": null, "a": 1}', False),
        ('{"a": 1}', False),
        ("{error}", False),
        ("errors.py", False),
        ("no error", False),
        ("", False),
        ("{" * 100_000, False),
    ],
)
def test_looks_failed(text: str, failed: bool) -> None:
    assert looks_failed(Message("m", "tool", text)) is failed


def test_bad_knobs_are_named() -> None:
    for knobs, named in (
        ({"rule": "older"}, "rule='older'"),
        ({"rule": []}, "rule names none"),
        ({"failed": "("}, r"failed='\('"),
    ):
        with pytest.raises(errors.ConfigError, match=named):
            StaleToolDetector(**knobs)
