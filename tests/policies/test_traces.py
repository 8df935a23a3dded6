"""Every policy on recorded conversations, replayed into the fake: pairs, protection, legal cuts, nothing twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from demo.traces import Conversation, read_trace, read_traces
from leyline_policies import (
    ClearThinking,
    Compose,
    Fraction,
    KeepLast,
    Redact,
    SlidingWindow,
    StaleToolDetector,
    ToolUses,
    TruncateOlderThan,
    from_anthropic,
)
from leyline_sdk import Edit, Policy
from leyline_sdk.planning import plan
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
TAU = TRACES / "tau-bench" / "gpt-4o-airline.json"
CLIP, MOST = 150, 36  # characters of a content (the fake's tokens are bytes), and messages: enough, and fast
DIGITS = r"\d{4,}"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")

POLICIES: dict[str, Callable[[], Policy]] = {
    "truncate": lambda: TruncateOlderThan(2, min_tokens=30),
    "truncate-preview-inputs": lambda: TruncateOlderThan(
        1, preview_tokens=40, preview="both", clear_tool_inputs=True, every=2
    ),
    "keep": lambda: KeepLast(3, placeholder=None, trigger=[ToolUses(6), Fraction(0.5)]),
    "stale": lambda: StaleToolDetector(failed=r"^<returncode>[1-9]|^[Ee]rror", clear_tool_inputs=True),
    "stale-by-tool": lambda: StaleToolDetector((), rule="superseded"),
    "thinking": lambda: ClearThinking(1),
    "window": lambda: SlidingWindow(1, 4, clear_at_least=200),
    "redact": lambda: Redact(DIGITS, protected="leave"),
    "anthropic": lambda: from_anthropic(
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1_000}}
    ),
    "all": lambda: Compose(
        [
            Redact(DIGITS, protected="leave"),
            StaleToolDetector(),
            TruncateOlderThan(3, clear_tool_inputs=True),
            ClearThinking(0),
            SlidingWindow(1, 8),
        ]
    ),
}


@cache
def conversations() -> list[Conversation]:
    """Some of each set; a reasoning is put into every other assistant message, since none of them has any."""
    tau = sorted(read_traces(TAU), key=lambda one: -len(one.messages))
    swe = [read_trace(path) for path in sorted(TRACES.glob("swe-agent/**/*.traj"))]
    mini = [read_trace(path) for path in sorted(TRACES.glob("lmcache-agent-trace/miniswe/*.jsonl"))]
    mini.sort(key=lambda one: len(one.messages))
    chosen = [tau[0], tau[60], swe[0], swe[1], swe[5], swe[10], mini[0], mini[-1]]
    return [_clipped(one) for one in chosen]


def _clipped(conversation: Conversation) -> Conversation:
    messages = []
    for number, message in enumerate(conversation.messages[:MOST]):
        message = {**message, "content": message["content"][:CLIP]}
        if message["role"] == "assistant" and number % 4 < 2:
            message["reasoning"] = "I wonder what this tells me."
        messages.append(message)
    return Conversation(conversation.name, tuple(messages), conversation.tools)


def _guarded(session: Session) -> list[tuple[str, str]]:
    users = session.transcript.of_role("user")
    kept = [*session.transcript.of_role("system"), *users[:1], *users[-1:]]
    return [(message.id, message.text) for message in kept]


@pytest.mark.parametrize("name", POLICIES)
def test_policy_on_recorded_conversations(name: str) -> None:
    edited = 0
    for conversation in conversations():
        fake = FakeServer(max_context=400_000, num_slots=400_000)
        session = fake.client().session("s", tools=conversation.tools)
        for step in conversation.turns():
            session.policies[:] = []
            session.append(step)
            guarded, open_calls = _guarded(session), [call.id for call in session.transcript.unanswered()]
            session.policies[:] = [POLICIES[name]()]
            if _plan(session):
                edited += len(session.prefill().applied_edits)  # raises where a cut is not legal or a pair would part
            assert not _plan(session), "a second run plans nothing"
            assert _guarded(session) == guarded
            assert [call.id for call in session.transcript.unanswered()] == open_calls
            _check_pairs(session)
        resumed = fake.client().session("s", policies=[POLICIES[name]()])
        assert not resumed.prefill().applied_edits
        assert resumed.transcript.messages == session.transcript.messages
    assert edited > 10


def _plan(session: Session) -> tuple[Edit, ...]:
    return plan(session.policies, session.transcript, 20_000, "prefill").edits


def _check_pairs(session: Session) -> None:
    waiting: set[str] = set()
    for message in session.transcript:
        if message.role == "tool":
            assert message.tool_call_id in waiting
            waiting.remove(message.tool_call_id)
        else:
            assert not waiting
            waiting = {call.id for call in message.tool_calls}


def test_redaction_on_recorded_conversations() -> None:
    for conversation in conversations():
        session = FakeServer(max_context=400_000, num_slots=400_000).client().session(policies=[Redact(DIGITS)])
        for step in conversation.turns():
            session.append(step)
        session.prefill()
        for sent, stands in zip(conversation.messages, session.transcript, strict=True):
            assert stands.text == re.sub(DIGITS, "[redacted]", sent["content"])
        assert not re.search(DIGITS, str([dict(c.arguments) for m in session.transcript for c in m.tool_calls]))


def test_every_recorded_conversation_can_be_read() -> None:
    paths = [*TRACES.glob("swe-agent/**/*.traj"), *TRACES.glob("lmcache-agent-trace/miniswe/*.jsonl"), TAU]
    every = [one for path in paths for one in read_traces(path)]
    assert len(every) == 15 + 14 + 200
    for conversation in every:
        waiting: list[str] = []
        for message in conversation.messages:
            if message["role"] == "tool":
                waiting.remove(message["tool_call_id"])
            else:
                assert not waiting
                waiting = [call["id"] for call in message.get("tool_calls", ())]
        assert [m for step in conversation.turns() for m in step] == list(conversation.messages)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for name, text in (("a.json", "[1]"), ("b.traj", "{}"), ("c.jsonl", "x"), ("d.jsonl", ""), ("e.json", "{")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ValueError, match="no recorded conversation"):
            read_trace(path)
    with pytest.raises(ValueError, match="none at 200"):
        read_trace(TAU, 200)
