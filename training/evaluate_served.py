"""Measures the model through the server: `python -m training.evaluate_served [--sessions 60] [--tasks 1 2 .. 8]`.

Starts a server in this process, runs the agent loop over gRPC with the SDK, on names and values that training never
saw, and prints the share of right answers a number of tasks and a kind, with Wilson intervals. `--older-than N` edits:
tool results older than N turns become `[cleared]`, by AMORTIZE or, with `--mode forget`, by FORGET.
"""

from __future__ import annotations

import asyncio
import json
import threading
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import track

from leyline_policies import TruncateOlderThan
from leyline_sdk import Leyline, Mode, Policy
from leyline_sdk import Session as LiveSession
from leyline_server.config import ServerConfig
from leyline_server.lab.statistics import wilson
from leyline_server.server import Server, build
from training.render import READ_FILE, SYSTEM_PROMPT
from training.tasks import KINDS, Session, Task, make_session

MAX_TURNS_PER_TASK = 6


@dataclass(frozen=True)
class Outcome:
    """What came of one session: right or wrong for each task, and the rows that were computed for it."""

    session: Session
    right: tuple[bool, ...]
    computed: int


def run_session(client: Leyline, session: Session, policies: Sequence[Policy]) -> Outcome:
    """Asks all tasks of a session, one after the other, in one conversation."""
    disk: dict[str, str] = {}
    right: list[bool] = []
    computed = 0
    live = client.session(system=SYSTEM_PROMPT, tools=[READ_FILE], policies=list(policies))
    try:
        for task in session.tasks:
            disk |= task.files
            answer, rows = _ask(live, task, disk)
            right.append(answer == task.answer)
            computed += rows
    finally:
        live.close()
    return Outcome(session, tuple(right), computed)


def _ask(live: LiveSession, task: Task, disk: dict[str, str]) -> tuple[str, int]:
    """The final answer, stripped, and the rows computed."""
    failure = task.fail_first
    computed = 0
    live.append(task.question)
    for _ in range(MAX_TURNS_PER_TASK):
        reply = live.complete(max_tokens=96)
        computed += reply.usage.computed + reply.usage.generated - 1
        if not reply.tool_calls:
            return reply.text.strip(), computed
        results: dict[str, str] = {}
        for call in reply.tool_calls:
            path = str(call.arguments.get("path", ""))
            results[call.id] = failure if failure else disk.get(path, "error: no such file")
            failure = None
        live.append_results(results)
    return "", computed


@contextmanager
def served(config: ServerConfig) -> Iterator[str]:
    """A server on a thread of its own; yields its address."""
    parts = build(config)
    address: list[str] = []
    stop: list[Callable[[], None]] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = Server(parts)
        await server.start()
        address.append(server.address)
        stop.append(server.request_stop)
        ready.set()
        await server.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop[0])
        thread.join()


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sessions", type=int, default=60, help="a number of tasks")
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--older-than", type=int, help="clear results older than this many turns")
    parser.add_argument("--mode", choices=["amortize", "forget"], default="amortize")
    parser.add_argument("--seed", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sessions = [
        make_session(Random(args.seed + 1000 * n + i), num_tasks=n, heldout=True)
        for n in args.tasks
        for i in range(args.sessions)
    ]
    policies: list[Policy] = []
    if args.older_than is not None:
        policies = [TruncateOlderThan(args.older_than, mode=Mode[args.mode.upper()], min_tokens=8)]
    with (
        served(ServerConfig(model=args.model, device=args.device, port=0)) as address,
        Leyline(target=address) as client,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        work = pool.map(lambda session: run_session(client, session, policies), sessions)
        outcomes = list(track(work, "sessions", len(sessions), console=Console(stderr=True)))
    rows = report(outcomes)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def report(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Prints and returns one line a number of tasks, one a kind, one for all."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for outcome in outcomes:
        size = f"{len(outcome.right)} tasks"
        right["sessions right throughout"] += all(outcome.right)
        total["sessions right throughout"] += 1
        for task, ok in zip(outcome.session.tasks, outcome.right, strict=True):
            for name in (size, task.kind, "all answers"):
                right[name] += ok
                total[name] += 1
    names = sorted((n for n in total if n.endswith(" tasks")), key=lambda n: int(n.split()[0]))
    rows: list[dict[str, object]] = []
    for name in [*names, *KINDS, "all answers", "sessions right throughout"]:
        low, high = wilson(right[name], total[name])
        print(
            f"{name:28} {right[name]:5} of {total[name]:5}  {right[name] / max(1, total[name]):7.2%}"
            f"  [{low:.2%}, {high:.2%}]"
        )
        rows.append({"name": name, "right": right[name], "total": total[name], "low": low, "high": high})
    computed = sum(outcome.computed for outcome in outcomes)
    print(f"{'rows computed a session':28} {computed / len(outcomes):10.1f}")
    return rows


if __name__ == "__main__":
    main()
