"""The agent of examples/debug_gym_agent.py with a scripted model, in every arm: on folders with pytest, which need no
debug-gym, and on debug-gym's own environment where that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo.agent import READ_FILE, SYSTEM
from demo.server_process import ServerProcess
from examples import debug_gym_agent as agent
from examples.debug_gym_tasks import Step, Tasks, mini_nightmare
from leyline_sdk import Leyline, ToolCall
from leyline_sdk.testing import FakeServer, Say, call
from tests.examples.test_debug_gym_table import shown

TASKS = Path(__file__).parent / "tasks"
FIXES = {
    "cart": {"start": 5, "end": 7, "new_code": "    def __init__(self, prices, items=None):\n"
             "        self.prices = prices\n        self.items = {} if items is None else items"},
    "window": {"start": 5, "new_code": "    return [series[i : i + size] for i in range(len(series) - size + 1)]"},
}  # fmt: skip
ARMS = agent.make_arms()
TOOLS: dict[str, dict[str, Any]] = {
    "view": {"path": {"type": "string"}},
    "edit": {"path": {"type": "string"}, "start": {"type": "number"}, "end": {"type": "number"},
             "new_code": {"type": "string"}},
    "eval": {},
    "submit": {},
}  # fmt: skip


class Folder:
    """A task on a copy of its folder."""

    def __init__(self, source: Path, root: Path) -> None:
        self._files = {path.name: path.read_text() for path in source.glob("*.py")}
        self._name, self._root, self._score = source.name, root, 0.0
        self.closed = False

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [{"name": n, "parameters": {"type": "object", "properties": p}} for n, p in TOOLS.items()]

    def reset(self) -> str:
        return f"The program is in {self._name}_code.py."

    def step(self, call: ToolCall) -> Step:
        observation = getattr(self, f"_{call.name}")(**call.arguments)
        return Step(observation, self._score >= 1 or call.name == "submit", self._score)

    def close(self) -> None:
        self.closed = True

    def _view(self, path: str) -> str:
        return self._files.get(path, f"View failed. No {path}.")

    def _edit(self, path: str, start: int, new_code: str, end: int | None = None) -> str:
        lines = self._files[path].split("\n")
        lines[start - 1 : end or start] = new_code.split("\n")
        self._files[path] = "\n".join(lines)
        return f"The file `{path}` has been updated successfully."

    def _eval(self) -> str:
        output, self._score = run_tests(self._root, tuple(self._files.items()))
        return output

    def _submit(self) -> str:
        return self._eval()


@cache
def run_tests(root: Path, files: tuple[tuple[str, str], ...]) -> tuple[str, float]:
    """What pytest prints, and the share that passes."""
    folder = root / f"run{len(list(root.iterdir()))}"
    folder.mkdir()
    for name, text in files:
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--tb=no", "-p", "no:cacheprovider", "-c", "/dev/null", "test.py"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60)
    output = done.stdout
    passed, failed = (int(found[1]) if (found := re.search(rf"(\d+) {w}", output)) else 0 for w in ("passed", "failed"))
    return output, passed / (passed + failed)


def task_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The task's name, and how often the model has spoken."""
    (name,) = set(re.findall(r"(\w+)_code\.py", messages[1]["content"]))
    return name, sum(message["role"] == "assistant" for message in messages[:-1])  # the last is being said


def solver(messages: list[dict[str, Any]]) -> Any:
    """Looks, looks again, edits, and lets the tests run."""
    name, said = task_of(messages)
    path = f"{name}_code.py"
    look = call("view", path=path)
    return [look, call("eval"), look, call("view", path="test.py"), look, call("edit", path=path, **FIXES[name]),
            call("eval")][said]  # fmt: skip


def quitter(messages: list[dict[str, Any]]) -> Any:
    """Solves the cart; of the window it looks at the code and then says that it can't."""
    name, said = task_of(messages)
    if name == "cart":
        return solver(messages)
    return call("view", path="window_code.py") if not said else Say("I can't find it.")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def folders(root: Path) -> Tasks:
    return {path.name: (lambda path=path: Folder(path, root)) for path in sorted(TASKS.iterdir())}


def clients(model: Callable[[list[dict[str, Any]]], Any], **limits: int) -> list[tuple[agent.Arm, Leyline]]:
    """A server for each arm."""
    return [(arm, FakeServer([model] * 100, **limits).client()) for arm in ARMS]


def run(tasks: Tasks, model: Any, max_turns: int = 12, **limits: int) -> dict[str, list[agent.Outcome]]:
    return agent.run(tasks, clients(model, **limits), agent.Limits(max_turns=max_turns, max_tokens=300))


def test_solved_in_every_arm(root):
    results = run(folders(root), solver)
    assert list(results) == [arm.name for arm in ARMS]
    for outcomes in results.values():
        assert [(o.task, o.solved, o.end, o.turns) for o in outcomes] == [
            ("cart", True, "solved", 7),
            ("window", True, "solved", 7),
        ]
        assert all(len(outcome.ttft_ms) == outcome.turns for outcome in outcomes)


