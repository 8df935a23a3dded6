"""The lab's tables: nothing is cut, each share says of how many, and colour is no praise for what should be gone."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from leyline_server.lab import report
from leyline_server.lab.figures import Figure, share, spread

ARMS = ("F", "R", "L+50%")
SHARES = ("first token as F", "first token as R", "tells what was removed", "tells what stands there", "told apart")
FOLLOWS = ("follows F, where F and R differ", "follows R, where F and R differ")
SPREADS = ("KL from F", "KL from R", "greedy prefix with F", "greedy prefix with R", "computed again")


def of_a_kind(n: int, differ: int) -> list[Figure]:
    """All that a kind can have, as wide as it gets: 44 % to 100 % in nine of them, 2 to 3 figures in the others."""
    out = []
    for arm in ARMS:
        out += [share("fidelity", "pointer replaced", arm, metric, [True] * n) for metric in SHARES]
        out += [share("fidelity", "pointer replaced", arm, metric, [True] * differ) for metric in FOLLOWS]
        out += [spread("fidelity", "pointer replaced", arm, metric, [-1.23456e-12] * n) for metric in SPREADS]
    return out


def of_texts() -> list[Figure]:
    metrics = (("error of keys", 588), ("KL of logits", 16), ("largest difference of a logit", 16))
    drift = [Figure("drift", "1000 edits", "rounded once", metric, 2.5e-13, "", n) for metric, n in metrics]
    return [*drift, Figure("invariance", "layer 0", "k_pe turned to the same position", "AUC", 0.98, "", 36864)]


def shown(figures: list[Figure], width: int = 100, colours: bool = False) -> str:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None)
    report.show(console, figures)
    return out.getvalue()


def rows(text: str, title: str) -> list[str]:
    """The lines below this title, the head first, up to the next empty one."""
    lines = text.splitlines()
    at = lines.index(title)
    return lines[at + 1 : next(end for end in range(at, len(lines)) if not lines[end].strip())]


def test_every_table_fits_a_hundred_columns() -> None:
    for n, differ in ((4, 3), (60, 9), (1000, 999)):
        figures = of_a_kind(n, differ)
        text = shown([*figures, *of_texts()])
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 100
        tables = 4 + 2
        assert len([line for line in text.splitlines() if "arm" in line]) == tables, "no row has two lines"
        assert len([line for line in text.splitlines() if line.strip()]) == 2 * tables + 4 * len(ARMS) + 2
        for figure in figures:
            if figure.low is not None and figure.unit == "share":
                assert f"100% {figure.low:.0%}-100%" in text


def test_a_case_has_a_table_for_each_group_of_metrics() -> None:
    text = shown(of_a_kind(60, 60))
    head = {}
    for group in ("first token", "whom it follows", "how far", "cost"):
        head[group], *arms = rows(text, f"fidelity: pointer replaced, {group} (n = 60)")
        assert [arm.split()[0] for arm in arms] == list(ARMS)
    assert head["first token"].split() == ["arm", "first", "as", "F", "first", "as", "R"]
    for name in ("follows F", "follows R", "tells removed", "tells R's", "told apart"):
        assert name in head["whom it follows"]
    for name in ("KL from F", "KL from R", "prefix with F", "prefix with R"):
        assert name in head["how far"]
    assert head["cost"].split() == ["arm", "computed"]


def test_n_stands_in_the_cell_where_it_is_not_the_titles() -> None:
    text = shown(of_a_kind(60, 23))
    for line in rows(text, "fidelity: pointer replaced, whom it follows (n = 60)")[1:]:
        assert line.count("n=23") == 2
    assert text.count("n=23") == 2 * len(ARMS)
    assert "n=60" not in text
    assert "n=" not in shown(of_a_kind(60, 60))
    (_, line) = rows(shown(of_texts()), "drift: 1000 edits (n = 588)")
    assert line.split() == ["rounded", "once", "2.5e-13", "2.5e-13", "n=16", "2.5e-13", "n=16"]


def test_an_arm_without_a_figure_has_a_dash() -> None:
    figures = [figure for figure in of_a_kind(5, 5) if (figure.arm, figure.metric) != ("R", "told apart")]
    lines = rows(shown(figures), "fidelity: pointer replaced, whom it follows (n = 5)")
    assert [line.rstrip().endswith("-") for line in lines] == [False, False, True, False]


def test_only_agreement_of_first_tokens_is_coloured() -> None:
    green, yellow = "\x1b[32m", "\x1b[33m"
    for metric in (*SHARES, *FOLLOWS):
        coloured = metric.startswith("first token")
        assert (green in shown([share("fidelity", "removed", "L", metric, [True] * 60)], colours=True)) == coloured
        assert (yellow in shown([share("fidelity", "removed", "L", metric, [False] * 60)], colours=True)) == coloured
    undecided = shown([share("fidelity", "removed", "L", "first token as F", [True, False])], colours=True)
    assert green not in undecided
    assert yellow not in undecided
