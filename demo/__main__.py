"""`python -m demo`: one agent, twelve tasks, five ways to keep its history short; or a recorded conversation.

Exit status 1 when an edited arm answers fewer than 11 of 12, AMORTIZE computes more than 60 % of the rows that
re-prefill does, or a resumed session does something twice.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from demo import picture, report
from demo.agent import READ_FILE, SYSTEM, Files, run_task
from demo.arms import ARMS, Arm, converse
from demo.record import Answer, ArmResult, Turn
from demo.resume import ask_for_removed, kill_and_resume
from demo.server_process import ServerProcess, pool_stats
from demo.tasks import Task, make_tasks
from leyline_sdk import Leyline, Session


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--trace", type=Path, help="replay this recorded conversation instead")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where picture and JSON go")
    parser.add_argument("--tasks", type=int, default=12, help="tasks in the session (12)")
    parser.add_argument("--seed", type=int, default=7, help="of the tasks")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    flags = [part for arm in ARMS for part in ("--api-keys", f"{arm.key}={arm.key}")]
    with console.status("starting the server"):
        server = ServerProcess(args.out / "server.log", flags)
    with server:
        console.print(f"[dim]server ready:[/] {server.banner}")
        if args.trace is not None:
            from demo.replay import replay

            return replay(server.address, args.trace, args.out, console)
        return run(server.address, args.tasks, args.seed, args.out, console)


def run(address: str, num_tasks: int, seed: int, out: Path, console: Console) -> int:
    """The five arms, the killed client, the removed value, the verdict. The exit status."""
    *tasks, extra = make_tasks(num_tasks + 1, seed)
    root = Path(tempfile.mkdtemp(prefix="leyline-demo-"))
    results: list[ArmResult] = []
    live: dict[str, Session] = {}
    clients = {arm.name: Leyline(target=address, api_key=arm.key) for arm in ARMS}
    try:
        for arm in ARMS:
            rival = next((result.turns for result in results if result.name == report.RIVAL), ())
            result, session = run_arm(address, arm, clients[arm.name], tasks, root / arm.key, rival, console)
            results.append(result)
            if arm.edited:
                live[arm.name] = session
            else:
                session.close()
        amortize = next(arm for arm in ARMS if arm.name == report.WINNER)
        console.rule("the client is killed, another one goes on", align="left", style="dim")
        resumed = kill_and_resume(address, amortize, live[amortize.name].id, extra, root / amortize.key)
        console.print(
            f"killed after its tool had run; resumed by id: {resumed.tokens:,} tokens, {resumed.pending} of them the "
            f"dead client's last words, not computed yet\n"
            f"edits planned again: {resumed.planned}, edits made again: {resumed.edited}, kept {resumed.kept:,}, "
            f"computed {resumed.computed} (those {resumed.pending} and the reply's opening); it {resumed.said}"
        )
        console.rule("a value that was cut, and whose file is gone", align="left", style="dim")
        removed = []
        for arm in ARMS:
            if arm.edited:
                asked = ask_for_removed(arm, clients[arm.name].session(live[arm.name].id), tasks[-3], Files(root / arm.key))
                removed.append(asked)
                console.print(f"{arm.name}: {asked.question} (it was {asked.value!r}): {'; then '.join(asked.steps)}")
        console.print()
        console.print(report.table(results), soft_wrap=False)
        checks = report.judge(results, [arm.name for arm in ARMS if arm.edited])
        checks.append(report.Check("resumed: nothing edited again, nothing computed again", resumed.nothing_again))
        passed = report.show_checks(console, checks)
        shown = [result for result in results if result.name in (report.RIVAL, report.WINNER)]
        picture.draw(out / "cache.png", shown, f"One session, {num_tasks} tasks: the cache over its turns")
        report.save_json(out / "demo.json", ARMS, results, checks=checks, resumed=resumed, removed=removed, seed=seed)
        console.print(f"[dim]picture:[/] {out / 'cache.png'}  [dim]everything:[/] {out / 'demo.json'}")
        return 0 if passed else 1
    finally:
        for client in clients.values():
            client.close()
        shutil.rmtree(root, ignore_errors=True)


def run_arm(
    address: str,
    arm: Arm,
    client: Leyline,
    tasks: list[Task],
    root: Path,
    rival: tuple[Turn, ...],
    console: Console,
) -> tuple[ArmResult, Session]:
    """All tasks in one conversation. Its session stays open."""
    console.rule(f"[bold]{arm.name}", align="left", style="dim")
    files = Files(root)
    start, before = time.perf_counter(), pool_stats(address, arm.key)
    with console.status("") as status:

        def on_turn(turn: Turn) -> None:
            other = rival[turn.index - 1] if arm.edited and turn.index <= len(rival) else None
            console.print(report.turn_line(turn, other))

        conversation = converse(arm, client, system=SYSTEM, tools=[READ_FILE], on_turn=on_turn)
        answers = []
        for number, task in enumerate(tasks, 1):
            status.update(f"{arm.name}: task {number} of {len(tasks)}: {task.question}")
            answers.append(Answer(task.question, run_task(conversation, task, files), task.answer))
    after = pool_stats(address, arm.key)
    session = conversation.session
    assert session is not None, "no task, no session"
    result = ArmResult(
        name=arm.name,
        turns=tuple(conversation.turns),
        answers=tuple(answers),
        rows_computed=after.rows_computed - before.rows_computed,
        slots_in_use=after.in_use - before.in_use,
        wall_s=time.perf_counter() - start,
    )
    console.print(f"[dim]{result.right} of {len(answers)} right, {result.rows_computed:,} rows, {result.wall_s:.0f} s[/]")
    return result, session


if __name__ == "__main__":
    sys.exit(main())
