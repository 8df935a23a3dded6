"""The picture: a session's list as a row of cells for every turn, coloured by what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.record import ArmResult, Cell, Turn

COLOURS: dict[Cell, str] = {"kept": "#b9c4d0", "turned": "#3f88c5", "computed": "#f4a236", "removed": "#e4572e"}
MEANING: dict[Cell, str] = {
    "kept": "kept, or a prefix hit, where it stood",
    "turned": "kept, and read at a new position",
    "computed": "computed",
    "removed": "removed",
}
INK, FAINT = "#22303c", "#8795a1"
ROW_HEIGHT = 0.82


def draw(path: Path, results: Sequence[ArmResult], title: str) -> None:
    """Writes a PNG with one panel an arm, side by side, on the same scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    num_turns = max(len(result.turns) for result in results)
    width = max(row_width(turn) for result in results for turn in result.turns)
    figure, panels = plt.subplots(
        1, len(results), figsize=(6.6 * len(results), 2.0 + 0.17 * num_turns), sharex=True, sharey=True, squeeze=False
    )
    for axes, result in zip(panels[0], results, strict=True):
        _panel(axes, result, num_turns, width)
    panels[0][0].set_ylabel("turn", color=INK)
    figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=MEANING[kind]) for kind in COLOURS],
        loc="lower center",
        ncols=len(COLOURS),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
    )
    figure.tight_layout(rect=(0, 0.45 / figure.get_figheight(), 1, 1), w_pad=3)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def row_width(turn: Turn) -> int:
    return sum(count for _, count in turn.cells)


def bars(turn: Turn) -> dict[Cell, list[tuple[int, int]]]:
    """(start, length) of the turn's cells, by kind."""
    out: dict[Cell, list[tuple[int, int]]] = {kind: [] for kind in COLOURS}
    start = 0
    for kind, count in turn.cells:
        out[kind].append((start, count))
        start += count
    return out


def _panel(axes: Any, result: ArmResult, num_turns: int, width: int) -> None:
    for turn in result.turns:
        for kind, spans in bars(turn).items():
            axes.broken_barh(spans, (turn.index - ROW_HEIGHT / 2, ROW_HEIGHT), facecolors=COLOURS[kind], linewidth=0)
    axes.set_title(f"{result.name}: {result.rows_computed:,} rows computed", loc="left", fontsize=11, color=INK, pad=8)
    axes.set_xlim(0, width * 1.01)
    axes.set_ylim(num_turns + 0.7, 0.3)
    axes.set_xlabel("the session's list, in tokens", color=INK)
    axes.tick_params(colors=FAINT, length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
