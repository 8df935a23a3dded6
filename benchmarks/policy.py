"""What policies do to an agent: the embedded model, through gRPC, SDK and policies, in sessions that outgrow it.

The model was trained on up to 2,048 tokens; unedited sessions end at some 2,600. Each arm is given the same sessions,
of names and values that training never saw. The model under test is always the embedded one, also on a GPU: it has to
answer. Server and clients have processes of their own.
Greedy; on a GPU the order of sums depends on what shares a step, so a near tie may fall differently in another run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import clients, policy_figures, policy_table
from benchmarks.bench import Bench, OutOfTime, require
from benchmarks.policy_client import AMORTIZE, ARMS, FORGET, KEEP_ALL, REPREFILL, Arm, Played, play_all
from benchmarks.record import Measured
from benchmarks.registry import Bed
from demo.server_process import ServerProcess
from leyline_sdk import Leyline
from training.render import READ_FILE, SYSTEM_PROMPT

CHECKED, CHECKED_TASKS, MAX_WRONG = (0, 2), 3, 1  # sessions in which every policy finds something
CLEARED = "[cleared]"


def sessions(bed: Bed) -> int:
    return bed.size(200, 4)


def num_tasks(bed: Bed) -> int:
    """Of a session."""
    return 20 if bed.shape.full else 3


def at_once(bed: Bed) -> int:
    """Sessions in flight: enough to fill a GPU's batch."""
    return 48 if bed.device.type == "cuda" else 6


def num_clients(bed: Bed) -> int:
    """Client processes that share them."""
    return min(8, (os.cpu_count() or 1) // 2) if bed.device.type == "cuda" else 1


def cases(bed: Bed) -> dict[str, tuple[Arm, ...]]:
    """By name, with its arms, of which the first edits nothing. Two of them, so that each can be run by itself."""
    name = f"{sessions(bed)} sessions of {num_tasks(bed)} tasks"
    return {name: ARMS[:4], f"{name}, stale tools": (ARMS[0], *ARMS[4:])}


@contextmanager
def served(bed: Bed) -> Iterator[str]:
    """A server of the embedded model in a process of its own, a tenant an arm. Yields its address."""
    bed.drop()
    flags = ["--model", "tiny", "--device", bed.device.type, "--max-queue", "256"]
    flags += ["--slots", str(8192 * (at_once(bed) + 2))]  # what is in flight at its longest always fits
    if bed.device.type == "cpu":
        flags += ["--threads", str(torch.get_num_threads())]  # as the rows say
    flags += [part for arm in ARMS for part in ("--api-keys", f"{arm.key}={arm.key}")]
    with TemporaryDirectory(prefix="leyline-policy-") as folder, ServerProcess(Path(folder) / "log", flags) as server:
        yield server.address


def play_arm(bed: Bed, address: str, arm: Arm) -> list[Played]:
    """All sessions of an arm, in the order of their numbers. The server has computed what they all begin with, else it
    would hang on who comes first how many of them compute it."""
    with Leyline(target=address, api_key=arm.key) as client:
        first = client.session(system=SYSTEM_PROMPT, tools=[READ_FILE])
        first.prefill()
        first.close()
    many = max(1, num_clients(bed))
    shares = [range(start, sessions(bed), many) for start in range(min(many, sessions(bed)))]
    limit = str(max(1, at_once(bed) // many))
    jobs = [[address, arm.name, str(num_tasks(bed)), limit, *map(str, numbers)] for numbers in shares]
    console = Console(stderr=True)
    lines = track(
        clients.lines("policy_client", jobs),
        arm.name,
        sessions(bed),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    played = [Played(**json.loads(line)) for line in lines]
    return sorted(played, key=lambda one: one.number)


def check(bed: Bed) -> None:
    """Short sessions, one at a time: every arm answers right, and computes what it says it does."""
    with served(bed) as address:
        cells = {
            arm.name: sorted(play_all(address, arm, CHECKED_TASKS, 1, CHECKED), key=lambda one: one.number)
            for arm in ARMS
        }
        with Leyline(target=address, api_key=ARMS[0].key) as client:
            placeholder = len(client.tokenize(CLEARED))
    for arm in ARMS:
        wrong = sum(not ok for one in cells[arm.name] for ok in one.right)
        require(wrong <= MAX_WRONG, f"{arm.name}: {wrong} answers of {len(CHECKED) * CHECKED_TASKS} are wrong")
        edits = sum(one.edits for one in cells[arm.name])
        require(bool(edits) == bool(arm.policies), f"{arm.name} made {edits} edits")
    same = [
        (again, forgot, kept)
        for again, forgot, kept in zip(cells[REPREFILL], cells[FORGET], cells[AMORTIZE], strict=True)
        if (again.turns, again.tokens) == (forgot.turns, forgot.tokens) == (kept.turns, kept.tokens)
    ]
    require(len(same) > 0, "no session went alike by re-prefill, AMORTIZE and FORGET")
    for again, forgot, kept in same:
        # FORGET cuts a result before its first token. Re-prefill finds in the cache what the result and `[cleared]`
        # have in common there: a file that begins with a section has the bracket.
        spared = forgot.computed - again.computed
        require(
            0 <= spared <= forgot.edits * placeholder,
            f"session {again.number}: FORGET computed {forgot.computed} tokens, re-prefill {again.computed}",
        )
        require(kept.computed < forgot.computed, f"session {again.number}: AMORTIZE computed as many as FORGET")
    longest = max(one.computed - one.tokens for one in cells[KEEP_ALL])
    require(longest < 0, f"{KEEP_ALL} computed a token twice")


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    """Arm by arm, and as many as there is time for."""
    rivals: dict[str, list[Played]] = {}
    arms = cases(bed)[case]
    with served(bed) as address:
        for index, arm in enumerate(arms):
            if time.monotonic() > bed.until:
                raise OutOfTime([left.name for left in arms[index:]])
            played = play_arm(bed, address, arm)
            yield from policy_figures.figures(case, arm.name, played, rivals)
            if arm.name in policy_figures.RIVALS:
                rivals[arm.name] = played


BENCH = Bench(
    "policy",
    "cpu",
    check,
    lambda bed: list(cases(bed)),
    rows,
    about="tiny, the embedded model",
    summary=policy_table.summary,
)
