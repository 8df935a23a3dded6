"""A finished conversation to edit: rounds of one tool call each, or several, said by the fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from leyline_sdk import Policy
from leyline_sdk.session import Session
from leyline_sdk.testing import FakeServer, Say
from leyline_sdk.types import ToolCall

Round = tuple[ToolCall, str] | list[tuple[ToolCall, str]]
History = Callable[..., Session]


def run_rounds(
    rounds: Sequence[Round],
    *,
    policies: Sequence[Policy] = (),
    reasoning: str = "",
    texts: str = "",
    done: bool = True,
) -> Session:
    """A session after these rounds; with `done` the model has answered and the user asked again."""
    all_rounds = [one if isinstance(one, list) else [one] for one in rounds]
    replies: list[Any] = [Say(texts, reasoning, tuple(call for call, _ in one)) for one in all_rounds]
    fake = FakeServer([*replies, "the answer"])
    session = fake.client().session("s", system="the system prompt", policies=policies)
    session.append("the task")
    for one in all_rounds:
        calls = session.complete().tool_calls
        session.append_results({call.id: text for call, (_, text) in zip(calls, one, strict=True)})
    if done:
        session.complete()
        session.append("the last question")
    session.fake = fake  # type: ignore[attr-defined]
    return session


@pytest.fixture
def history() -> History:
    return run_rounds
