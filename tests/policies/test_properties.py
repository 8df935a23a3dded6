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

small = st.integers(0, 4)
names = st.sampled_from(["read", "write"])
batching = {
    "mode": st.sampled_from(list(Mode)),
    "trigger": st.none() | st.sampled_from([Tokens(150), ToolUses(2), [Turns(2), Fraction(0.1)]]),
    "every": st.integers(1, 3),
    "clear_at_least": st.sampled_from([0, 0, 20, 100]),
    "keep_first": st.integers(0, 2),
    "min_tokens": st.sampled_from([0, 0, 15]),
}
results = {
    **batching,
    "placeholder": st.sampled_from(["[cleared]", "-", None, lambda message: f"[{message.content_tokens}]"]),
    "preview_tokens": st.sampled_from([0, 0, 5, 30]),
    "preview": st.sampled_from(["head", "tail", "both"]),
    "only_tools": st.none() | st.sets(names),
    "clear_tool_inputs": st.booleans() | st.lists(names, max_size=1),
    "tags": st.none() | st.dictionaries(names, st.sampled_from(["keep", "remove"]), max_size=1),
}
rules = st.lists(st.sampled_from(["repeated", "superseded", "failed_then_succeeded"]), min_size=1)
policy: st.SearchStrategy[Policy] = st.one_of(
    st.builds(TruncateOlderThan, small, **results),  # type: ignore[arg-type]
    st.builds(KeepLast, small, **results),
    st.builds(StaleToolDetector, st.sampled_from([None, "n", ()]), rules, **results),
    st.builds(ClearThinking, small, **batching),
    st.builds(SlidingWindow, small, st.integers(1, 4), **{k: v for k, v in batching.items() if k != "keep_first"}),
    st.builds(Redact, st.sampled_from(["x+", "[0-9]+", "é"]), st.just("#"), st.sampled_from(["redact", "leave"])),
)
content = st.text("x1é\n", max_size=4).flatmap(lambda text: st.integers(0, 12).map(lambda n: text * n)) | st.just(
    "Error: x"
)
calls = st.builds(lambda name, n: call(name, n=n, text="x" * n * 9), names, st.integers(0, 2))
rounds = st.lists(st.tuples(st.lists(st.tuples(calls, content), max_size=3), content, content), max_size=7)


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
    for _ in range(len(policies)):  # what one policy leaves may be for another: it comes to rest
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
