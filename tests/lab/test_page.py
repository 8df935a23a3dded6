"""docs/fidelity.md and docs/content-reuse.md say what their rows say: each line of a table is made anew from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline_server.lab import content

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fidelity.md").read_text()
CONTENT_PAGE = (ROOT / "docs" / "content-reuse.md").read_text()
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

    def __init__(self, path: str) -> None:
        own = rows(ROOT / "docs" / path)
        self.rows = {(row["case"], row["arm"], row["metric"]): row for row in own}

    def share(self, case: str, arm: str, metric: str) -> str:
        """With its interval."""
        row = self.rows[case, arm, metric]
        return f"{100 * row['value']:.0f} % ({100 * row['low']:.0f}-{100 * row['high']:.0f})"

    def number(self, case: str, arm: str, metric: str) -> str:
        value = self.rows[case, arm, metric]["value"]
        return f"{value:.0e}".replace("e-0", "e-") if value < 0.1 else f"{value:.1g}"


TINY, CONTROL, NOTES = (Model(f"fidelity/{name}/lab.jsonl") for name in ("tiny", "control", "notes"))


def following() -> Iterator[str]:
    for kind, told in KINDS.items():
        first = [TINY.share(kind, arm, "first token as R") for arm in ("L", "L+16")]
        far = ", ".join(TINY.number(kind, arm, "KL from R") for arm in ("L", "L+16", "N"))
        yield f"| {told} | {TINY.share(kind, 'L', 'first token as F')} | {' | '.join(first)} | {far} |"


def trained() -> Iterator[str]:
    for kind in KINDS:
        cells = [model.share(kind, "L", "first token as F") for model in (TINY, CONTROL, NOTES)]
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


def needles() -> Iterator[str]:
    for name in ("tiny", "notes"):
        model = Model(f"content-reuse/{name}.jsonl")
        for kind in content.KINDS:
            cells = [model.share(kind, arm, "needle found") for arm in ("C", "C+16", "C+15%", "C+50%", "N")]
            yield f"| {name}, {kind} | {' | '.join(cells)} | {model.number(kind, 'C', 'KL from F')} |"


def found() -> Iterator[str]:
    arms = {
        "blocks of 128": "fixed blocks",
        "windows of 128, any offset": "windows",
        "threshold": "the paper's",
        "threshold, and windows": "and windows",
        "threshold, shared parts marked": "with markers",
        "the same, and windows": "and windows",
        "local minimum": "local minima",
        "local minimum, extended": ".. extended",
        "leyline: fingerprints": "**fingerprints**",
    }
    yield "| | " + " | ".join([*arms.values(), "all"]) + " |"
    own = rows(ROOT / "benchmarks" / "results" / "content_recovery.jsonl")
    values = {(row["case"].partition(";")[0], row["arm"], row["metric"]): row["value"] for row in own}
    for case in dict.fromkeys(case for case, _, metric in values if metric == "found of what is there"):
        cells = [values.get((case, arm, "found of what is there")) for arm in arms]
        all_tokens = [values[case, arm, "reused of all tokens"] for arm in ("exact prefix", OURS, "all that is there")]
        shares = " | ".join("-" if cell is None else f"{cell:.1f}" for cell in cells)
        yield f"| {case.partition(': ')[2]} | {shares} | {', '.join(f'{one:.1f}' for one in all_tokens)} |"


def served() -> Iterator[str]:
    own = rows(ROOT / "benchmarks" / "results" / "content_recovery.jsonl")
    arms = ["served: PREFIX", "served: CONTENT", "served: CONTENT, least share 0.75", "all that is there"]
    values = {(row["case"].partition(";")[0], row["arm"]): row["value"] for row in own if "of all" in row["metric"]}
    for case in dict.fromkeys(case for case, _ in values):
        yield f"| {case.partition(': ')[2]} | {' | '.join(f'{values[case, arm]:.1f}' for arm in arms)} |"


def saved() -> Iterator[str]:
    own = rows(ROOT / "benchmarks" / "results" / "content_hits.jsonl")
    moved = {(row["arm"], row["metric"]): row for row in own if "moved" in row["case"]}
    for arm in dict.fromkeys(arm for arm, _ in moved):
        first, full = moved[arm, "first token"], arm == "full prefill"
        yield " | ".join(
            (
                f"| {arm}",
                f"{1e3 * first['value']:.0f} ms ({1e3 * first['low']:.0f} to {1e3 * first['high']:.0f})",
                "-" if full else f"{moved[arm, 'full prefill over it']['value']:.1f} x",
                f"{moved[arm, 'computed']['value']:,.0f}",
                f"{moved[arm, 'energy']['value']:.0f} J",
                "- |" if full else f"{moved[arm, 'energy saved']['value']:.0f} % |",
            )
        )


OURS = "leyline: fingerprints"


@pytest.mark.parametrize("line", [*needles(), *found(), *served(), *saved()])
def test_the_page_of_content_reuse_has_the_line(line: str) -> None:
    assert line in CONTENT_PAGE


@pytest.mark.parametrize("line", [*following(), *trained(), *apart(), *policies()])
def test_the_page_has_the_line(line: str) -> None:
    assert line in PAGE


if __name__ == "__main__":
    for made in (following, trained, apart, policies, needles, found):
        print("\n".join(made()), "\n")
