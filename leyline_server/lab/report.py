"""The lab's figures as tables for a terminal, none of them wider than 100 columns."""

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
_GROUPS: Final = {
    "first token": ("first token as F", "first token as R"),
    "whom it follows": (
        "follows F, where F and R differ",
        "follows R, where F and R differ",
        "tells what was removed",
        "tells what stands there",
        "told apart",
    ),
    "how far": ("KL from F", "KL from R", "greedy prefix with F", "greedy prefix with R"),
    "cost": ("computed again",),
}
"""Metrics that share a table; all others of a case share one too."""
_COLOURED: Final = _GROUPS["first token"]
"""Shares of which more is better, and a half the bound. To follow F or to tell what is gone is no merit."""
_GOOD, _BAD = "green", "yellow"


def tables(figures: Iterable[Figure]) -> RenderableType:
    """Tables of a case: arms down, metrics across. Shares with their 95 % interval; n where it isn't the title's."""
    out: list[RenderableType] = []
    by_case: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        by_case.setdefault((figure.bench, figure.case), []).append(figure)
    for (bench, case), own in by_case.items():
        n = max(figure.n for figure in own)
        for group, chosen in _grouped(own).items():
            title = f"{bench}: {case}{', ' * bool(group)}{group} (n = {n})"
            out += [Text(title, style="bold"), _table(chosen, n), Text()]  # a table's own title is as narrow as it is
    return Group(*out)


def show(console: Console, figures: Sequence[Figure]) -> None:
    console.print(tables(figures))


def _grouped(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """In the order of the groups and their metrics; "" for those of none."""
    known = {metric for metrics in _GROUPS.values() for metric in metrics}
    groups = {
        group: [figure for metric in metrics for figure in figures if figure.metric == metric]
        for group, metrics in _GROUPS.items()
    }
    groups[""] = [figure for figure in figures if figure.metric not in known]
    return {group: own for group, own in groups.items() if own}


def _table(figures: Sequence[Figure], n: int) -> Table:
    metrics = list(dict.fromkeys(figure.metric for figure in figures))
    table = Table(box=None, header_style="dim")
    table.add_column("arm", style="bold")
    for metric in metrics:
        table.add_column(_SHORT.get(metric, metric), justify="right")
    for arm in dict.fromkeys(figure.arm for figure in figures):
        by_metric = {figure.metric: figure for figure in figures if figure.arm == arm}
        table.add_row(arm, *(_cell(by_metric.get(metric), n) for metric in metrics))
    return table


def _cell(figure: Figure | None, n: int) -> Text:
    if figure is None:
        return Text("-", style="dim")
    if figure.unit == "share" and figure.low is not None and figure.high is not None:
        style = _GOOD if figure.low > 0.5 else _BAD if figure.high < 0.5 else ""
        text = Text().append(f"{figure.value:4.0%}", style=style if figure.metric in _COLOURED else "")
        text.append(f" {figure.low:3.0%}-{figure.high:<4.0%}", style="dim")
    else:
        text = Text(f"{figure.value:,.0f}" if figure.unit == "tokens" else f"{figure.value:.2g}")
    return text if figure.n == n else text.append(f" n={figure.n}", style="dim")
