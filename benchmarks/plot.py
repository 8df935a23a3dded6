"""Pictures of the results, from the files of rows alone. `python -m benchmarks.plot [DIR]` writes DIR/*.png.

Colours are Okabe and Ito's, which colour-blind readers tell apart; every bar has its number, a goal is a dashed line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.record import Row, read
from benchmarks.tables import number

# Okabe, Ito (2008), "Color Universal Design".
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
HATCHES: Final = ("", "//", "..", "xx", "\\\\", "++")
MOST_UPRIGHT: Final = 5  # arms of a case, beside whose bars numbers have room as they are
CHARACTERS_AN_INCH: Final = 14  # of the title
SHOWN: Final = "median, p5 to p95; dashed: goal"
RESULTS: Final = Path(__file__).parent / "results"


def bars(axes: Any, rows: Sequence[Row], metric: str, styles: Sequence[str]) -> None:
    """Grouped bars of one metric: a group a case, a bar an arm; whiskers from the 5th to the 95th percentile.

    styles: the arms of the whole picture, so that an arm looks the same in every panel.
    """
    chosen = [row for row in rows if row.metric == metric and row.value is not None]
    cases, arms = list(dict.fromkeys(r.case for r in chosen)), list(dict.fromkeys(r.arm for r in chosen))
    width = 0.8 / max(1, len(arms))
    for row in chosen:
        arm, case = arms.index(row.arm), cases.index(row.case)
        at, value = case + (arm - (len(arms) - 1) / 2) * width, float(row.value or 0.0)
        style, whisker, top = styles.index(row.arm), None, value
        if row.low is not None and row.high is not None:
            whisker, top = [[max(0.0, value - row.low)], [max(0.0, row.high - value)]], max(value, row.high)
        axes.bar(
            at,
            value,
            0.92 * width,
            color=COLOURS[style % len(COLOURS)],
            hatch=HATCHES[(style + style // len(COLOURS)) % len(HATCHES)],  # the seventh is not the first again
            edgecolor="white",
            yerr=whisker,
            error_kw={"elinewidth": 0.8, "ecolor": "#444444"},
            label=row.arm,
        )
        axes.annotate(
            number(value),
            (at, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
            rotation=90 if len(arms) > MOST_UPRIGHT else 0,
        )
        if row.goal is not None:
            axes.hlines(row.goal, at - width / 2, at + width / 2, colors="#000000", linestyles="dashed", linewidth=1.2)
    axes.set_xticks(range(len(cases)), [_folded(case.partition(";")[0]) for case in cases], fontsize=8)
    axes.set_ylabel(f"{metric} [{chosen[0].unit}]" if chosen else metric, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.15)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _folded(text: str, width: int = 24) -> str:
    """In lines of at most so many characters, where no word is longer."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def draw(rows: Sequence[Row], metrics: Sequence[str], path: Path, shown: str = SHOWN) -> None:
    """One picture: a panel a metric; `shown` says what bars and whiskers are. Raises ValueError when none of them is
    there."""
    there = [metric for metric in metrics if any(r.metric == metric and r.value is not None for r in rows)]
    if not there:
        raise ValueError(f"{path.name}: no row has a value of {', '.join(metrics)}")
    cases = max(len({r.case for r in rows if r.metric == metric}) for metric in there)
    styles = list(dict.fromkeys(row.arm for row in rows if row.metric in there and row.value is not None))
    size = (max(7.0, 1.9 * cases + 2.0), 2.7 * len(there) + 1.2)
    figure, axes = plt.subplots(len(there), 1, figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for metric, panel in zip(there, axes[:, 0], strict=True):
        bars(panel, rows, metric, styles)
        found, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    first = rows[0]
    more = {row.case.partition(";")[2].strip() for row in rows} - {""}
    told = "; ".join([f"{first.versions['model']}, {first.dtype}, {first.device}", *sorted(more)])
    title = _folded(f"{told}; {shown}", int(CHARACTERS_AN_INCH * size[0]))
    figure.suptitle(f"{first.bench}\n{title}", fontsize=9)
    columns = min(3, len(handles))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cases(text: str) -> Callable[[Sequence[Row]], list[Row]]:
    return lambda rows: [row for row in rows if text in row.case]


_POLICY_COST: Final = ("tokens computed", "first token", "length at the end", "turns a task")
_FOUND: Final = ("found of what is there", "reused of all tokens")
PICTURES: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    # file: (benchmark, text in the case, metrics)
    "rotate": ("rotate", "", ("bandwidth",)),
    "decode_kernel": ("decode", "kernel", ("bandwidth", "time")),
    "decode_step": ("decode", "step", ("step",)),
    "prefill": ("prefill", "", ("first token",)),
    "forms": ("forms", "", ("first token of 16", "first token of 64", "first token of 256", "first token of 1024")),
    "splice": ("splice", "edit", ("call", "in the server")),
    "splice_first_token": ("splice", "first token", ("first token",)),
    "streams": ("streams", "", ("step",)),
    "interference": ("interference", "", ("wall", "between tokens", "longest between tokens", "first token")),
    "paper_table": ("paper_table", "C =", ("end to end p50", "end to end p95", "first token", "hit rate")),
    "paper_table_cost": ("paper_table", "C =", ("prefilled", "peak slots", "energy")),
    "traces_miniswe": ("traces", "miniswe", ("prefilled", "first token", "engine busy")),
    "traces_swe_agent": ("traces", "swe-agent", ("prefilled", "first token", "engine busy")),
    "traces_tau_bench": ("traces", "tau-bench", ("prefilled", "first token", "engine busy")),
    "content_recovery": ("content_recovery", "pattern", _FOUND),
    "content_recovery_traces": ("content_recovery", "recorded", _FOUND),
    "content_hits": ("content_hits", "moved", ("first token", "computed", "energy")),
    "policy": ("policy", " of 20 tasks", ("tasks solved", "right throughout")),
    "policy_cost": ("policy", " of 20 tasks", _POLICY_COST),
}
OTHERWISE_SHOWN: Final = {
    "content_recovery": "counts of tokens; dashed: goal",
    "content_recovery_traces": "counts of tokens; dashed: goal",
    "policy": "shares with 95 % intervals",
    "policy_cost": "tokens computed, turns: mean; else median, p5 to p95",
}


def plot_all(directory: Path) -> list[Path]:
    """Every picture whose rows are there."""
    out = []
    for name, (bench, text, metrics) in PICTURES.items():
        source = directory / f"{bench}.jsonl"
        rows = _cases(text)(read(source)) if source.is_file() else []
        if any(row.metric in metrics and row.value is not None for row in rows):
            draw(rows, metrics, directory / f"{name}.png", OTHERWISE_SHOWN.get(name, SHOWN))
            out.append(directory / f"{name}.png")
    return out


if __name__ == "__main__":
    for path in plot_all(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(path)
