"""Pictures of the lab's figures, from the figures alone. Needs matplotlib, which is an extra (`leyline[bench]`).

Lines have their names at their ends. Colours are Okabe and Ito's (2008), which colour-blind readers tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any, Final

from leyline_server.lab.figures import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#E69F00", "#666666", "#009E73", "#CC79A7", "#56B4E9")
MARKERS: Final = "osD^vPX"
Line = list[tuple[float, Figure]]


def draw_drift(path: Path, figures: Iterable[Figure]) -> None:
    """Error of keys and KL of logits over the number of edits, log-log. Raises ValueError when there is nothing."""
    chosen = _of("drift", figures)
    metrics = list(dict.fromkeys(figure.metric for figure in chosen))[:2]
    canvas, panels = _panels(len(metrics))
    arms = list(dict.fromkeys(figure.arm for figure in chosen))
    for metric, axes in zip(metrics, panels, strict=True):
        lines = {
            arm: [(float(f.case.split()[0]), f) for f in chosen if (f.arm, f.metric) == (arm, metric)] for arm in arms
        }
        axes.set(xscale="log", xlabel="edits")
        values = [figure.value for line in lines.values() for _, figure in line]
        if min(values) > 0:
            axes.set_yscale("log")
        else:  # a zero is drawn as one, below the decade of the smallest that is none
            axes.set_yscale("symlog", linthresh=10 ** floor(log10(min([v for v in values if v > 0], default=1.0))))
        unit = next(f.unit for f in chosen if f.metric == metric)
        _draw(axes, lines, f"{metric}, {unit}, median" if unit else f"{metric}, relative")
    _save(canvas, path)


def draw_invariance(path: Path, figures: Iterable[Figure]) -> None:
    """The area under the ROC curve over the layers, with its interval. Raises ValueError when there is nothing."""
    chosen = [figure for figure in _of("invariance", figures) if figure.case.startswith("layer ")]
    canvas, (axes,) = _panels(1)
    lines = {
        arm: [(float(f.case.split()[1]), f) for f in chosen if f.arm == arm]
        for arm in dict.fromkeys(figure.arm for figure in chosen)
    }
    axes.axhline(0.5, color="#bbbbbb", linewidth=0.8, linestyle="dashed")
    axes.text(
        1, 0.5, "chance", transform=axes.get_yaxis_transform(), fontsize=7, color="#888888", ha="right", va="bottom"
    )
    axes.set(xlabel="layer", ylim=(min(0.4, *(f.low or f.value for f in chosen)), 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)
    for index, line in enumerate(lines.values()):
        low = [figure.value if figure.low is None else figure.low for _, figure in line]
        high = [figure.value if figure.high is None else figure.high for _, figure in line]
        axes.fill_between([at for at, _ in line], low, high, color=_colour(index), alpha=0.15, linewidth=0)
    _draw(axes, lines, "the same token told from others by cosine, AUC")
    _save(canvas, path)


def _of(bench: str, figures: Iterable[Figure]) -> list[Figure]:
    chosen = [figure for figure in figures if figure.bench == bench]
    if not chosen:
        raise ValueError(f"no figure of {bench} to draw")
    return chosen


def _panels(count: int, width: float = 5.6, height: float = 3.6) -> tuple[Any, Sequence[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
    return canvas, axes[0]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _draw(axes: Any, lines: dict[str, Line], title: str) -> None:
    """Lines with their names behind their last points, moved apart where they would overlap."""
    for index, line in enumerate(lines.values()):
        x, y = [at for at, _ in line], [figure.value for _, figure in line]
        axes.plot(x, y, color=_colour(index), marker=MARKERS[index % len(MARKERS)], markersize=4, linewidth=1.5)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.figure.canvas.draw()  # fixes the scales that places are taken from
    ends = [(index, name, line[-1]) for index, (name, line) in enumerate(lines.items()) if line]
    places = {index: float(axes.transData.transform((at, figure.value))[1]) for index, _, (at, figure) in ends}
    apart = 9 * axes.figure.dpi / 72
    height = -float("inf")
    for index, name, (at, figure) in sorted(ends, key=lambda end: places[end[0]]):
        height = max(places[index], height + apart)
        up = (height - places[index]) * 72 / axes.figure.dpi
        axes.annotate(
            name,
            (at, figure.value),
            xytext=(6, up),
            textcoords="offset points",
            fontsize=8,
            color=_colour(index),
            va="center",
            annotation_clip=False,
        )


def _save(canvas: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    canvas.savefig(path, dpi=150)
    plt.close(canvas)


NEEDS: Final = {"following.png": ("follows F, where F and R differ",), "dial.png": ("KL from R",)}
"""Metrics without which a picture has nothing to show."""


def draw_following(path: Path, figures: Iterable[Figure]) -> None:
    """Whom each arm follows where F and R differ: bars of shares, a panel a kind."""
    chosen = [f for f in _of("fidelity", figures) if f.metric.startswith("follows") and "margin" not in f.case]
    kinds = list(dict.fromkeys(figure.case for figure in chosen))
    arms = list(dict.fromkeys(figure.arm for figure in chosen))
    canvas, panels = _panels(len(kinds), width=2.4, height=0.24 * len(arms) + 1)
    for kind, axes in zip(kinds, panels, strict=True):
        for metric, colour, sign in (("follows F", COLOURS[0], 1), ("follows R", COLOURS[1], -1)):
            by_arm = {f.arm: f.value for f in chosen if f.case == kind and f.metric.startswith(metric)}
            axes.barh(range(len(arms)), [sign * by_arm.get(arm, 0.0) for arm in arms], color=colour, label=metric)
        axes.set(xlim=(-1, 1), xticks=[-1, 0, 1], xticklabels=["all as R", "0", "all as F"])
        axes.set_yticks(range(len(arms)), arms if axes is panels[0] else [""] * len(arms))
        axes.set_title(kind, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    _save(canvas, path)


def draw_dial(path: Path, figures: Iterable[Figure]) -> None:
    """The dial from AMORTIZE to FORGET: distance from R over what is computed again, a line a kind."""
    chosen = [f for f in _of("fidelity", figures) if "margin" not in f.case]
    canvas, (axes,) = _panels(1)
    lines: dict[str, Line] = {}
    for kind in dict.fromkeys(figure.case for figure in chosen):
        cost = {f.arm: f.value for f in chosen if f.case == kind and f.metric == "computed again"}
        far = {f.arm: f for f in chosen if f.case == kind and f.metric == "KL from R"}
        arms = sorted((arm for arm in far if arm[0] in "LR"), key=lambda arm: cost[arm])
        full = max(1.0, cost.get("R", 1.0))
        lines[kind] = [(cost[arm] / full, far[arm]) for arm in arms if arm != "R"]
    axes.set(yscale="symlog", xlabel="tokens computed again, as a share of FORGET's")
    axes.set_yscale("symlog", linthresh=1e-6)
    _draw(axes, lines, "KL from a prefill of the edited text, nats, median")
    _save(canvas, path)
