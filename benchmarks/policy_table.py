"""The tables that sum up the policy experiment, from rows alone: what each policy gains, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.policy_figures import (
    COMPUTED,
    COSTS,
    EDITS,
    FIRST,
    LENGTH,
    RIVALS,
    SOLVED,
    THIRDS,
    THROUGHOUT,
    TURNS,
    WHOLE,
    against,
    p_against,
)
from benchmarks.record import Row
from benchmarks.tables import number

NO_DIFFERENCE: Final = "no difference"
ALPHA: Final = 0.05
DIGITS: Final = {"points": 1, COSTS[TURNS]: 2, COSTS[COMPUTED]: 0, COSTS[FIRST]: 1}
NOTE: Final = (
    "less ..: the paired difference and its 95 % interval over sessions (first tokens: of sessions' medians); "
    "none where it includes zero"
)
Rows = Mapping[str, Row]
"""Of one arm, by metric."""


def called(row: Row) -> str:
    """A difference with its interval, or that there is none."""
    assert row.value is not None
    assert row.low is not None
    assert row.high is not None
    if row.low <= 0 <= row.high:
        return NO_DIFFERENCE
    digits = DIGITS[row.unit]
    return f"{row.value:+,.{digits}f} ({row.low:,.{digits}f} to {row.high:,.{digits}f})"


def summary(rows: Sequence[Row]) -> Group:
    """Two tables for each case: gains, costs."""
    told = dict.fromkeys(_told(row) for row in rows)
    of = [[row for row in rows if _told(row) == one] for one in told]
    return Group(*(part(some) for some in of for part in (gains, costs)))


def _told(row: Row) -> str:
    return row.case.partition(";")[2].strip()


def gains(rows: Sequence[Row]) -> Table:
    """Answers: one block an arm, with a line for each rival."""
    heads = "tasks solved", "by third", "sessions right throughout;\nMcNemar's p"
    return _table("gains", rows, heads, _gains)


def _gains(rows: Rows, by_third: Sequence[Row]) -> list[Text]:
    return [
        _column(rows, SOLVED, _with_interval),
        Text(" ".join(f"{row.value:.1f}" for row in by_third) + " %"),
        _column(rows, THROUGHOUT, _with_interval),
    ]


def costs(rows: Sequence[Row]) -> Table:
    """The same of what the answers took. First tokens are compared by their sessions' medians."""
    heads = (
        "turns\na task",
        "computed\na session",
        "first token:\nmedian, p95",
        "edits a\nsession",
        "tokens at\nthe end",
    )
    return _table("costs", rows, heads, _costs)


def _costs(rows: Rows, by_third: Sequence[Row]) -> list[Text]:
    return [
        _column(rows, TURNS, lambda row: f"{row.value:.2f}"),
        _column(rows, COMPUTED, lambda row: f"{row.value:,.0f}"),
        _column(rows, FIRST, lambda row: f"{row.value:,.1f} ms, {row.high:,.1f} ms"),
        Text(f"{rows[EDITS].value:.1f}"),
        Text(number(rows[LENGTH].value or 0.0)),
    ]


def _table(
    what: str, rows: Sequence[Row], heads: Sequence[str], cells: Callable[[Rows, Sequence[Row]], list[Text]]
) -> Table:
    first = rows[0]
    title = f"what each policy {what}: {_told(first)}, {first.device} ({first.commit})"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    out.caption, out.caption_justify = NOTE, "left"
    out.add_column("arm", no_wrap=True)
    for head in heads:
        out.add_column(head, justify="right", no_wrap=True)
    for arm in dict.fromkeys(row.arm for row in rows):
        of = {(row.case.partition(";")[0], row.metric): row for row in rows if row.arm == arm}
        whole = {metric: row for (part, metric), row in of.items() if part == WHOLE}
        if LENGTH in whole:  # an arm that was cut short has none
            thirds = [of[part, SOLVED] for part in THIRDS if (part, SOLVED) in of]
            less = "".join(f"\n  less {rival}" for rival in _rivals(whole))
            out.add_row(Text.assemble((arm, "bold"), (less, "dim")), *cells(whole, thirds))
            out.add_section()
    return out


def _rivals(rows: Rows) -> list[str]:
    return [rival for rival in RIVALS if against(rival) in rows]


def _column(rows: Rows, metric: str, told: Callable[[Row], str]) -> Text:
    """The figure, and below it what is to be said of it against each rival."""
    out = Text.assemble((told(rows[metric]), "bold"))
    for rival in _rivals(rows):
        out.append("\n")
        out.append_text(_compared(rows.get(against(rival, metric))))
        p = rows.get(p_against(rival))
        if metric == THROUGHOUT and p is not None and p.value is not None:
            out.append(f", p = {p.value:.2g}", "bold" if p.value < ALPHA else "dim")
    return out


def _with_interval(row: Row) -> str:
    return f"{row.value:.1f} % ({row.low:.1f} to {row.high:.1f})"


def _compared(row: Row | None) -> Text:
    if row is None:  # rows of an older run
        return Text("-", "dim")
    text = called(row)
    if text == NO_DIFFERENCE:
        return Text(text, "dim")
    is_better = (row.value or 0) > 0 if row.unit == "points" else (row.value or 0) < 0
    return Text(text, "green" if is_better else "red")
