"""The runner: rows and tables of a real benchmark, one that fails, one that can't run here, and the budget."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from benchmarks import run
from benchmarks.bench import Bench, WrongResult
from benchmarks.record import Measured, read


@pytest.fixture
def invent(monkeypatch):
    """Benchmarks of a test's own, under names of the runner's."""

    def add(name, check=lambda bed: None, needs="cpu", missing=lambda bed: "", host=False):
        ran = []

        def rows(bed, case):
            ran.append(case)
            yield Measured(case, "arm", "time", 1.0, "ms").at_most(2.0, bed.full)

        module = ModuleType(f"benchmarks.{name}")
        module.BENCH = Bench(name, needs, check, lambda bed: ["one", "two"], rows, missing, host=host)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return ran

    return add


def test_a_real_one_from_check_to_file(tmp_path, capsys):
    assert run.main(["rotate", "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "rotate.jsonl")
    metrics, orders = ("time", "bandwidth", "share of copy"), ("in order", "scrambled")
    rotated = {(f"rotate, slots {order}", metric) for order in orders for metric in metrics}
    assert {(row.arm, row.metric) for row in rows} == {("copy", "bandwidth"), *rotated}
    assert all(row.bench == "rotate" and "random weights" in row.versions["model"] for row in rows)
    assert all(row.goal is None and row.met is None for row in rows), "a toy's figures are not judged"
    assert all("scaled down" in row.case for row in rows)
    assert all(row.command == f"python -m benchmarks.run rotate --device cpu --out {tmp_path}" for row in rows)
    assert "share of copy" in capsys.readouterr().out


def test_what_has_no_model_is_never_scaled_down(tmp_path, monkeypatch, invent):
    invent("rotate", host=True)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    monkeypatch.delenv("LEYLINE_TRACES", raising=False)
    assert run.main(["rotate", "--device", "cpu"]) == 0
    assert run.main(["rotate", "--device", "cpu", "--traces", str(tmp_path)]) == 0
    for path in (tmp_path / "toy" / "rotate.jsonl", tmp_path / "rotate.jsonl"):
        assert [(row.case, row.dtype) for row in read(path)] == [("one", "int32"), ("two", "int32")]
        assert "CPU" in read(path)[0].device


def test_a_wrong_result_is_not_timed_and_the_next_one_runs(tmp_path, capsys, invent):
    def wrong(bed):
        raise WrongResult("it errs by 2")

    invent("rotate")
    assert run.main(["rotate", "--device", "cpu", "--out", str(tmp_path)]) == 0
    before = (tmp_path / "rotate.jsonl").read_text()
    capsys.readouterr()
    first, second = invent("rotate", wrong), invent("splice")
    assert run.main(["rotate", "splice", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert first == []
    assert second == ["one", "two"]
    assert (tmp_path / "rotate.jsonl").read_text() == before, "an earlier run's results are kept"
    assert len(read(tmp_path / "splice.jsonl")) == 2
    out = capsys.readouterr().out
    assert "it errs by 2" in out
    assert "not done: rotate" in out
    assert "nothing was written" in out
    assert "rotate.jsonl" not in out


def test_cases_can_be_chosen(tmp_path, invent):
    ran = invent("rotate")
    run.main(["rotate", "--device", "cpu", "--out", str(tmp_path), "--cases", "tw"])
    assert ran == ["two"]


def test_cases_that_are_none_are_refused(tmp_path, capsys, invent):
    ran = invent("rotate") + invent("splice")
    assert run.main(["rotate", "splice", "--device", "cpu", "--out", str(tmp_path), "--cases", "nothing"]) == 2
    assert ran == []
    assert "no case has 'nothing' in its name; there are: one, two" in capsys.readouterr().out


def test_what_this_machine_can_not_run_is_left_out(tmp_path, capsys, invent):
    gpu, traces = invent("rotate", needs="cuda"), invent("traces", missing=lambda bed: "no recordings")
    assert run.main(["rotate", "traces", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert gpu == traces == []
    out = capsys.readouterr().out
    assert "it needs a GPU" in out
    assert "no recordings" in out


def test_what_is_over_the_budget_is_left_out_and_said(tmp_path, capsys, invent):
    first, second = invent("rotate"), invent("splice")
    args = ["rotate", "splice", "--device", "cpu", "--out", str(tmp_path), "--budget-s", "1e-9"]
    assert run.main(args) == 1
    assert first == second == []
    assert "not done: rotate, splice" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "name a benchmark"),
        (["rotat"], "there is no benchmark rotat; there are rotate, decode"),
        (["rotate", "--device", "cuda"], "no GPU"),
        (["rotate", "--device", "cpu", "--shape", "lite"], "--shape lite needs a GPU"),
        (["rotate", "--device", "cpu", "--model", "/nope"], "--model /nope"),
        (["traces", "--device", "cpu", "--traces", "/nope"], "/nope: there is no such directory"),
    ],
)
def test_what_can_not_be_run_is_refused_in_one_line(args, told, capsys, monkeypatch):
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        run.main(args)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_recordings_that_are_of_no_set(tmp_path):
    from benchmarks import traces

    bed = run.Bed(run.SHAPES["toy"], run.torch.device("cpu"), run.torch.float32, traces=tmp_path)
    assert "has none of" in run.unfit(traces.BENCH, bed)


def test_every_name_has_its_module():
    from importlib import import_module

    for name in run.NAMES:
        assert import_module(f"benchmarks.{name}").BENCH.name == name


def test_files_keep_to_their_budget():
    for file in run.RESULTS.parent.glob("*.py"):
        if not file.name.startswith(("tune_", "host_")):
            assert len(file.read_text().splitlines()) <= 300, file
