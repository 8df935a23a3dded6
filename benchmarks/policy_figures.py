"""Figures of the policy experiment from what its sessions came to, and the table that sums them up. Runs nothing.

Arms are paired: a session has the same tasks in each. Shares have Wilson's intervals. The difference of two arms is
that of their tasks, with Newcombe's interval; tasks of one session share a history and aren't independent, so intervals
over tasks are narrower than the truth. McNemar's exact p is of whole sessions, which are independent: right throughout
or not. A difference whose interval includes zero is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.bench import require
from benchmarks.policy_client import KEEP_ALL, REPREFILL, Played
from benchmarks.record import Measured, Row, measured
from benchmarks.tables import number
from leyline_server.lab.statistics import mcnemar, paired_difference, wilson

WHOLE: Final = "whole session"
THIRDS: Final = ("first third", "middle third", "last third")
RIVALS: Final = (KEEP_ALL, REPREFILL)
NO_DIFFERENCE: Final = "no difference"
SOLVED, THROUGHOUT, COMPUTED, FIRST = "tasks solved", "right throughout", "tokens computed", "first token"
TURNS, EDITS, LENGTH = "turns a task", "edits a session", "length at the end"
ALPHA: Final = 0.05


def against(rival: str) -> str:
    return f"{SOLVED}, less {rival}"


def p_against(rival: str) -> str:
    return f"{THROUGHOUT}, p against {rival}"


def third(index: int, num_tasks: int) -> int:
    """Which third of a session a task is in."""
    return 3 * index // num_tasks


def figures(
    told: str, arm: str, played: Sequence[Played], rivals: Mapping[str, Sequence[Played]]
) -> Iterator[Measured]:
    """The figures of one arm. `told`: of the case, what all arms share. `rivals`: those that were played before it."""
    for index, part in enumerate(THIRDS):
        if answers := [ok for one in played for i, ok in enumerate(one.right) if third(i, len(one.right)) == index]:
            yield _share(f"{part}; {told}", arm, SOLVED, answers)
    case, sessions = f"{WHOLE}; {told}", len(played)
    tasks = _tasks(played)
    yield _share(case, arm, SOLVED, tasks)
    yield _share(case, arm, THROUGHOUT, _throughout(played))
    for rival, theirs in rivals.items():
        _check_pairs(played, theirs)
        difference, low, high = (100 * x for x in paired_difference(tasks, _tasks(theirs)))
        yield Measured(case, arm, against(rival), difference, "points", len(tasks), low, high)
        yield Measured(case, arm, p_against(rival), mcnemar(_throughout(played), _throughout(theirs)), "", sessions)
    yield Measured(case, arm, TURNS, sum(one.turns for one in played) / len(tasks), "turns", len(tasks))
    yield Measured(case, arm, COMPUTED, sum(one.computed for one in played) / sessions, "a session", sessions)
    yield measured(case, arm, FIRST, [ms for one in played for ms in one.first_token_ms], "ms")
    yield Measured(case, arm, EDITS, sum(one.edits for one in played) / sessions, "edits", sessions)
    yield measured(case, arm, LENGTH, [one.tokens for one in played], "tokens")


def _tasks(played: Sequence[Played]) -> list[bool]:
    return [ok for one in played for ok in one.right]


def _throughout(played: Sequence[Played]) -> list[bool]:
    return [all(one.right) for one in played]


def _share(case: str, arm: str, metric: str, outcomes: Sequence[bool]) -> Measured:
    low, high = wilson(sum(outcomes), len(outcomes))
    share = sum(outcomes) / len(outcomes)
    return Measured(case, arm, metric, 100 * share, "%", len(outcomes), 100 * low, 100 * high)


def _check_pairs(one: Sequence[Played], other: Sequence[Played]) -> None:
    same = [(a.number, len(a.right)) for a in one] == [(b.number, len(b.right)) for b in other]
    require(same, "the arms were not given the same sessions in the same order")


def called(row: Row) -> str:
    """A difference with its interval below, or that there is none."""
    assert row.value is not None
    assert row.low is not None
    assert row.high is not None
    if row.low <= 0 <= row.high:
        return NO_DIFFERENCE
    return f"{row.value:+.1f}\n{row.low:.1f} to {row.high:.1f}"


def summary(rows: Sequence[Row]) -> Group:
    """A table for each length of sessions."""
    told = dict.fromkeys(_told(row) for row in rows)
    return Group(*(table([row for row in rows if _told(row) == one]) for one in told))


def _told(row: Row) -> str:
    return row.case.partition(";")[2].strip()


def table(rows: Sequence[Row]) -> Table:
    """What each policy gains and what it costs: one line an arm, all of them in sessions of one length."""
    first = rows[0]
    title = f"what each policy gains and costs: {_told(first)}, {first.device} ({first.commit})"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    out.add_column("arm", no_wrap=True)
    for name in (
        "tasks solved\n95 % interval",
        "by third",
        "sessions right\nthroughout",
        "points less\nkeep all;\np of sessions",
        "points less\nre-prefill;\np of sessions",
        "turns\na task",
        "computed\na session",
        "first token:\nmedian, p95",
        "edits a\nsession",
        "tokens at\nthe end",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    for arm in dict.fromkeys(row.arm for row in rows):
        of = {(row.case.partition(";")[0], row.metric): row for row in rows if row.arm == arm}
        if (WHOLE, LENGTH) in of:  # an arm that was cut short has none
            out.add_row(arm, *_cells(of))
            out.add_section()
    return out


def _cells(of: Mapping[tuple[str, str], Row]) -> list[Text]:
    whole = {metric: row for (part, metric), row in of.items() if part == WHOLE}
    thirds = [of[part, SOLVED] for part in THIRDS if (part, SOLVED) in of]
    first = whole[FIRST]
    return [
        Text(_with_interval(whole[SOLVED]), "bold"),
        Text("\n".join(f"{row.value:.1f} %" for row in thirds)),
        Text(_with_interval(whole[THROUGHOUT])),
        *(_compared(whole.get(against(rival)), whole.get(p_against(rival))) for rival in RIVALS),
        Text(f"{whole[TURNS].value:.2f}"),
        Text(f"{whole[COMPUTED].value:,.0f}", "yellow"),
        Text(f"{first.value:,.1f} ms\n{first.high:,.1f} ms"),
        Text(f"{whole[EDITS].value:.1f}"),
        Text(number(whole[LENGTH].value or 0.0)),
    ]


def _with_interval(row: Row) -> str:
    return f"{row.value:.1f} %\n{row.low:.1f} to {row.high:.1f}"


def _compared(difference: Row | None, p: Row | None) -> Text:
    if difference is None or p is None or p.value is None:
        return Text("-", "dim")
    text = called(difference)
    style = "dim" if text == NO_DIFFERENCE else "green" if (difference.value or 0) > 0 else "bold red"
    return Text.assemble((text, style), (f"\np = {p.value:.2g}", "bold" if p.value < ALPHA else "dim"))
