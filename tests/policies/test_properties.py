"""Any policy with any knobs on any history: pairs stay, protected messages stay, twice plans nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leyline_policies import (
    ClearThinking,
    Fraction,
    KeepLast,
    Redact,
    SlidingWindow,
    StaleToolDetector,
    Tokens,
    ToolUses,
    TruncateOlderThan,
    Turns,
)
from leyline_sdk import Mode, Policy
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say, call


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """So that most knobs of a policy are off, and it acts."""
    return st.sampled_from([usual] * (2 * len(others)) + list(others))


small = st.integers(0, 3)
names = st.sampled_from(["read", "write"])
batching = {
    "mode": mostly(Mode.AMORTIZE, Mode.FORGET),
    "trigger": mostly(None, Tokens(150), ToolUses(2), [Turns(2), Fraction(0.1)]),
    "every": mostly(1, 2, 3),
    "clear_at_least": mostly(0, 20, 100),
    "keep_first": mostly(0, 1, 2),
    "min_tokens": mostly(0, 15),
}
results = {
    **batching,
    "placeholder": st.sampled_from(["[cleared]", "-", None, lambda message: f"[{message.content_tokens}]"]),
    "preview_tokens": mostly(0, 5, 30),
    "preview": st.sampled_from(["head", "tail", "both"]),
    "only_tools": mostly(None, {"read"}, {"write"}, set()),
    "clear_tool_inputs": st.sampled_from([False, True, ["write"]]),
    "tags": mostly(None, {"read": "keep"}, {"read": "remove"}, {"write": "remove"}),
}
rules = st.lists(st.sampled_from(["repeated", "superseded", "failed_then_succeeded"]), min_size=1)
policy: st.SearchStrategy[Policy] = st.one_of(
    st.builds(TruncateOlderThan, small, **results),
    st.builds(KeepLast, small, **results),
    st.builds(StaleToolDetector, st.sampled_from([None, "n", ()]), rules, **results),
    st.builds(ClearThinking, small, **batching),
    st.builds(SlidingWindow, small, st.integers(1, 4), **{k: v for k, v in batching.items() if k != "keep_first"}),
    st.builds(Redact, st.sampled_from(["x+", "[0-9]+", "é"]), st.just("#"), st.sampled_from(["redact", "leave"])),
)
text = st.sampled_from(["", "Error: x", "x1é\n" * 3, "é" * 40, "1\n" * 30])
calls = st.builds(lambda name, n: call(name, n=n, text="x" * n * 9), names, st.integers(0, 2))
rounds = st.lists(st.tuples(st.lists(st.tuples(calls, text), max_size=3), text, text), min_size=3, max_size=7)


@settings(max_examples=60)
@given(st.lists(policy, min_size=1, max_size=3), rounds, st.booleans())
def test_any_policies_on_any_history(policies: list[Policy], history: list[Any], asks: bool) -> None:
    fake = FakeServer([Say(text, reasoning, tuple(c for c, _ in made)) for made, text, reasoning in history])
    session = fake.client().session("s", system="the system", policies=policies)
    session.append("the task")
    for made, _, _ in history:
        reply = session.complete()
        _check(session, [c.id for c in reply.tool_calls])
        if made:
            session.append_results({c.id: text for c, (_, text) in zip(reply.tool_calls, made, strict=True)})
        elif asks:
            session.append("and now, 1x?")
    session.prefill()
    assert not session.prefill().applied_edits
    resumed = fake.client().session("s", policies=policies)
    assert not resumed.prefill().applied_edits
    _check(session, [])


def _check(session: Session, unanswered: list[str]) -> None:
    assert [c.id for c in session.transcript.unanswered()] == unanswered
    waiting: list[str] = []
    for message in session.transcript:
        if message.role == "tool":
            waiting.remove(message.tool_call_id)
        else:
            assert not waiting
            waiting = [c.id for c in message.tool_calls]
    if not any(isinstance(one, Redact) for one in session.policies):
        users = [message.text for message in session.transcript.of_role("user")]
        assert session.transcript.of_role("system")[0].text == "the system"
        assert users[0] == "the task"
        assert users[-1] in ("the task", "and now, 1x?")
