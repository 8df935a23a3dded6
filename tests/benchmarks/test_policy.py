"""The policy experiment at a toy's size: rows of every arm, pairs, thirds, and what is called a difference."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from benchmarks import clients, policy, policy_figures
from benchmarks.bench import OutOfTime, WrongResult
from benchmarks.plot import plot_all
from benchmarks.policy_client import AMORTIZE, ARMS, FORGET, KEEP_ALL, REPREFILL, Memory, Played, tasks_of
from benchmarks.policy_figures import NO_DIFFERENCE, THIRDS, WHOLE, called, figures, summary, third
from benchmarks.record import Recorder, read
from benchmarks.registry import SHAPES, Bed
from leyline_sdk import ToolCall
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
    (case,) = policy.BENCH.cases(small)
    for figure in policy.rows(small, case):
        recorder.add(figure)
    rows = read(tmp_path / "policy.jsonl")
    assert list(dict.fromkeys(row.arm for row in rows)) == [arm.name for arm in ARMS]
    assert all(row.case.endswith("; 2 sessions of 3 tasks") for row in rows)
    whole = {(row.arm, row.metric): row for row in rows if row.case.startswith(WHOLE)}
    for arm in ARMS:
        assert whole[arm.name, policy_figures.SOLVED].n == 6
        assert whole[arm.name, policy_figures.THROUGHOUT].n == 2
        assert whole[arm.name, policy_figures.TURNS].value >= 2
        if "truncate" in arm.name or not arm.policies:
            assert bool(whole[arm.name, policy_figures.EDITS].value) == bool(arm.policies)
        for part in THIRDS:
            assert sum(row.arm == arm.name and row.case.startswith(part) for row in rows) == 1
        rivals = [row.metric for row in rows if row.arm == arm.name and "less" in row.metric]
        before = {KEEP_ALL: [], REPREFILL: [KEEP_ALL]}.get(arm.name, [KEEP_ALL, REPREFILL])
        assert rivals == [policy_figures.against(rival) for rival in before]
    computed = {arm.name: whole[arm.name, policy_figures.COMPUTED].value for arm in ARMS}
    assert computed[AMORTIZE] < computed[REPREFILL] <= computed[FORGET]
    assert whole[AMORTIZE, policy_figures.LENGTH].value < whole[KEEP_ALL, policy_figures.LENGTH].value

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    other = [replace(row, case=row.case.replace("3 tasks", "20 tasks")) for row in rows]
    console.print(summary([*rows, *other]))
    text = console.export_text()
    assert all(arm.name in text for arm in ARMS)
    assert NO_DIFFERENCE in text
    assert text.count("what each policy gains and costs") == 2, "one table a length"
    (tmp_path / "policy.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in other))
    assert [path.stem for path in plot_all(tmp_path)] == ["policy", "policy_cost"]


def test_over_the_budget_no_arm_is_begun(small, monkeypatch):
    monkeypatch.setattr(policy, "play_arm", lambda bed, address, arm, num_tasks: [played(0, [True]), played(1, [True])])
    monkeypatch.setattr(small, "until", time.monotonic() - 1)
    seen = []
    with pytest.raises(OutOfTime) as error:
        seen.extend(policy.rows(small, "case"))
    assert {figure.arm for figure in seen} == set()
    assert error.value.left == [arm.name for arm in ARMS]


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
    assert called(replace(row, value=3.25, low=0.5, high=6.0)) == "+3.2\n0.5 to 6.0"
    assert called(replace(row, value=-3.0, low=-6.0, high=-0.5)) == "-3.0\n-6.0 to -0.5"


def test_differences_and_p_of_pairs():
    ours = [played(i, [True, True, True]) for i in range(10)]
    theirs = [played(i, [True, True, i < 2]) for i in range(10)]
    found = {figure.metric: figure for figure in figures("case", "arm", ours, {KEEP_ALL: theirs})}
    difference = found[policy_figures.against(KEEP_ALL)]
    assert difference.value == pytest.approx(100 * 8 / 30)
    assert difference.low > 0
    assert found[policy_figures.p_against(KEEP_ALL)].value == pytest.approx(2 / 2**8)


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
    assert policy.cases(full) == {"200 sessions of 20 tasks": 20}
    assert policy.cases(bed) == {"4 sessions of 3 tasks": 3}
