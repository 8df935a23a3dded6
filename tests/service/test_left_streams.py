"""A stream that was left after a complete call: the session sees the call by itself, and goes on."""

from __future__ import annotations

from tests.service.running import RunningServer, special
from tests.service.talk import encode
from tests.service.test_tool_calls import READ, says


def test_the_call_is_seen_and_answered(small: RunningServer) -> None:
    with small.client().session(tools=[READ], messages=["what is in a?"]) as session:
        ids = [*says("", ("read", '{"path":"a"}'))[:-1], *encode(" and so on" * 20)]
        with session.generate(force_token_ids=ids, max_tokens=len(ids)) as stream:
            for delta in stream:
                if special("<|/call|>") in delta.token_ids:
                    break
        session.refresh()
        (call,) = session.unanswered
        assert dict(call.arguments) == {"path": "a"}
        session.tool_result(call, "seven")
        assert [m.role for m in session.transcript] == ["user", "assistant", "tool"]
        session.complete(max_tokens=2)
        session.close()
