"""The tables that a reader sees, from rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks.record import Row


def table(rows: Sequence[Row]) -> Table:
    """All rows of one benchmark, a rule between its cases."""
    first = rows[0]
    title = f"{first.bench}: {first.versions['model']}, {first.dtype}, on {first.device} ({first.commit})"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name, justify in (("case", "left"), ("arm", "left"), ("metric", "left")):
        out.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name in ("median", "p5 .. p95", "n", "goal", ""):
        out.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.case != before:
            out.add_section()
        spread = "" if row.low is None or row.high is None else f"{number(row.low)} .. {number(row.high)}"
        goal = "" if row.goal is None else number(row.goal)
        case = row.case if row.case != before else ""
        out.add_row(case, row.arm, row.metric, _value(row), spread, str(row.n), goal, _met(row))
        before = row.case
    return out


def number(value: float) -> str:
    """Four figures, thousands apart."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _value(row: Row) -> Text:
    text = "-" if row.value is None else f"{number(row.value)} {row.unit}"
    return Text(text, "bold" if row.goal is not None else "")


def _met(row: Row) -> Text:
    if row.met is None:
        return Text("")
    return Text("met", "green") if row.met else Text("NOT MET", "bold red")
