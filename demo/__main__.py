"""`python -m demo`: one agent, twelve tasks, five ways to keep its history short; or a recorded conversation.

Exit status 1 when an edited arm answers fewer than 11 of 12, AMORTIZE computes more than 60 % of the rows that
re-prefill does, or a resumed session does something twice. A recording is shown, not judged.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from demo import picture, replay, report, resume
from demo.agent import READ_FILE, SYSTEM, Conversation, Files, run_task
from demo.arms import ARMS, Arm
from demo.record import Answer, ArmResult
from demo.run import Work, run_arm
from demo.server_process import ServerProcess
from demo.tasks import Task, make_tasks
from leyline_sdk import Leyline, Session

Clients = dict[str, Leyline]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--trace", type=Path, help="replay this recorded conversation instead")
    parser.add_argument("--trace-tokens", type=int, default=replay.NUM_TOKENS, help="it is cut to so many tokens")
    parser.add_argument("--trace-turns", type=int, default=replay.NUM_TURNS, help="and to so many turns")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where picture and JSON go")
    parser.add_argument("--tasks", type=int, default=12, help="tasks in the session (12)")
    parser.add_argument("--seed", type=int, default=7, help="of the tasks")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    # One thread of the model: on two cores its second one would wait for the client's all the time.
    flags = ["--threads", "1", *(part for arm in ARMS for part in ("--api-keys", f"{arm.key}={arm.key}"))]
    with ExitStack() as stack:
        with console.status("starting the server"):
            server = stack.enter_context(ServerProcess(args.out / "server.log", flags))
        console.print(f"[dim]server ready:[/] {server.banner}")
        clients = {arm.name: stack.enter_context(Leyline(target=server.address, api_key=arm.key)) for arm in ARMS}
        if args.trace is not None:
            try:
                recording = replay.load(args.trace, clients[ARMS[0].name], args.trace_tokens, args.trace_turns)
            except (OSError, ValueError) as error:
                parser.error(f"--trace {args.trace}: {error}")
            return run_trace(clients, recording, args.out, console)
        return run_tasks(server.address, clients, make_tasks(args.tasks + 1, args.seed), args.out, console)


def run_tasks(address: str, clients: Clients, tasks: list[Task], out: Path, console: Console) -> int:
    """The five arms, the killed client, the removed value, the verdict. The exit status. The last task is the
    killed client's."""
    *tasks, extra = tasks
    with _folder() as root:
        work = Work(SYSTEM, [READ_FILE], _tasks_in(tasks, root))
        results, sessions = run_arms(clients, work, console)

        console.rule("[bold]the client is killed, another one goes on", align="left", style="dim")
        arm = next(arm for arm in ARMS if arm.name == report.WINNER)
        resumed = resume.kill_and_resume(address, arm, sessions[arm.name].id, extra, root / arm.key)
        console.print(report.resumed_lines(resumed))

        console.rule("[bold]a value that was cut, and whose file is gone", align="left", style="dim")
        removed = []
        for arm, result in zip(ARMS, results, strict=True):
            if arm.edited:
                session, files = clients[arm.name].session(sessions[arm.name].id), Files(root / arm.key)
                removed.append(resume.ask_for_removed(arm, result.turns, session, tasks[-2], files))
                console.print(report.removed_line(removed[-1]))

    checks = report.judge(results, [arm.name for arm in ARMS if arm.edited])
    checks.append(report.Check("resumed: nothing edited again, nothing computed again", resumed.nothing_again))
    title = f"One session, {len(tasks)} tasks: the cache over its turns"
    _show(results, title, out, console, checks=checks, resumed=resumed, removed=removed)
    return 0 if report.show_checks(console, checks) else 1


def run_trace(clients: Clients, recording: replay.Recording, out: Path, console: Console) -> int:
    """The five arms on a recording."""
    console.print(f"replaying {recording.name}: {recording.cut}")
    work = Work(recording.system, recording.tools, replay.play(recording))
    results, _ = run_arms(clients, work, console)
    _show(results, f"{recording.name}: the cache over its turns", out, console, cut=recording.cut)
    return 0


def run_arms(clients: Clients, work: Work, console: Console) -> tuple[list[ArmResult], dict[str, Session]]:
    """All arms, one after the other. The sessions that the server edited stay open."""
    results: list[ArmResult] = []
    sessions: dict[str, Session] = {}
    for arm in ARMS:
        rival = next((result.turns for result in results if arm.edited and result.name == report.RIVAL), ())
        result, session = run_arm(arm, clients[arm.name], work, rival, console)
        results.append(result)
        if arm.edited:
            sessions[arm.name] = session
        else:
            session.close()
    return results, sessions


def _show(results: list[ArmResult], title: str, out: Path, console: Console, **more: object) -> None:
    console.print()
    Console(width=max(console.width, report.TABLE_WIDTH)).print(report.table(results))
    shown = [result for result in results if result.name in (report.RIVAL, report.WINNER)]
    picture.draw(out / "cache.png", shown, title)
    report.save_json(out / "demo.json", ARMS, results, **more)
    console.print(f"[dim]picture:[/] {out / 'cache.png'}  [dim]everything:[/] {out / 'demo.json'}")


def _tasks_in(tasks: list[Task], root: Path) -> Callable[[Arm, Conversation, Callable[[str], None]], list[Answer]]:
    """The work of an arm: all tasks, on files in a folder of its own."""

    def do(arm: Arm, conversation: Conversation, say: Callable[[str], None]) -> list[Answer]:
        files = Files(root / arm.key)
        answers = []
        for number, task in enumerate(tasks, 1):
            say(f"task {number} of {len(tasks)}: {task.question}")
            answers.append(Answer(task.question, run_task(conversation, task, files), task.answer))
        return answers

    return do


@contextmanager
def _folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="leyline-demo-"))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
