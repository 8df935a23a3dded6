"""Each example, run as a user would run it, against a real server process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
APART = {"debug_gym_agent", "debug_gym_tasks"}  # an experiment, with a test of its own
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in APART)
MAX_LINES = 60
SAYS = {
    "agent_loop": ["What is port in net.ini? 8123", "TruncateOlderThan: "],
    "custom_policy": ["would: ShortLogs", "done:  ShortLogs", "done:  without_small_talk", "left to do: 0"],
    "edit": ["amortized: ", "influence remains: True", "tokens are back", "forgotten: ", "influence remains: False"],
    "quickstart": ["room for", "resumed "],
    "shared_documents": ["warmed: computed [36, 41, 34]", "111 by content", "  8123\n", "  high\n", "  12\n"],
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with ServerProcess(log, ["--slots", "4096", "--threads", "1"]) as server:
        yield server.address


def run(example: Path, *args: str, **env: str) -> str:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
    done = subprocess.run(
        [sys.executable, str(example), *args],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_are_known() -> None:
    assert {example.stem for example in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path, address: str) -> None:
    said = run(example, address)
    for expected in SAYS[example.stem]:
        assert expected in said


def test_target_from_the_environment(address: str) -> None:
    assert "resumed" in run(ROOT / "examples" / "quickstart.py", LEYLINE_TARGET=address)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < MAX_LINES
