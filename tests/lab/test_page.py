"""docs/fidelity.md says what its rows say: each line of its tables is made anew from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fidelity.md").read_text()
KINDS = {
    "removed": "held the asked value, is cleared (*removed*)",
    "removed later": "the same, after the agent's next call (*removed later*)",
    "removed (8 edits)": "*removed*, after seven other edits",
    "replaced": "now says another value (*replaced*)",
    "replaced (8 edits)": "*replaced*, after seven other edits",
    "outdated": "was newer than another reading (*outdated*)",
    "pointer removed": "said where to look, is cleared (*pointer removed*)",
    "pointer replaced": "now says to look elsewhere (*pointer replaced*)",
}
HIDING = ("removed", "removed later", "removed (8 edits)", "outdated", "pointer removed")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Model:
    """The rows of one model, by what they say."""

    def __init__(self, name: str) -> None:
        own = rows(ROOT / "docs" / "fidelity" / name / "lab.jsonl")
        self.rows = {(row["case"], row["arm"], row["metric"]): row for row in own}

    def share(self, case: str, arm: str, metric: str) -> str:
        """With its interval."""
        row = self.rows[case, arm, metric]
        return f"{100 * row['value']:.0f} % ({100 * row['low']:.0f}-{100 * row['high']:.0f})"

    def number(self, case: str, arm: str, metric: str) -> str:
        value = self.rows[case, arm, metric]["value"]
        return f"{value:.0e}".replace("e-0", "e-") if value < 0.1 else f"{value:.1g}"


TINY, NOTES = Model("tiny"), Model("notes")


def following() -> Iterator[str]:
    for kind, told in KINDS.items():
        first = [TINY.share(kind, arm, "first token as R") for arm in ("L", "L+16")]
        far = ", ".join(TINY.number(kind, arm, "KL from R") for arm in ("L", "L+16", "N"))
        yield f"| {told} | {TINY.share(kind, 'L', 'first token as F')} | {' | '.join(first)} | {far} |"


def trained() -> Iterator[str]:
    for kind in KINDS:
        cells = [model.share(kind, "L", "first token as F") for model in (TINY, NOTES)]
        cells += [NOTES.share(kind, "L+16", "first token as F")]
        cells += [NOTES.share(kind, arm, "tells what was removed") for arm in ("L", "L+50%")]
        yield f"| *{kind}* | {' | '.join(cells)} |"


def apart() -> Iterator[str]:
    for kind in HIDING:
        cells = [TINY.share(kind, arm, "told apart") for arm in ("L", "L+16", "L+50%")]
        cells += [NOTES.share(kind, arm, "told apart") for arm in ("L", "L+16", "L+50%")]
        yield f"| *{kind}* | {' | '.join(cells)} |"


def policies() -> Iterator[str]:
    own = rows(ROOT / "benchmarks" / "results" / "policy.jsonl")
    told = {row["case"].partition("; ")[2] for row in own}
    for case in sorted(told):
        whole = {(r["arm"], r["metric"]): r for r in own if r["case"] == f"whole session; {case}"}
        for arm in dict.fromkeys(name for name, _ in whole):
            cells = [
                f"{whole[arm, 'tasks solved']['value']:.2f} %{less(whole, arm, 'tasks solved', 1)}",
                f"{whole[arm, 'right throughout']['value']:.1f} %{less(whole, arm, 'right throughout', 0)}",
                f"{whole[arm, 'tokens computed']['value']:,.0f}{less(whole, arm, 'tokens computed', 0)}",
                f"{whole[arm, 'first token']['value']:.0f} ms{less(whole, arm, 'first token', 0)}",
            ]
            if arm != "keep all" or "stale" not in case:
                yield f"| {arm.removesuffix(', AMORTIZE') if 'stale' in arm else arm} | {' | '.join(cells)} |"


def less(whole: dict[tuple[str, str], dict[str, Any]], arm: str, metric: str, digits: int) -> str:
    """The interval of its difference from keep all."""
    row = whole.get((arm, f"{metric}, less keep all"))
    if row is None:
        return ""
    if row["low"] <= 0 <= row["high"]:
        return ", no difference"
    return f" ({row['low']:+,.{digits}f} to {row['high']:+,.{digits}f})"


@pytest.mark.parametrize("line", [*following(), *trained(), *apart(), *policies()])
def test_the_page_has_the_line(line: str) -> None:
    assert line in PAGE


if __name__ == "__main__":
    for made in (following, trained, apart, policies):
        print("\n".join(made()), "\n")