def test_arms_differ_in_what_they_cut_and_compute(root):
    results = run(folders(root), solver)
    cut = {arm: sum(outcome.cut for outcome in outcomes) for arm, outcomes in results.items()}
    computed = {arm: sum(outcome.computed for outcome in outcomes) for arm, outcomes in results.items()}
    keep, again, amortize, forget, stale, both = results
    assert cut[keep] == 0
    assert cut[again] == cut[amortize] == cut[forget] > 0
    assert 0 < cut[stale] < cut[both]
    assert computed[amortize] < computed[forget] < computed[again]  # the fake has no prefix cache


def test_the_one_that_gives_up_is_not_solved(root):
    results = run(folders(root), quitter)
    for outcomes in results.values():
        assert [(o.task, o.solved, o.end) for o in outcomes] == [("cart", True, "solved"), ("window", False, "gave up")]
        assert outcomes[1].turns == 3  # it was asked once more
    said = shown(results)
    for arm in ARMS:
        assert re.search(rf"{re.escape(arm.name)} +1 of 2 .*\n +9\.5 to 90\.5", said)
    # No arm differs from the first, nor from the second: those after them are compared with both.
    assert said.count("p = 1") == said.count(agent.NO_DIFFERENCE) == 2 * len(ARMS) - 3


def test_ends_without_a_solution(root):
    cart = {"cart": folders(root)["cart"]}
    submits = {o.end for outcomes in run(cart, lambda _: call("submit")).values() for o in outcomes}
    assert submits == {"submitted"}
    loops = [o for outcomes in run(cart, lambda _: call("eval"), max_turns=4).values() for o in outcomes]
    assert {(o.end, o.turns, o.solved) for o in loops} == {("out of turns", 4, False)}
    full = run(cart, lambda _: call("view", path="cart_code.py"), max_context=3_500)
    assert full["keep all"][0].end == "context full"
    assert full["truncate, AMORTIZE"][0].end == "out of turns"


def test_a_malformed_call_is_told_and_gone_over(root):
    from leyline_sdk.testing import Special

    broken = [Special.CALL, *b"view", Special.ARGS, *b"{no json", Special.END_CALL, Special.END]

    def model(messages):
        name, said = task_of(messages)
        if said == 0:
            return broken
        assert "malformed" in messages[3]["content"]
        return call("edit", path="cart_code.py", **FIXES[name]) if said == 1 else call("eval")

    results = run({"cart": folders(root)["cart"]}, model)
    assert {o.end for outcomes in results.values() for o in outcomes} == {"solved"}


def test_environments_are_closed(root):
    opened: list[Folder] = []

    def open_() -> Folder:
        opened.append(Folder(TASKS / "cart", root))
        return opened[-1]

    run({"cart": open_}, lambda _: call("submit"))
    assert len(opened) == len(ARMS)
    assert all(folder.closed for folder in opened)


def test_without_debug_gym_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "debug_gym", None)
    with pytest.raises(SystemExit, match=r"pip install .*\[debug-gym\]"):
        agent.main(["--tasks", str(TASKS)])


def test_a_tenant_for_each_arm(capsys):
    agent.main(["--server-flags"])
    flags = capsys.readouterr().out.split()
    assert flags[::2] == ["--api-keys"] * len(ARMS)
    assert len({flag.partition("=")[2] for flag in flags[1::2]}) == len(ARMS)


# ---------------------------------------------------------------- a real model


PAD = "".join(f"k{i} = v{i}\n" for i in range(20))
CHAIN = {"net.ini": "alt.ini", "alt.ini": "old.ini", "old.ini": "new.ini"}


class Files:
    """What the embedded model can do: it reads a file, and where that names another one, that too."""

    tools = (READ_FILE,)

    def reset(self) -> str:
        return "What is host in net.ini?"

    def step(self, call: ToolCall) -> Step:
        path = call.arguments["path"]
        text = f"{PAD}host = see {CHAIN[path]}\n" if path in CHAIN else "host = bravo\n"
        return Step(text, path not in CHAIN, float(path == "new.ini"))

    def close(self) -> None: ...


def test_a_real_model_in_every_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "SYSTEM", SYSTEM)
    arms = agent.make_arms(older_than=0)
    keys = [part for arm in arms for part in ("--api-keys", f"{arm.key}={arm.key}")]
    with ServerProcess(tmp_path / "server.log", ["--slots", "4096", "--threads", "1", *keys]) as server:
        tenants = [(arm, Leyline(target=server.address, api_key=arm.key)) for arm in arms]
        results = agent.run({"chain": Files}, tenants, agent.Limits(max_turns=8, max_tokens=64))
    outcomes = {arm: outcome for arm, (outcome,) in results.items()}
    assert {(o.end, o.turns) for o in outcomes.values()} == {("solved", 4)}
    keep, again, amortize, forget, stale, both = outcomes.values()
    assert (keep.cut, stale.cut) == (0, 0)
    assert again.cut == amortize.cut == forget.cut == both.cut > 0
    assert amortize.computed < again.computed == forget.computed


# ---------------------------------------------------------------- debug-gym itself


def test_debug_gym_solved_and_given_up():
    pytest.importorskip("debug_gym", reason="debug-gym is an extra")
    tools = ("view", "edit", "eval", "pdb", "submit")
    results = run(mini_nightmare(TASKS, tools=tools, terminal="local", timeout_s=30), quitter)
    for outcomes in results.values():
        assert [(o.task, o.solved, o.end) for o in outcomes] == [("cart", True, "solved"), ("window", False, "gave up")]
