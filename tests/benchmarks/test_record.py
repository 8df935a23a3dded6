"""Rows: what a figure is, when a goal is met, and what a file of results holds."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.record import Measured, Recorder, commit, measured, read

FIELDS = [
    *("bench", "case", "arm", "metric", "value", "unit", "n", "low", "high", "goal", "met"),
    *("device", "dtype", "versions", "commit", "command"),
]


def test_a_figure_is_the_median_with_its_bounds():
    figure = measured("case", "arm", "time", list(range(101)), "us")
    assert (figure.value, figure.low, figure.high, figure.n) == (50.0, 5.0, 95.0, 101)
    with pytest.raises(ValueError, match="no samples"):
        measured("case", "arm", "time", [], "us")


@pytest.mark.parametrize(("value", "at_most", "at_least"), [(1.0, True, True), (1.1, False, True), (0.9, True, False)])
def test_goals_are_judged_on_the_right_side(value, at_most, at_least):
    figure = Measured("case", "arm", "time", value, "ms")
    assert figure.at_most(1.0).met is at_most
    assert figure.at_least(1.0).met is at_least
    assert figure.at_most(1.0).goal == 1.0


def test_a_goal_that_does_not_apply_is_not_judged():
    figure = Measured("case", "arm", "time", 5.0, "ms")
    assert figure.at_most(1.0, applies=False) == figure
    missing = Measured("case", "arm", "energy", None, "J")
    assert missing.at_most(1.0).met is None


def test_a_file_has_exactly_the_fields(tmp_path):
    path = tmp_path / "splice.jsonl"
    recorder = Recorder("splice", path, torch.device("cpu"), torch.bfloat16, "random weights", "the command")
    recorder.add(measured("32k", "AMORTIZE", "call", [1.0, 2.0, 3.0], "ms").at_most(2.5))
    recorder.add(Measured("32k", "AMORTIZE", "energy", None, "J"))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert list(first) == list(second) == FIELDS
    assert first["met"] is True
    assert (second["value"], second["met"]) == (None, None)
    assert first["dtype"] == "bfloat16"
    assert first["versions"]["model"] == "random weights"
    assert read(path) == recorder.rows


def test_measuring_some_cases_again_leaves_the_others(tmp_path):
    path = tmp_path / "decode.jsonl"
    about = (path, torch.device("cpu"), torch.float32, "model", "command")
    first = Recorder("decode", *about)
    rows = [first.add(Measured(case, "arm", "time", 1.0, "ms")) for case in ("kernel 1", "step 1")]
    again = Recorder("decode", *about, only=("step",)).add(Measured("step 1", "arm", "time", 2.0, "ms"))
    assert read(path) == [rows[0], again]
    third = Recorder("decode", *about)
    assert (third.rows, read(path)) == ([], [rows[0], again]), "nothing is lost before there is something new"
    assert [third.add(Measured("kernel 1", "arm", "time", 3.0, "ms"))] == read(path)
    assert [file.name for file in tmp_path.iterdir()] == ["decode.jsonl"]


def test_a_number_that_is_none_is_refused(tmp_path):
    """JSON has no NaN: a file with one could not be read elsewhere."""
    recorder = Recorder("x", tmp_path / "x.jsonl", torch.device("cpu"), torch.float32, "model", "command")
    with pytest.raises(ValueError, match="not JSON compliant"):
        recorder.add(Measured("case", "arm", "time", float("nan"), "ms"))


def test_the_commit_can_be_given_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv("BENCH_COMMIT", "1234abcd")
    assert commit() == "1234abcd"
