"""What the table of examples/debug_gym_agent.py calls a difference, and of what."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from examples import debug_gym_agent as agent

TASKS = Path(__file__).parent / "tasks"


def shown(results: Mapping[str, Sequence[agent.Outcome]]) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(agent.table(results))
    return console.export_text()


def outcome(solved: bool, task: str) -> agent.Outcome:
    return agent.Outcome(task, solved, "", 4, 100, 10, (1.0, 3.0))


def test_a_pair_that_differs_is_tested():
    def all_(solved: bool) -> list[agent.Outcome]:
        return [outcome(solved, f"t{i}") for i in range(6)]

    said = shown({agent.KEEP_ALL: all_(True), agent.REPREFILL: all_(True), "other": all_(False)})
    assert re.search(r"keep all +6 of 6 +4\.0 +600 +60 +2 ms *\n +61\.0 to 100\.0 *\n", said)
    assert re.search(r"re-prefill +6 of 6 +no difference +4\.0 +600 .*\n +61\.0 to 100\.0 +p = 1 *\n", said)
    difference = r"-100\.0 \(-100\.0 to -44\.8\)"
    assert re.search(rf"other +0 of 6 +{difference} +{difference} ", said)
    assert re.search(r"0\.0 to 39\.0 +p = 0\.031 +p = 0\.031 *\n", said)


def test_attempts_at_one_task_are_one_outcome():
    """Six tasks, five seeds each: thirty attempts that all say the same six things."""
    ours = [outcome(seed < 3, f"t{i}") for i in range(6) for seed in range(5)]
    theirs = [outcome(i < 3, f"t{i}") for i in range(6) for _ in range(5)]
    assert agent.solved_tasks(ours) == {f"t{i}": True for i in range(6)}
    assert agent.solved_tasks(ours[:-1])["t5"] is True
    assert agent.solved_tasks([outcome(True, "even"), outcome(False, "even")]) == {"even": False}
    said = shown({agent.KEEP_ALL: ours, "other": theirs})
    assert "6 of 6" in said
    assert "3 of 6" in said
    assert "p = 0.25" in said


def test_arms_of_different_tasks_are_not_compared():
    with pytest.raises(ValueError, match="the same tasks"):
        agent.table({agent.KEEP_ALL: [outcome(True, "a")], "other": [outcome(True, "b")]})


def test_seeds_without_a_temperature_are_refused(capsys):
    with pytest.raises(SystemExit):
        agent.main(["--tasks", str(TASKS), "--seeds", "2"])
    assert "at temperature 0 every attempt at a task is the same" in capsys.readouterr().err
    agent.main(["--server-flags", "--seeds", "2", "--temperature", "0.7"])
