"""The lab's figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from leyline_server.lab.figures import Figure

_SHORT: Final = {
    "first token as F": "first as F",
    "first token as R": "first as R",
    "follows F, where F and R differ": "follows F",
    "follows R, where F and R differ": "follows R",
    "tells what was removed": "tells removed",
    "tells what stands there": "tells R's",
    "greedy prefix with F": "prefix with F",
    "greedy prefix with R": "prefix with R",
    "computed again": "computed",
}
_GOOD, _BAD = "green", "yellow"


def tables(figures: Iterable[Figure]) -> RenderableType:
    """One table a case: arms down, metrics across. Shares with their 95 % interval."""
    out: list[RenderableType] = []
    by_case: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        by_case.setdefault((figure.bench, figure.case), []).append(figure)
    for (bench, case), own in by_case.items():
        out += [_table(f"{bench}: {case}", own), Text()]
    return Group(*out)


def show(console: Console, figures: Sequence[Figure]) -> None:
    console.print(tables(figures))


def _table(title: str, figures: Sequence[Figure]) -> Table:
    metrics = list(dict.fromkeys(figure.metric for figure in figures))
    n = max(figure.n for figure in figures)
    table = Table(title=f"{title} (n = {n})", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("arm", style="bold")
    for metric in metrics:
        table.add_column(_SHORT.get(metric, metric), justify="right")
    for arm in dict.fromkeys(figure.arm for figure in figures):
        by_metric = {figure.metric: figure for figure in figures if figure.arm == arm}
        table.add_row(arm, *(_cell(by_metric.get(metric)) for metric in metrics))
    return table


def _cell(figure: Figure | None) -> Text:
    if figure is None:
        return Text("-", style="dim")
    if figure.unit == "share" and figure.low is not None and figure.high is not None:
        text = Text(f"{figure.value:4.0%}", style=_GOOD if figure.low > 0.5 else _BAD if figure.high < 0.5 else "")
        return text.append(f" {figure.low:3.0%}-{figure.high:<4.0%}", style="dim")
    return Text(f"{figure.value:,.0f}" if figure.unit == "tokens" else f"{figure.value:.2g}")
