"""The agent of `benchmarks.policy`, in a process of its own: works through sessions of one arm, several at a time.

    python -m benchmarks.policy_client ADDRESS ARM NUM_TASKS AT_ONCE SESSION..

Owns the arms, and what is written down of a session. SESSION is a number that stands for the same tasks in every arm.
Prints one line of JSON, a `Played`, for each session that has ended. Imports no torch. The loop and both kinds of
conversation are the demo's: in place, or messages that the client edits and sends again to a new session.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

from demo.agent import run_task
from demo.arms import OLDER_THAN, InPlace, Reprefilled
from demo.record import Turn
from leyline_policies import Compose, StaleToolDetector, TruncateOlderThan
from leyline_sdk import Leyline, Mode, Policy, ToolCall
from leyline_sdk.errors import ContextExceeded
from training.render import READ_FILE, SYSTEM_PROMPT
from training.tasks import Session, Task, make_session

FIRST_SEED: Final = 500_000  # far from those that training's own evaluation uses


@dataclass(frozen=True, slots=True)
class Arm:
    """Who keeps the history short, and how. `resent`: the client edits its messages, and every reply comes from a new
    session; else the policies edit the live one."""

    name: str
    policies: tuple[Policy, ...] = ()
    resent: bool = False

    @property
    def key(self) -> str:
        """Its API key: a tenant of its own, so that no arm finds another one's prefixes."""
        return "".join(char if char.isalnum() else "-" for char in self.name.lower())


_BOTH: Final = Compose([StaleToolDetector(), TruncateOlderThan(OLDER_THAN)])
ARMS: Final = (
    Arm("keep all"),
    Arm("truncate, re-prefill", (TruncateOlderThan(OLDER_THAN),), resent=True),
    Arm("truncate, AMORTIZE", (TruncateOlderThan(OLDER_THAN),)),
    Arm("truncate, FORGET", (TruncateOlderThan(OLDER_THAN, mode=Mode.FORGET),)),
    Arm("stale tools, AMORTIZE", (StaleToolDetector(),)),
    Arm("stale tools + truncate, AMORTIZE", (_BOTH,)),
)
KEEP_ALL, REPREFILL, AMORTIZE, FORGET = (arm.name for arm in ARMS[:4])


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one session.

    Attributes:
        right: for each task, whether its answer was.
        turns: assistant messages.
        computed: rows, a token each: prefilled, and decoded but for the last of each reply, which is only sampled.
        edits: messages that a policy changed, by whichever means.
        tokens: length at the end.
        first_token_ms: of each reply, from having its messages at hand, by this side's clock.
    """

    number: int
    right: list[bool]
    turns: int
    computed: int
    edits: int
    tokens: int
    first_token_ms: list[float]


class Memory:
    """The files of one session. Nothing is written to a disk."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._failure: str | None = None

    def prepare(self, task: Task) -> None:
        self._files |= task.files
        self._failure = task.fail_first

    def run(self, call: ToolCall) -> str:
        failure, self._failure = self._failure, None
        return failure or self._files.get(str(call.arguments.get("path", "")), "error: no such file")


def tasks_of(number: int, num_tasks: int) -> Session:
    """The same in every arm, of names and values that training never saw."""
    return make_session(Random(FIRST_SEED + number), num_tasks, heldout=True)


def play(client: Leyline, arm: Arm, number: int, num_tasks: int) -> Played:
    """One session from its first task to its last. What no longer fits into the context is answered wrong."""
    conversation: InPlace | Reprefilled
    if arm.resent:
        conversation = Reprefilled(client, SYSTEM_PROMPT, [READ_FILE], arm.policies, _no_report)
    else:
        session = client.session(system=SYSTEM_PROMPT, tools=[READ_FILE], policies=arm.policies)
        conversation = InPlace(session, _no_report)
    disk, right = Memory(), list[bool]()
    try:
        for task in tasks_of(number, num_tasks).tasks:
            right.append(run_task(conversation, task, disk).strip() == task.answer)
    except ContextExceeded:
        right += [False] * (num_tasks - len(right))
    turns = conversation.turns
    tokens = 0
    if conversation.session is not None:
        tokens = conversation.session.transcript.num_tokens
        conversation.session.close()
    return Played(
        number=number,
        right=right,
        turns=len(turns),
        computed=sum(turn.computed + turn.generated - 1 for turn in turns),
        edits=sum(len(turn.cuts) for turn in turns),
        tokens=tokens,
        first_token_ms=[turn.first_token_ms for turn in turns],
    )


def _no_report(turn: Turn) -> None:
    pass


def play_all(address: str, arm: Arm, num_tasks: int, at_once: int, numbers: Sequence[int]) -> Iterator[Played]:
    """These sessions, `at_once` at a time, as they end."""
    with Leyline(target=address, api_key=arm.key) as client, ThreadPoolExecutor(at_once) as pool:
        work = [pool.submit(play, client, arm, number, num_tasks) for number in numbers]
        try:
            for one in as_completed(work):
                yield one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main(address: str, name: str, num_tasks: int, at_once: int, numbers: Sequence[int]) -> None:
    arm = next(arm for arm in ARMS if arm.name == name)
    for played in play_all(address, arm, num_tasks, at_once, numbers):
        print(json.dumps(asdict(played)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(number) for number in sys.argv[5:]])
