"""The judging and the table, on results made up here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from demo import picture, report
from demo.arms import ARMS
from demo.record import Answer, ArmResult, Cut, Run, Turn, runs

CELLS: tuple[Run, ...] = (("kept", 90), ("removed", 312), ("computed", 4), ("turned", 40))


def turn(index: int, computed: int = 31, first_token_ms: float = 12.0, cuts: tuple[Cut, ...] = ()) -> Turn:
    return Turn(index, "read_file(b.ini)", cuts, 2171, 0, 2140, 40, computed, 5, first_token_ms, CELLS)


def result(name: str, right: int = 12, rows: int | None = None, num_turns: int = 3) -> ArmResult:
    turns = tuple(turn(index + 1) for index in range(num_turns))
    answers = tuple(Answer("?", "yes" if index < right else "no", "yes") for index in range(12))
    return ArmResult(name, turns, answers, num_turns * (31 + 4) if rows is None else rows, 500, 1.0)


def results(**rows: int) -> list[ArmResult]:
    return [result(arm.name, rows=rows.get(arm.name)) for arm in ARMS]


def shown(what: object) -> str:
    console = Console(width=report.TABLE_WIDTH, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_line_says_what_happened() -> None:
    cuts = (Cut("read_file(a.ini)", 312, 4, True),)
    line = report.turn_line(turn(7, cuts=cuts), turn(7, first_token_ms=95)).plain
    for part in ("turn  7: ", "read_file(a.ini) 312 -> 4 tokens", "kept 2,140, computed 31, first token 12 ms"):
        assert part in line
    assert line.endswith("; re-prefill 95 ms")
    assert "re-prefill" not in report.turn_line(turn(7)).plain


def test_table_has_a_row_for_each_arm() -> None:
    text = shown(report.table(results()))
    assert all(arm.name in text for arm in ARMS), text
    assert text.count("12 of 12") == len(ARMS)
    assert "…" not in text, "the table must fit its width"


def test_table_of_a_recording_has_no_right_answers() -> None:
    bare = [ArmResult("none", (turn(1),), (), 35, 100, 1.0)]
    assert "right" not in shown(report.table(bare))


@pytest.mark.parametrize(
    ("right", "met"),
    [(12, True), (11, True), (10, False)],
)
def test_edited_arms_answer_at_least_11_of_12(right: int, met: bool) -> None:
    made = [result(arm.name, right=right if arm.edited else 0) for arm in ARMS]
    checks = report.judge(made, ["AMORTIZE", "FORGET"])
    assert [check.met for check in checks[:2]] == [met, met]


@pytest.mark.parametrize(("ours", "met"), [(600, True), (601, False)])
def test_amortize_computes_at_most_60_percent(ours: int, met: bool) -> None:
    by_name = {"AMORTIZE": result("AMORTIZE", rows=ours), "re-prefill": result("re-prefill", rows=1000)}
    assert report.judge_computed(by_name).met is met


def test_reports_and_the_models_own_count_must_agree() -> None:
    assert report.judge_counts(results()).met
    assert not report.judge_counts(results(AMORTIZE=104)).met


def test_checks_are_all_or_nothing() -> None:
    console = Console(file=io.StringIO())
    met, missed = report.Check("a", True), report.Check("b", False)
    assert report.show_checks(console, [met])
    assert not report.show_checks(console, [met, missed])


def test_median_and_p95() -> None:
    assert report.median_p95([3.0]) == (3.0, 3.0)
    assert report.median_p95([float(value) for value in range(101)]) == (50.0, 95.0)
    with pytest.raises(ValueError, match="no values"):
        report.median_p95([])


def test_runs_join_neighbours_and_put_removed_cells_where_they_stood() -> None:
    assert runs(["kept", "kept", "computed"], {}) == (("kept", 2), ("computed", 1))
    assert runs(["kept", "kept"], {1: 3}) == (("kept", 1), ("removed", 3), ("kept", 1))
    assert runs(["kept"], {1: 2}) == (("kept", 1), ("removed", 2))


def test_picture_is_drawn_and_its_bars_tile_the_row(tmp_path: Path) -> None:
    bars = picture.bars(turn(1))
    assert bars["removed"] == [(90, 312)]
    spans = sorted(span for of_kind in bars.values() for span in of_kind)
    assert [start for start, _ in spans] == [0, 90, 402, 406]
    assert picture.row_width(turn(1)) == 446
    picture.draw(tmp_path / "cache.png", results()[1:3], "a title")
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_everything(tmp_path: Path) -> None:
    report.save_json(tmp_path / "demo.json", ARMS, results(), seed=7, checks=[report.Check("a", True)])
    content = json.loads((tmp_path / "demo.json").read_text())
    assert [made["name"] for made in content["results"]] == [arm.name for arm in ARMS]
    assert content["results"][0]["turns"][0]["cells"][1] == ["removed", 312]
    assert content["checks"] == [{"what": "a", "met": True}]
