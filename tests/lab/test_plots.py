"""The pictures of fidelity, from made-up figures: what is drawn, and of what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from leyline_server.lab import plots
from leyline_server.lab.figures import Figure, share, spread

pytest.importorskip("matplotlib")
KINDS = {"removed": 0.9, "replaced": 0.2}  # as F, of L
COSTS = {"F": 0.0, "L": 10.0, "L+16": 20.0, "R": 40.0, "N": 10.0}


def made_up() -> list[Figure]:
    out: list[Figure] = []
    for kind, as_f in KINDS.items():
        for arm, cost in COSTS.items():
            as_f_here = {"F": 1.0, "R": 0.0}.get(arm, as_f)
            for other, part in (("F", as_f_here), ("R", 1 - as_f_here)):
                follows = [number < round(10 * part) for number in range(10)]
                out.append(share("fidelity", kind, arm, f"follows {other}, where F and R differ", follows))
            out.append(spread("fidelity", kind, arm, "KL from R", [(40 - cost) / 100], "nats"))
            out.append(spread("fidelity", kind, arm, "computed again", [cost], "tokens"))
            clear = [True] * 3
            out.append(share("fidelity", f"{kind}, margin >= 2", arm, "follows F, where F and R differ", clear))
    return out


@pytest.fixture
def canvas(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was saved, still to be looked into."""
    saved: list[Any] = []
    honest = plots._save

    def save(canvas: Any, path: Path) -> None:
        saved.append(canvas)
        honest(canvas, path)

    monkeypatch.setattr(plots, "_save", save)
    return saved


def test_whom_each_arm_follows(tmp_path: Path, canvas: list[Any]) -> None:
    plots.draw_following(tmp_path / "following.png", made_up())
    assert (tmp_path / "following.png").stat().st_size > 5_000
    panels = canvas[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == list(KINDS), "no panel for those without near ties"
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(COSTS)
    for axes, as_f in zip(panels, KINDS.values(), strict=True):
        as_f_bars, as_r_bars = axes.containers
        assert [bar.get_width() for bar in as_f_bars] == pytest.approx([1, as_f, as_f, 0, as_f])
        assert [bar.get_width() for bar in as_r_bars] == pytest.approx([0, as_f - 1, as_f - 1, -1, as_f - 1])


def test_the_dial_goes_from_AMORTIZE_to_FORGET(tmp_path: Path, canvas: list[Any]) -> None:
    plots.draw_dial(tmp_path / "dial.png", made_up())
    assert (tmp_path / "dial.png").stat().st_size > 5_000
    (axes,) = canvas[0].axes
    assert [text.get_text() for text in axes.texts] == list(KINDS)
    for line in axes.lines:
        assert list(line.get_xdata()) == [0.25, 0.5], "L and its repair, as shares of R's 40"
        assert list(line.get_ydata()) == pytest.approx([0.3, 0.2])


def test_nothing_to_draw(tmp_path: Path) -> None:
    for draw in (plots.draw_following, plots.draw_dial):
        with pytest.raises(ValueError, match="no figure of fidelity"):
            draw(tmp_path / "none.png", [])
    assert not list(tmp_path.iterdir())
