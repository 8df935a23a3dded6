"""Runs one arm and writes down what it did. The work itself, tasks or a recording, comes from the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.status import Status

from demo import report
from demo.agent import Conversation
from demo.arms import Arm, InPlace, converse
from demo.record import Answer, ArmResult, Turn
from leyline_sdk import Leyline, Session


@dataclass(frozen=True, slots=True)
class Work:
    """What every arm is given. `do` speaks in the conversation and says what it is at through the status."""

    system: str
    tools: Sequence[Mapping[str, Any]]
    do: Callable[[Arm, Conversation, Callable[[str], None]], Sequence[Answer]]


def run_arm(
    arm: Arm, client: Leyline, work: Work, rival: Sequence[Turn], console: Console
) -> tuple[ArmResult, Session]:
    """One conversation from its first message to its last. Its session stays open.

    `rival`: the turns of another arm, to show beside this one's.
    """
    console.rule(f"[bold]{arm.name}", align="left", style="dim")
    before, start = client.server_info().pool, time.perf_counter()
    with console.status(arm.name) as status:

        def on_turn(turn: Turn) -> None:
            other = rival[turn.index - 1] if turn.index <= len(rival) else None
            console.print(report.turn_line(turn, other), soft_wrap=True)

        conversation = converse(arm, client, system=work.system, tools=work.tools, on_turn=on_turn)
        answers = tuple(work.do(arm, conversation, _updater(status, arm)))
    if isinstance(conversation, InPlace):
        conversation.send()
    after = client.server_info().pool
    assert conversation.session is not None, "no turn, no session"
    result = ArmResult(
        name=arm.name,
        turns=tuple(conversation.turns),
        answers=answers,
        rows_computed=after.rows_computed - before.rows_computed,
        slots_in_use=after.in_use - before.in_use,
        wall_s=time.perf_counter() - start,
    )
    right = f"{result.right} of {len(answers)} right, " if answers else ""
    console.print(f"[dim]{right}{result.rows_computed:,} rows computed, {result.wall_s:.0f} s[/]")
    return result, conversation.session


def _updater(status: Status, arm: Arm) -> Callable[[str], None]:
    return lambda what: status.update(f"{arm.name}: {what}")
