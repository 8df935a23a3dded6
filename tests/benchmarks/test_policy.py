"""The policy experiment at a toy's size: rows of every arm, pairs, thirds, and what is called a difference."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from random import Random

import pytest
from rich.console import Console

from benchmarks import clients, policy, policy_figures
from benchmarks.bench import OutOfTime, WrongResult
from benchmarks.plot import plot_all
from benchmarks.policy_client import AMORTIZE, ARMS, FORGET, KEEP_ALL, REPREFILL, Memory, Played, tasks_of
from benchmarks.policy_figures import COSTS, SOLVED, THIRDS, THROUGHOUT, WHOLE, against, figures, p_against, third
from benchmarks.policy_table import NO_DIFFERENCE, called, summary
from benchmarks.record import Recorder, read
from benchmarks.registry import SHAPES, Bed
from leyline_sdk import ToolCall
from leyline_server.lab.statistics import paired_difference
from training.tasks import Task


@pytest.fixture(scope="module")
def address(bed):
    with policy.served(bed) as address:
        yield address


@pytest.fixture
def small(address, bed, monkeypatch):
    """The bed with two sessions, one to be checked, and one server for all that is asked of it."""

    @contextmanager
    def served(bed):
        yield address

    monkeypatch.setattr(policy, "served", served)
    monkeypatch.setattr(policy, "sessions", lambda bed: 2)
    monkeypatch.setattr(policy, "CHECKED", (2,))
    return bed


def played(number: int, right: list[bool], **more) -> Played:
    return Played(
        number, right, **{"turns": 7, "computed": 100, "edits": 1, "tokens": 90, "first_token_ms": [1.0], **more}
    )


@pytest.mark.slow
def test_every_arm_is_checked_and_has_its_rows(small, tmp_path):
    policy.check(small)
    recorder = Recorder("policy", tmp_path / "policy.jsonl", small.device, small.dtype, policy.BENCH.about, "run")
    truncation, stale = policy.BENCH.cases(small)
    for case in (truncation, stale):
        for figure in policy.rows(small, case):
            recorder.add(figure)
    rows = read(tmp_path / "policy.jsonl")
    names = [arm.name for arm in ARMS]
    for case, arms in ((truncation, names[:4]), (stale, [KEEP_ALL, *names[4:]])):
        assert list(dict.fromkeys(row.arm for row in rows if row.case.endswith(f"; {case}"))) == arms
    whole = {(row.arm, row.metric): row for row in rows if row.case.startswith(WHOLE)}
    for arm in ARMS:
        assert whole[arm.name, SOLVED].n == 6
        assert whole[arm.name, THROUGHOUT].n == 2
        assert whole[arm.name, policy_figures.TURNS].value >= 2
        if "truncate" in arm.name or not arm.policies:
            assert bool(whole[arm.name, policy_figures.EDITS].value) == bool(arm.policies)
        for part in THIRDS:
            assert sum(row.arm == arm.name and row.case.startswith(part) for row in rows) == 1 + (arm is ARMS[0])
        rivals = [row.metric for row in rows if row.arm == arm.name and "less" in row.metric]
        before = {KEEP_ALL: [], AMORTIZE: [KEEP_ALL, REPREFILL], FORGET: [KEEP_ALL, REPREFILL]}.get(
            arm.name, [KEEP_ALL]
        )
        assert rivals == [against(rival, metric) for rival in before for metric in (SOLVED, THROUGHOUT, *COSTS)]
    computed = {arm.name: whole[arm.name, policy_figures.COMPUTED].value for arm in ARMS}
    assert computed[AMORTIZE] < computed[REPREFILL] <= computed[FORGET]
    assert whole[AMORTIZE, policy_figures.LENGTH].value < whole[KEEP_ALL, policy_figures.LENGTH].value

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    other = [replace(row, case=row.case.replace("3 tasks", "20 tasks")) for row in rows]
    console.print(summary([*rows, *other]))
    text = console.export_text()
    assert all(arm.name in text for arm in ARMS)
    assert NO_DIFFERENCE in text
    for title in ("what each policy gains", "what each policy costs"):
        assert text.count(title) == 4, "one of each a case"
    assert max(map(len, text.splitlines())) <= 160
    assert "…" not in text
    (tmp_path / "policy.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in other))
    assert [path.stem for path in plot_all(tmp_path)] == ["policy", "policy_cost"]


def test_over_the_budget_no_arm_is_begun(small, monkeypatch):
    monkeypatch.setattr(policy, "play_arm", lambda bed, address, arm: [played(0, [True]), played(1, [True])])
    monkeypatch.setattr(small, "until", time.monotonic() - 1)
    seen = []
    with pytest.raises(OutOfTime) as error:
        seen.extend(policy.rows(small, next(iter(policy.cases(small)))))
    assert {figure.arm for figure in seen} == set()
    assert error.value.left == [arm.name for arm in ARMS[:4]]


def test_a_client_that_fails_or_says_nothing_is_told(small, monkeypatch):
    with pytest.raises(WrongResult, match="the client failed"):
        list(clients.lines("policy_client", [["127.0.0.1:1", "no such arm", "3", "1", "0"]]))
    monkeypatch.setattr(clients, "TIMEOUT_S", 0.01)
    with pytest.raises(WrongResult, match="no client has said anything"):
        list(clients.lines("policy_client", [["127.0.0.1:1", KEEP_ALL, "3", "1", "0"]]))


def test_arms_are_given_the_same_tasks_and_never_trained_ones():
    assert tasks_of(3, 5) == tasks_of(3, 5)
    assert tasks_of(3, 5) != tasks_of(4, 5)
    assert tasks_of(3, 2).tasks == tasks_of(3, 5).tasks[:2]


def test_what_is_not_paired_is_refused():
    one = [played(0, [True, True]), played(1, [True, False])]
    for other in (one[:1], [one[1], one[0]], [one[0], played(1, [True])]):
        with pytest.raises(WrongResult, match="same sessions"):
            list(figures("case", "arm", one, {KEEP_ALL: other}))


def test_a_difference_whose_interval_includes_zero_is_none(rows):
    row = replace(rows[0], unit="points")
    assert called(replace(row, value=3.0, low=-0.1, high=6.0)) == NO_DIFFERENCE
    assert called(replace(row, value=3.0, low=0.0, high=6.0)) == NO_DIFFERENCE
    assert called(replace(row, value=3.25, low=0.5, high=6.0)) == "+3.2 (0.5 to 6.0)"
    assert called(replace(row, value=-3.0, low=-6.0, high=-0.5)) == "-3.0 (-6.0 to -0.5)"
    assert called(replace(row, value=-3000, low=-4000, high=-2000, unit="a session")) == "-3,000 (-4,000 to -2,000)"


def test_differences_and_p_of_pairs():
    ours = [played(i, [True, True, True]) for i in range(10)]
    theirs = [played(i, [True, True, i < 2]) for i in range(10)]
    found = {figure.metric: figure for figure in figures("case", "arm", ours, {KEEP_ALL: theirs})}
    difference = found[against(KEEP_ALL)]
    assert difference.value == pytest.approx(100 * 8 / 30)
    assert difference.low > 0
    assert difference.n == 10
    throughout = found[against(KEEP_ALL, THROUGHOUT)]
    assert throughout.value == pytest.approx(80)
    assert (throughout.low, throughout.high) == pytest.approx([100 * x for x in newcombe(ours, theirs)])
    assert found[p_against(KEEP_ALL)].value == pytest.approx(2 / 2**8)


def newcombe(ours: list[Played], theirs: list[Played]) -> tuple[float, float]:
    return paired_difference([all(one.right) for one in ours], [all(one.right) for one in theirs])[1:]


def test_equal_arms_whose_sessions_break_off_are_seldom_called_different():
    """Once lost, a session stays lost: of its tasks only the first that is wrong says something. Newcombe's interval
    over all tasks calls over half of such pairs different."""
    rng = Random(0)

    def arm() -> list[Played]:
        starts = [rng.randrange(20) if rng.random() < 0.3 else 20 for _ in range(60)]
        costs = [
            {"turns": 60 - 2 * start, "computed": start**3, "first_token_ms": [2 + rng.random(), 90 / (1 + start), 9]}
            for start in starts
        ]
        return [played(i, [n < starts[i] for n in range(20)], **cost) for i, cost in enumerate(costs)]

    different = dict.fromkeys((SOLVED, *COSTS), 0)
    over_tasks = 0
    for _ in range(200):
        ours, theirs = arm(), arm()
        found = {figure.metric: figure for figure in figures("case", "arm", ours, {KEEP_ALL: theirs})}
        for metric in different:
            figure = found[against(KEEP_ALL, metric)]
            different[metric] += not figure.low <= 0 <= figure.high
        _, low, high = paired_difference(*([ok for one in arm for ok in one.right] for arm in (ours, theirs)))
        over_tasks += not low <= 0 <= high
    assert over_tasks > 100
    assert all(count <= 14 for count in different.values()), different


def test_costs_are_compared_by_session():
    rng = Random(1)
    theirs = [played(i, [True] * 4, turns=rng.randrange(8, 12), computed=rng.randrange(900)) for i in range(20)]
    ours = [
        replace(one, turns=one.turns + 2, computed=one.computed - 50, first_token_ms=[rng.random(), 9.0, 9.0])
        for one in theirs
    ]
    theirs = [replace(one, first_token_ms=[rng.choice([8.0, 10.0])]) for one in theirs]
    found = {figure.metric: figure for figure in figures("case", "arm", ours, {KEEP_ALL: theirs})}
    turns, computed, first = (found[against(KEEP_ALL, cost)] for cost in COSTS)
    assert (turns.value, turns.low, turns.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (computed.value, computed.unit) == (-50, "a session")
    assert first.low < 0 < first.high
    assert all(figure.n == 20 for figure in (turns, computed, first))


def test_thirds():
    assert [third(index, 6) for index in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [third(index, 7) for index in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    late = [played(0, [True, True, True, True, False, False])]
    solved = {f.case.partition(";")[0]: f.value for f in figures("x", "arm", late, {}) if f.metric == "tasks solved"}
    assert solved == {"first third": 100, "middle third": 100, "last third": 0, "whole session": pytest.approx(200 / 3)}


def test_files_in_memory_change_and_fail_once():
    memory = Memory()
    call = ToolCall("c1", "read_file", {"path": "a"})
    assert memory.run(call).startswith("error")
    memory.prepare(Task("one_hop", "?", "1", {"a": "k = 1"}, fail_first="error: busy"))
    assert [memory.run(call), memory.run(call)] == ["error: busy", "k = 1"]
    memory.prepare(Task("reread", "?", "2", {"a": "k = 2"}))
    assert memory.run(call) == "k = 2"


def test_a_line_holds_a_session():
    one = played(3, [True, False])
    assert Played(**json.loads(json.dumps(asdict(one)))) == one


def test_the_full_size(bed):
    full = Bed(SHAPES["lite"], bed.device, bed.dtype)
    assert list(policy.cases(full)) == ["200 sessions of 20 tasks", "200 sessions of 20 tasks, stale tools"]
    assert list(policy.cases(bed)) == ["4 sessions of 3 tasks", "4 sessions of 3 tasks, stale tools"]
    assert {arm for arms in policy.cases(bed).values() for arm in arms} == set(ARMS)
