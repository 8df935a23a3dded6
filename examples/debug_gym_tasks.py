"""mini_nightmare's tasks, and debug-gym's environment behind the seam that the agent of debug_gym_agent.py needs.

Knows debug-gym 1.3's API, and no model. debug-gym is imported only when its tasks are asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from leyline_sdk import ToolCall
from leyline_sdk.types import ToolLike

TOOLS = ("view", "listdir", "grep", "edit", "eval", "pdb", "submit")
INSTALL = """debug-gym is not installed. It needs Python 3.12 or newer, and an environment without leyline[server]:
    python3.12 -m venv .venv-debug-gym
    .venv-debug-gym/bin/pip install ".[debug-gym]\""""


@dataclass(frozen=True, slots=True)
class Step:
    """What a call gave. `score`: the share of tests that pass; 1 is solved."""

    observation: str
    done: bool
    score: float


class Environment(Protocol):
    """A task: files, tools and tests."""

    @property
    def tools(self) -> Sequence[ToolLike]: ...

    def reset(self) -> str:
        """Begins anew. The task in words."""

    def step(self, call: ToolCall) -> Step: ...

    def close(self) -> None: ...


Tasks = Mapping[str, Callable[[], Environment]]


class DebugGym:
    """One of debug-gym's environments (1.3) as ours."""

    def __init__(self, env: Any) -> None:
        self._env = env

    @property
    def tools(self) -> list[ToolLike]:
        return [_tool(tool) for tool in self._env.tools]

    def reset(self) -> str:
        info = self._env.reset()
        text = f"{info.instructions}\nThe program is in {self._env.task_data['filename']}."
        return f"{text}\n\nWhat the tests say now:\n{info.eval_observation}" if info.eval_observation else text

    def step(self, call: ToolCall) -> Step:
        from debug_gym.gym.tools.tool import ToolCall as TheirCall

        done = call.name == "submit"  # debug-gym itself goes on after a submit that did not solve the task
        try:
            info = self._env.step(TheirCall(call.id, call.name, dict(call.arguments)))
        except ValueError:  # the tests ended without a count, for instance at the time limit
            return Step(str(self._env.step_observation), done, 0.0)
        score = 1.0 if info.resolved else min(info.score / (info.max_score or 1), 0.99)
        return Step(str(info.step_observation), done or info.terminated, score)

    def close(self) -> None:
        self._env.close()


def _tool(tool: Any) -> ToolLike:
    """A tool of debug-gym, OpenAI-style. What may be null need not be given."""
    required = [name for name, argument in tool.arguments.items() if "null" not in argument["type"]]
    parameters = {"type": "object", "properties": tool.arguments, "required": required}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def mini_nightmare(folder: Path | None, *, tools: Sequence[str], terminal: str, timeout_s: int) -> Tasks:
    """The tasks of debug-gym, or those in a folder. Raises SystemExit: debug-gym or its data can't be had."""
    try:
        from debug_gym.gym.envs.mini_nightmare import MiniNightmareEnv
        from debug_gym.gym.terminals import select_terminal
        from debug_gym.gym.tools.toolbox import Toolbox
        from debug_gym.logger import DebugGymLogger
    except ImportError as error:
        raise SystemExit(f"{INSTALL}\n({error})") from error
    logger = DebugGymLogger("leyline", level="ERROR")
    config: dict[str, Any] = {"type": terminal}
    if terminal == "local":  # its `python` is this one, which has pytest
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        config |= {"include_os_env_vars": False, "env_vars": {**os.environ, "PATH": path}}

    def opener(task: Mapping[str, Any]) -> Callable[[], Environment]:
        def open_() -> Environment:
            env = MiniNightmareEnv(
                task_data=dict(task), terminal=select_terminal(config, logger), run_timeout=timeout_s, logger=logger
            )
            for name in tools:
                env.add_tool(Toolbox.get_tool(name))
            return DebugGym(env)

        return open_

    if folder is not None:
        found = [path for path in sorted(folder.iterdir()) if (path / "test.py").is_file()]
        data = {p.name: {"task_name": p.name, "codebase": p, "filename": f"{p.name}_code.py"} for p in found}
    else:
        try:
            data = MiniNightmareEnv.load_dataset(build_image=terminal == "docker", logger=logger)
        except OSError as error:
            where = f"unpack {MiniNightmareEnv.DATA_URL} and give --tasks"
            raise SystemExit(
                f"mini_nightmare could not be had: {error}\nIf this machine is offline, {where}"
            ) from error
    return {name: opener(task) for name, task in data.items()}
