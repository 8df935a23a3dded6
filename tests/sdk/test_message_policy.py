"""MessagePolicy: functions from messages to messages, and what no edit can say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_sdk import MessagePolicy, Mode, errors
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say, call

Messages = list[dict[str, Any]]


def _session(function: Callable[[Messages], Messages], mode: Mode = Mode.AMORTIZE) -> Session:
    fake = FakeServer([Say("look", "why", (call("read", path="a" * 30),)), "fine"])
    session = fake.client().session(system="sys")
    session.append("task")
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, "a long result")
    session.complete()
    session.append("next")
    session.policies.append(MessagePolicy.of(function, mode=mode))
    return session


def _checked(session: Session) -> Messages:
    """The messages after the policy has run; a second run plans nothing; the mirror is right."""
    session.prefill()
    mirror = session.transcript
    session.refresh()
    assert mirror == session.transcript
    assert session.preview().applied_edits == ()
    return session.transcript.to_messages()


def clear_tools(messages: Messages) -> Messages:
    return [{**m, "content": "[cleared]"} if m["role"] == "tool" else m for m in messages]


def test_contents() -> None:
    session = _session(clear_tools, Mode.FORGET)
    done = session.preview().applied_edits
    assert [(edit.policy, edit.receipt.mode) for edit in done] == [("clear_tools", Mode.FORGET)]
    assert _checked(session)[3]["content"] == "[cleared]"


def test_ids_that_got_lost_are_found() -> None:
    def rebuilt(messages: Messages) -> Messages:
        return [{key: value for key, value in m.items() if key != "id"} for m in clear_tools(messages)]

    assert _checked(_session(rebuilt))[3]["content"] == "[cleared]"


def test_pairs_left_out() -> None:
    def drop(messages: Messages) -> Messages:
        return [m for m in messages if m["role"] not in ("tool",) and "tool_calls" not in m]

    assert [m["role"] for m in _checked(_session(drop))] == ["system", "user", "assistant", "user"]


def test_reasoning_and_arguments() -> None:
    def strip(messages: Messages) -> Messages:
        return [{k: v for k, v in m.items() if k != "reasoning"} for m in messages]

    assert "reasoning" not in _checked(_session(strip))[2]

    def blank(messages: Messages) -> Messages:
        for message in messages:
            for tool_call in message.get("tool_calls", ()):
                tool_call["function"]["arguments"] = "{}"
        return messages

    after = _checked(_session(blank))[2]
    assert after["tool_calls"][0]["function"]["arguments"] == "{}"
    assert after["reasoning"] == "why"


def test_no_change_is_no_edit() -> None:
    assert _session(lambda messages: messages).preview().applied_edits == ()


def _set(index: int, **changes: Any) -> Callable[[Messages], Messages]:
    def change(messages: Messages) -> Messages:
        messages[index] = {**messages[index], **changes}
        return messages

    return change


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda m: [*m[:2], m[3], m[2], *m[4:]], "reordered"),
        (lambda m: [*m, m[-1]], "reordered or repeated"),
        (lambda m: [*m[:2], {"role": "user", "content": "a summary"}, *m[2:]], "inserted"),
        (lambda m: [*m, {"role": "user", "content": "x", "id": "new"}], "'new' was inserted"),
        (_set(3, role="user"), "changed its role"),
        (_set(3, tool_call_id="other"), "answers another"),
        (_set(2, tool_calls=[]), "other tool calls"),
        (
            _set(2, tool_calls=[{"id": "call_4", "type": "function", "function": {"name": "rm", "arguments": "{}"}}]),
            "other tool calls",
        ),
        (
            _set(2, tool_calls=[{"id": "call_4", "type": "function", "function": {"name": "read", "arguments": "{"}}]),
            "not JSON",
        ),
        (_set(4, reasoning="new"), "never had"),
        (_set(3, cache_control="x"), "unknown key"),
        (_set(3, content=[{"type": "image_url"}]), "other than text"),
        (lambda m: ["hello"], "a str among"),
    ],
)
def test_what_cant_be_said(function: Callable[[Messages], Messages], match: str) -> None:
    session = _session(function)
    version = session.info().version
    with pytest.raises(errors.InexpressibleChange, match=match):
        session.append("x")
    assert session.info().version == version


def test_what_is_protected_stays_so() -> None:
    session = _session(_set(0, content="shorter"))
    with pytest.raises(errors.PolicyError, match="a system message"):
        session.complete()
