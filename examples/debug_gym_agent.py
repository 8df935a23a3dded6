"""The paper's benchmark, debug-gym's mini_nightmare, with any model that Leyline serves, in six arms; one table.

    pip install ".[debug-gym]"                # Python 3.12 or newer, and not beside leyline[server]: their pins differ
    leyline-server --model .. $(python -m examples.debug_gym_agent --server-flags)
    python -m examples.debug_gym_agent --target HOST:PORT --tenants

The tasks are downloaded by debug-gym; `--tasks DIR` takes folders in their layout: test.py, NAME_code.py, .debugignore,
.debugreadonly. With the local terminal, the default, what the model writes runs on this machine without a sandbox;
`--terminal docker` runs it in debug-gym's image. With `--tenants` no arm finds what another one computed.

A task counts as solved where more than half of its attempts (`--seeds`) solved it: attempts at one task are no
independent witnesses. Shares have Wilson's 95 % intervals, differences of arms Newcombe's paired ones with McNemar's
exact p, all over tasks. A difference whose interval includes zero is no difference.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from examples.debug_gym_tasks import TOOLS, Environment, Step, Tasks, mini_nightmare
from leyline_policies import StaleToolDetector, TruncateOlderThan
from leyline_sdk import Leyline, Mode, Policy, Reply, Session
from leyline_sdk.errors import ContextExceeded, PoolExceeded
from leyline_sdk.types import ToolLike
from leyline_server.lab.statistics import mcnemar, paired_difference, wilson  # plain Python

SYSTEM = (
    "You are a debugging agent. Your goal is to fix a Python program so that it passes hidden tests. Investigate the "
    "code with the tools before you change it, and change only what is wrong. Call one tool at a time; eval runs the "
    "tests. Once you are done, call submit."
)
NUDGE = "No tool was called. Call one, or submit to end the task."
FAILED = r"\A\s*(Edit failed|View failed|Invalid|Failure calling|Unregistered tool|Error|Traceback)"
TABLE_WIDTH = 140
KEEP_ALL, REPREFILL = "keep all", "truncate, re-prefill"
RIVALS = (KEEP_ALL, REPREFILL)
NO_DIFFERENCE = "no difference"
MIN_TOKENS = 50  # results shorter than this stay: a placeholder saves nothing


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to keep the history short. `again`: edited messages are sent to a new session and prefilled again."""

    name: str
    policies: tuple[Policy, ...] = ()
    again: bool = False

    @property
    def key(self) -> str:
        """Its API key, and its tenant."""
        return "-".join(self.name.lower().replace(",", "").replace("+", "").split())


