"""Kills a client in the middle of its work and goes on from another one; then asks for what was cut.

Owns these two acts of the demo and what they print. The killed client is a process of its own and gets SIGKILL.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from demo.agent import Files
from demo.arms import MAX_TOKENS, Arm, describe
from demo.record import Turn
from demo.tasks import Task
from leyline_sdk import Leyline, Reply, Session

MAX_TRIES = 2


@dataclass(frozen=True, slots=True)
class Resumed:
    """What the second client found and did.

    Attributes:
        planned: edits that its fresh policy wanted: none, for all was done.
        pending: tokens without KV when it came: what the dead client had appended and not yet had computed.
        computed: rows computed before its first token.
        kept: rows that were there.
        edited: edits made with its reply.
        steps: what the model did then, up to its answer.
    """

    tokens: int
    planned: int
    pending: int
    computed: int
    kept: int
    edited: int
    steps: tuple[str, ...]

    @property
    def nothing_again(self) -> bool:
        """Nothing was edited again, and only what had no KV was computed: it, and the opening of the reply."""
        return not self.planned and not self.edited and self.computed == self.pending + 1


def kill_and_resume(address: str, arm: Arm, session_id: str, task: Task, root: Path) -> Resumed:
    """A client resumes the session, asks the task, runs the tool, hands in its result, and is killed. A second one,
    with a policy object that never saw this session, takes over. Raises EOFError when the first ends by itself."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    doomed = context.Process(target=_doomed_client, args=(address, arm, session_id, task, root, there))
    doomed.start()
    there.close()  # so that a client that fails by itself ends the wait
    here.recv()
    doomed.kill()
    doomed.join()
    with Leyline(target=address, api_key=arm.key) as client:
        session = client.session(session_id, policies=arm.policies())
        planned = len(session.preview().applied_edits)
        info = session.info()
        reply = session.complete(max_tokens=MAX_TOKENS)
        steps = [describe(reply), *_finish(session, reply, Files(root))]
        return Resumed(
            tokens=info.num_tokens,
            planned=planned,
            pending=info.num_pending,
            computed=reply.cache.computed,
            kept=reply.cache.kept,
            edited=len(reply.applied_edits),
            steps=tuple(steps),
        )


def _finish(session: Session, reply: Reply, files: Files) -> list[str]:
    """Goes on until the model answers, at most MAX_TRIES times; then no call stays without its result."""
    steps = []
    for _ in range(MAX_TRIES):
        if not reply.tool_calls:
            break
        session.append_results({call.id: files.run(call) for call in reply.tool_calls})
        reply = session.complete(max_tokens=MAX_TOKENS)
        steps.append(describe(reply))
    if reply.tool_calls:
        session.append_results({call.id: files.run(call) for call in reply.tool_calls})
    return steps


def _doomed_client(address: str, arm: Arm, session_id: str, task: Task, root: Path, parent: Connection) -> None:
    files = Files(root)
    files.prepare(task)
    client = Leyline(target=address, api_key=arm.key)
    session = client.session(session_id, policies=arm.policies())
    session.append(task.question)
    reply = session.complete(max_tokens=MAX_TOKENS)
    if reply.tool_calls:
        session.append_results({call.id: files.run(call) for call in reply.tool_calls})
    parent.send("the result is in, the model has not read it yet")
    parent.recv()  # for ever


@dataclass(frozen=True, slots=True)
class Removed:
    """What the model made of a question whose answer was cut from its history and deleted from the disk.

    Attributes:
        influence_remains: whether kept rows had been computed from it, as the server's receipt says.
    """

    arm: str
    question: str
    value: str
    steps: tuple[str, ...]
    influence_remains: bool


def ask_for_removed(arm: Arm, turns: Sequence[Turn], session: Session, task: Task, files: Files) -> Removed:
    """Asks for a value of the task's file that nobody asked for, in a fork of the session that no policy edits."""
    path, content = next(iter(task.files.items()))
    pairs = [line.split(" = ", 1) for line in content.splitlines() if " = " in line]
    key, value = next((key, value) for key, value in pairs if value not in task.answer and key not in task.question)
    files.remove(path)
    with session.fork() as fork:
        fork.policies.clear()
        question = f"What is {key} in {path}?"
        fork.append(question)
        reply = fork.complete(max_tokens=MAX_TOKENS)
        steps = [describe(reply), *_finish(fork, reply, files)]
        fork.close()
    remains = any(cut.influence_remains for turn in turns for cut in turn.cuts if path in cut.what)
    return Removed(arm.name, question, value, tuple(steps), remains)
