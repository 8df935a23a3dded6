"""debug-gym's own environment behind the seam of examples/debug_gym_tasks.py, where debug-gym is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.debug_gym_tasks import DebugGym, Environment, mini_nightmare
from leyline_sdk import ToolCall

TASKS = Path(__file__).parent / "tasks"
FIXED = "    return [series[i : i + size] for i in range(len(series) - size + 1)]"


@pytest.fixture
def window() -> Iterator[Environment]:
    pytest.importorskip("debug_gym", reason="debug-gym is an extra")
    tools = ("view", "edit", "eval", "pdb", "submit")
    env = mini_nightmare(TASKS, tools=tools, terminal="local", timeout_s=10)["window"]()
    yield env
    env.close()


def test_debug_gym_behind_the_seam(window):
    assert isinstance(window, DebugGym)
    assert "window_code.py" in window.reset()
    tools = {tool["name"]: tool["parameters"] for tool in window.tools}
    assert tools["view"]["required"] == ["path"]
    assert json.loads(json.dumps(tools)) == tools
    assert "def means" in window.step(ToolCall("1", "view", {"path": "window_code.py"})).observation
    step = window.step(ToolCall("2", "eval", {}))
    assert (step.done, step.score) == (False, pytest.approx(1 / 3))
    assert "window_code" in window.step(ToolCall("3", "pdb", {"command": "b window_code.py:5"})).observation
    assert "not editable" in window.step(ToolCall("4", "edit", {"path": "test.py", "new_code": ""})).observation
    assert "Unregistered" in window.step(ToolCall("5", "rm", {})).observation
    loop = {"path": "window_code.py", "start": 5, "new_code": "    while True: pass"}
    window.step(ToolCall("6", "edit", loop))
    hung = window.step(ToolCall("7", "eval", {}))
    assert "timed out" in hung.observation
    assert (hung.done, hung.score) == (False, 0.0)
    window.step(ToolCall("8", "edit", {"path": "window_code.py", "start": 5, "new_code": FIXED}))
    solved = window.step(ToolCall("9", "eval", {}))
    assert (solved.done, solved.score) == (True, 1.0)


def test_debug_gym_ends_with_a_submit(window):
    window.reset()
    step = window.step(ToolCall("1", "submit", {}))
    assert step.done
    assert step.score < 1
