"""How a recording is cut down, and how its calls find their results again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from demo.arms import ARMS
from demo.replay import Recording, Step, play, shortened
from leyline_sdk import FinishReason, Reply, ToolCall, Usage
from leyline_sdk.reports import CacheReport

CALL = {"id": "old", "type": "function", "function": {"name": "f", "arguments": '{"text": "%s", "n": 5}' % ("x" * 100)}}


def test_every_text_is_cut_by_the_same_share() -> None:
    message = shortened({"role": "assistant", "content": "y" * 200, "tool_calls": [CALL]}, 0.25)
    assert message["content"] == "y" * 50
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"text": "x" * 25, "n": 5}


def test_nothing_is_cut_from_what_fits() -> None:
    message = {"role": "user", "content": "y" * 200}
    assert shortened(message, 1.0) == message


class Recorder:
    """A conversation that calls a tool once and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.forced: list[tuple[int, ...]] = []

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        self.told += messages

    def reply(self, forced: Sequence[int] = ()) -> Reply:
        self.forced.append(tuple(forced))
        calls = (ToolCall("new", "f", {}),) if len(self.forced) == 1 else ()
        cache = CacheReport(0, 0, 0, 0, 0, None, "APPEND")
        return Reply("", "", calls, (), FinishReason.STOP, (), Usage(1, 1, 0, 1, 1.0, 1.0, 0.0), cache, "m1")


def test_results_follow_their_calls_to_new_ids() -> None:
    result = {"role": "tool", "tool_call_id": "old", "content": "out"}
    steps = (Step(({"role": "user", "content": "go"},), (1, 2), ("old",)), Step((result,), (3,), ()))
    heard = Recorder()
    assert play(Recording("r", "", (), steps, ""))(ARMS[0], heard, lambda what: None) == []
    assert heard.forced == [(1, 2), (3,)]
    assert heard.told[1] == {"role": "tool", "tool_call_id": "new", "content": "out"}