def make_arms(older_than: int = 2) -> tuple[Arm, ...]:
    """Keep all comes first, then re-prefill: those after them are compared with them."""
    amortize = TruncateOlderThan(older_than=older_than, min_tokens=MIN_TOKENS)
    forget = TruncateOlderThan(older_than=older_than, min_tokens=MIN_TOKENS, mode=Mode.FORGET)
    # The same command in a debugger says something else each time.
    stale = StaleToolDetector(failed=FAILED, min_tokens=MIN_TOKENS, exclude_tools=("pdb",))
    return (
        Arm(KEEP_ALL),
        Arm(REPREFILL, (amortize,), again=True),
        Arm("truncate, AMORTIZE", (amortize,)),
        Arm("truncate, FORGET", (forget,)),
        Arm("stale, AMORTIZE", (stale,)),
        Arm("stale + truncate, AMORTIZE", (stale, amortize)),
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one attempt. `sampling` goes to the server as it is."""

    max_turns: int = 50
    max_tokens: int = 1024
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Chat:
    """The conversation of an arm. `ttft_ms`: of each reply, from before its messages were sent to its first token."""

    def __init__(self, client: Leyline, arm: Arm, tools: Sequence[ToolLike], task: str) -> None:
        self._client, self._arm, self._tools = client, arm, tools
        self._session = self._open([{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}])
        self.ttft_ms: list[float] = []

    def _open(self, messages: list[dict[str, Any]]) -> Session:
        return self._client.session(tools=self._tools, messages=messages, policies=self._arm.policies)

    def reply(self, messages: list[dict[str, Any]], limits: Limits) -> Reply:
        start = time.perf_counter()
        before = self._session
        if messages and self._arm.again:
            history = [{k: v for k, v in old.items() if k != "id"} for old in before.transcript.to_messages()]
            self._session = self._open([*history, *messages])  # nothing has KV: the policies' edits change text alone
        elif messages:
            before.append(messages)
        try:
            with self._session.generate(max_tokens=limits.max_tokens, **limits.sampling) as stream:
                next(stream, None)
                self.ttft_ms.append((time.perf_counter() - start) * 1e3)
                return stream.final()
        finally:
            if before is not self._session:
                before.close()

    def close(self) -> None:
        self._session.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attempt at a task. `computed`: tokens prefilled; `cut`: tokens that edits took away."""

    task: str
    solved: bool
    end: str
    turns: int
    computed: int
    cut: int
    ttft_ms: tuple[float, ...]


def attempt(name: str, env: Environment, arm: Arm, client: Leyline, limits: Limits) -> Outcome:
    """The agent loop, until the task is done, the model calls no tool twice in a row, or a limit is reached."""
    replies: list[Reply] = []
    messages: list[dict[str, Any]] = []
    step = Step("", False, 0.0)
    end, silent = "out of turns", False
    with closing(Chat(client, arm, env.tools, env.reset())) as chat:
        for _ in range(limits.max_turns):
            try:
                replies.append(chat.reply(messages, limits))
            except (ContextExceeded, PoolExceeded):
                end = "context full"
                break
            messages = []
            for call in replies[-1].tool_calls:
                step = env.step(call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": step.observation})
                if step.done:
                    break
            if step.done:
                end = "solved" if step.score >= 1 else "submitted"
                break
            if not messages:
                if silent:
                    end = "gave up"
                    break
                broken = [f"The call was malformed: {call.error}" for call in replies[-1].invalid_tool_calls]
                messages.append({"role": "user", "content": "\n".join(broken) or NUDGE})
            silent = messages[-1]["role"] == "user"
    computed = sum(reply.usage.computed for reply in replies)
    cut = sum(edit.removed - edit.inserted for reply in replies for edit in reply.applied_edits)
    return Outcome(name, end == "solved", end, len(replies), computed, cut, tuple(chat.ttft_ms))


def solved_tasks(outcomes: Sequence[Outcome]) -> dict[str, bool]:
    """By task, whether more than half of the attempts at it solved it."""
    attempts: dict[str, list[bool]] = {}
    for outcome in outcomes:
        attempts.setdefault(outcome.task, []).append(outcome.solved)
    return {task: 2 * sum(solved) > len(solved) for task, solved in attempts.items()}


def compared(ours: Mapping[str, bool], theirs: Mapping[str, bool]) -> str:
    """The paired difference in points with its interval, or that there is none, and McNemar's p."""
    if ours.keys() != theirs.keys():
        raise ValueError("arms that were not given the same tasks can't be compared")
    pair = list(ours.values()), [theirs[task] for task in ours]
    value, low, high = (100 * share for share in paired_difference(*pair))
    none = low <= 0 <= high
    return f"{NO_DIFFERENCE if none else f'{value:+.1f} ({low:.1f} to {high:.1f})'}\np = {mcnemar(*pair):.2g}"


def table(results: Mapping[str, Sequence[Outcome]]) -> Table:
    """One row an arm, compared with those rivals that stand before it. Turns are of an attempt."""
    out = Table(box=box.SIMPLE_HEAD, header_style="bold")
    out.add_column("arm", no_wrap=True)
    solved = {arm: solved_tasks(outcomes) for arm, outcomes in results.items()}
    columns = ("tasks solved\n95 %", *(f"points less\n{rival}" for rival in RIVALS))
    for column in (*columns, "turns", "tokens\ncomputed", "tokens\ncut", "first token,\nmedian"):
        out.add_column(column, justify="right", no_wrap=True)
    for place, (arm, outcomes) in enumerate(results.items()):
        right, total = sum(solved[arm].values()), len(solved[arm])
        low, high = (100 * bound for bound in wilson(right, total))
        before = list(results)[:place]
        versus = [compared(solved[arm], solved[rival]) if rival in before else "" for rival in RIVALS]
        turns = f"{sum(o.turns for o in outcomes) / max(1, len(outcomes)):.1f}"
        tokens = (f"{sum(o.computed for o in outcomes):,}", f"{sum(o.cut for o in outcomes):,}")
        ttft = [ms for outcome in outcomes for ms in outcome.ttft_ms]
        share = f"{right} of {total}\n{low:.1f} to {high:.1f}"
        out.add_row(arm, share, *versus, turns, *tokens, f"{median(ttft):,.0f} ms" if ttft else "")
    return out


def run(tasks: Tasks, arms: Sequence[tuple[Arm, Leyline]], limits: Limits, seeds: int = 1) -> dict[str, list[Outcome]]:
    """Every task in every arm, task by task, so that outcomes are paired. Seeds matter where something is sampled."""
    results: dict[str, list[Outcome]] = {arm.name: [] for arm, _ in arms}
    for name, open_ in tasks.items():
        for seed in range(seeds):
            for arm, client in arms:
                seeded = Limits(limits.max_turns, limits.max_tokens, {**limits.sampling, "seed": seed})
                with closing(open_()) as env:
                    outcome = attempt(name, env, arm, client, seeded)
                results[arm.name].append(outcome)
                print(f"{name}, {arm.name}: {outcome.end} after {outcome.turns} turns", flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="HOST:PORT of leyline-server")
    parser.add_argument("--tenants", action="store_true", help="each arm uses its own API key (--server-flags)")
    parser.add_argument(
        "--server-flags", action="store_true", help="print the keys as flags of leyline-server, and end"
    )
    parser.add_argument("--tasks", type=Path, help="a folder of tasks, in place of debug-gym's")
    parser.add_argument("--only", nargs="+", help="names of tasks")
    parser.add_argument("--tools", nargs="+", default=TOOLS, help="of debug-gym")
    parser.add_argument("--terminal", choices=("local", "docker"), default="local")
    parser.add_argument("--older-than", type=int, default=2, help="turns after which a result is truncated")
    parser.add_argument("--max-turns", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a reply")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="attempts at each task, with a temperature; a task is solved where more than half of them solved it",
    )
    parser.add_argument("--test-timeout", type=int, default=30, help="seconds that the tests of a task may take")
    parser.add_argument("--out", type=Path, help="every attempt, as JSON")
    args = parser.parse_args(argv)
    if args.seeds > 1 and args.temperature == 0:
        parser.error("--seeds: at temperature 0 every attempt at a task is the same; give a --temperature too")
    arms = make_arms(args.older_than)
    if args.server_flags:
        print(*(f"--api-keys {arm.key}={arm.key}" for arm in arms))
        return
    tasks = mini_nightmare(args.tasks, tools=args.tools, terminal=args.terminal, timeout_s=args.test_timeout)
    if unknown := set(args.only or ()) - set(tasks):
        parser.error(f"--only: no task {', '.join(sorted(unknown))}; there are {', '.join(tasks)}")
    tasks = {name: tasks[name] for name in args.only or tasks}
    limits = Limits(args.max_turns, args.max_tokens, {"temperature": args.temperature})
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Leyline(target=args.target, api_key=arm.key if args.tenants else None)) for arm in arms
        ]
        results = run(tasks, list(zip(arms, clients, strict=True)), limits, args.seeds)
    if args.out:
        args.out.write_text(
            json.dumps({arm: [asdict(o) for o in outcomes] for arm, outcomes in results.items()}) + "\n"
        )
    console = Console()
    Console(width=max(console.width, TABLE_WIDTH)).print(table(results))


if __name__ == "__main__":
    main()
