"""Pictures are drawn from files of rows, and tables from rows."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from PIL import Image
from rich.console import Console

from benchmarks import plot
from benchmarks.summary import judged, markdown
from benchmarks.tables import number, table


def test_pictures_of_what_is_there(tmp_path, rows):
    (tmp_path / "splice.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (path,) = plot.plot_all(tmp_path)
    assert path == tmp_path / "splice.png"
    with Image.open(path) as image:
        assert image.width > 800
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    drawn = {tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in plot.COLOURS[:2]}
    assert drawn <= colours, "an arm has no bar"


def test_nothing_to_draw_is_said(tmp_path, rows):
    with pytest.raises(ValueError, match="no row has a value"):
        plot.draw(rows, ["energy"], tmp_path / "x.png")
    assert plot.plot_all(tmp_path) == []


def test_a_summary_has_the_judged_rows_alone(tmp_path, rows):
    (tmp_path / "splice.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    lines = markdown(judged(tmp_path)).splitlines()
    assert lines[2:] == [
        "| splice | edit at 32k | AMORTIZE | call | 1 ms | 0.8 ms (0.7 to 1.1) | yes |",
        "| splice | edit at 128k | AMORTIZE | call | 3 ms | 3.5 ms (3.1 to 4) | **no** |",
    ]


def test_a_table_says_what_is_met(rows):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(rows))
    lines = console.export_text().splitlines()
    assert any("edit at 32k" in line and "0.8 ms" in line and " met" in line for line in lines)
    assert any("3.5 ms" in line and "NOT MET" in line for line in lines)
    assert any("FORGET" in line and " - " in line for line in lines), "a figure that could not be had"
    assert "random weights" in lines[0]


@pytest.mark.parametrize(
    ("value", "shown"), [(1234567.0, "1,234,567"), (1234.5, "1,234"), (0.01234567, "0.01235"), (12.345678, "12.35")]
)
def test_numbers_have_four_figures(value, shown):
    assert number(value) == shown
