"""Figures of the policy experiment from what its sessions came to. Runs nothing; `policy_table` sums them up.

Arms are paired: a session has the same tasks in each. Sessions are independent; tasks of one session are not, they
share a history. So intervals of tasks and of costs come from a bootstrap over sessions. Of sessions right throughout,
one outcome each, they are Wilson's and Newcombe's, and p is McNemar's exact one. A difference whose interval includes
zero is no difference. First tokens are timed with other sessions in flight, and arms one after the other: their
interval tells of sessions, not of how the machine's speed drifts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final

from benchmarks.bench import require
from benchmarks.policy_client import KEEP_ALL, REPREFILL, Played
from benchmarks.record import Measured, measured
from leyline_server.lab.bootstrap import grouped_mean, paired_mean_difference
from leyline_server.lab.statistics import mcnemar, paired_difference, wilson

WHOLE: Final = "whole session"
THIRDS: Final = ("first third", "middle third", "last third")
RIVALS: Final = (KEEP_ALL, REPREFILL)
SOLVED, THROUGHOUT, COMPUTED, FIRST = "tasks solved", "right throughout", "tokens computed", "first token"
TURNS, EDITS, LENGTH = "turns a task", "edits a session", "length at the end"
COSTS: Final = {TURNS: "turns", COMPUTED: "a session", FIRST: "ms"}
SHARE: Final = (0.0, 1.0)


def against(rival: str, metric: str = SOLVED) -> str:
    return f"{metric}, less {rival}"


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
        shares = [[ok for i, ok in enumerate(one.right) if third(i, len(one.right)) == index] for one in played]
        if all(shares):
            yield _tasks_solved(f"{part}; {told}", arm, shares)
    case, sessions = f"{WHOLE}; {told}", len(played)
    throughout = _throughout(played)
    yield _tasks_solved(case, arm, [one.right for one in played])
    low, high = wilson(sum(throughout), sessions)
    yield _points(case, arm, THROUGHOUT, "%", sessions, (sum(throughout) / sessions, low, high))
    for rival, theirs in rivals.items():
        _check_pairs(played, theirs)
        yield from _differences(case, arm, rival, played, theirs)
    yield Measured(case, arm, TURNS, sum(one.turns for one in played) / sum(_sizes(played)), "turns", sessions)
    yield Measured(case, arm, COMPUTED, sum(one.computed for one in played) / sessions, "a session", sessions)
    yield measured(case, arm, FIRST, [ms for one in played for ms in one.first_token_ms], "ms")
    yield Measured(case, arm, EDITS, sum(one.edits for one in played) / sessions, "edits", sessions)
    yield measured(case, arm, LENGTH, [one.tokens for one in played], "tokens")


def _differences(
    case: str, arm: str, rival: str, ours: Sequence[Played], theirs: Sequence[Played]
) -> Iterator[Measured]:
    """`n` is of sessions: they are what is drawn."""
    n, tasks, each = len(ours), _sizes(ours), [1] * len(ours)
    solved = paired_mean_difference([sum(one.right) for one in ours], [sum(one.right) for one in theirs], tasks, SHARE)
    yield _points(case, arm, against(rival), "points", n, solved)
    pair = _throughout(ours), _throughout(theirs)
    yield _points(case, arm, against(rival, THROUGHOUT), "points", n, paired_difference(*pair))
    yield Measured(case, arm, p_against(rival), mcnemar(*pair), "", n)
    costs = {
        TURNS: paired_mean_difference([one.turns for one in ours], [one.turns for one in theirs], tasks),
        COMPUTED: paired_mean_difference([one.computed for one in ours], [one.computed for one in theirs], each),
        FIRST: paired_mean_difference(_first_tokens(ours), _first_tokens(theirs), each),
    }
    for cost, (value, low, high) in costs.items():
        yield Measured(case, arm, against(rival, cost), value, COSTS[cost], n, low, high)


def _sizes(played: Sequence[Played]) -> list[int]:
    return [len(one.right) for one in played]


def _throughout(played: Sequence[Played]) -> list[bool]:
    return [all(one.right) for one in played]


def _first_tokens(played: Sequence[Played]) -> list[float]:
    """Each session's median."""
    return [median(one.first_token_ms) for one in played]


def _tasks_solved(case: str, arm: str, sessions: Sequence[Sequence[bool]]) -> Measured:
    sizes = [len(tasks) for tasks in sessions]
    return _points(case, arm, SOLVED, "%", sum(sizes), grouped_mean([sum(tasks) for tasks in sessions], sizes, SHARE))


def _points(case: str, arm: str, metric: str, unit: str, n: int, share: tuple[float, float, float]) -> Measured:
    value, low, high = (100 * part for part in share)
    return Measured(case, arm, metric, value, unit, n, low, high)


def _check_pairs(one: Sequence[Played], other: Sequence[Played]) -> None:
    same = [(a.number, len(a.right)) for a in one] == [(b.number, len(b.right)) for b in other]
    require(same, "the arms were not given the same sessions in the same order")
