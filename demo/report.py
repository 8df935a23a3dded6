"""What the reader sees: a line a turn, the table, the verdict, the JSON. Computes nothing but sums and shares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.arms import Arm
from demo.record import ArmResult, Turn
from demo.resume import Removed, Resumed

MIN_RIGHT_SHARE = 11 / 12
MAX_COMPUTED_SHARE = 0.60
RIVAL, WINNER = "re-prefill", "AMORTIZE"
TABLE_WIDTH = 120


def turn_line(turn: Turn, rival: Turn | None = None) -> Text:
    """`turn 7: read_file(a.ini) 312 -> 4 tokens, kept 2,140, computed 31, first token 12 ms; re-prefill 95 ms`."""
    line = Text.assemble(("turn ", "dim"), f"{turn.index:2d}", (": ", "dim"))
    line.append(_shown(turn.did, 46), "cyan")
    for cut in turn.cuts:
        line.append(f" | {_shown(cut.what, 34)} ", "red")
        line.append(f"{cut.removed:,} -> {cut.inserted:,} tokens", "red")
    line.append(f" | kept {turn.kept + turn.prefix_hits:,}, ", "dim")
    line.append(f"computed {turn.computed:,}", "yellow")
    line.append(f", first token {turn.first_token_ms:,.0f} ms", "bold")
    if rival is not None:
        line.append(f"; re-prefill {rival.first_token_ms:,.0f} ms", "dim")
    return line


def _shown(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 2] + ".."


def median_p95(values: Sequence[float]) -> tuple[float, float]:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def table(results: Sequence[ArmResult]) -> Table:
    """One row an arm. There is a column for right answers if there are answers."""
    judged = any(result.answers for result in results)
    out = Table(box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    out.add_column("arm", no_wrap=True)
    if judged:
        out.add_column("answers\nright", justify="right", no_wrap=True)
    for name in (
        "prompt\ntokens",
        "prefix\nhits",
        "\nkept",
        "\nturned",
        "\nprefilled",
        "\ncomputed",
        "slots\nin use",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("first token:\nmedian", justify="right", no_wrap=True)
    out.add_column("\np95", justify="right", no_wrap=True)
    for result in results:
        median, p95 = median_p95([turn.first_token_ms for turn in result.turns])
        cells = [f"{result.right} of {len(result.answers)}"] if judged else []
        cells += [f"{result.total(what):,}" for what in ("prompt", "prefix_hits", "kept", "turned", "computed")]
        cells += [f"{result.rows_computed:,}", f"{result.slots_in_use:,}", f"{median:,.0f} ms", f"{p95:,.0f} ms"]
        out.add_row(result.name, *cells, style="bold green" if result.name == WINNER else None)
    return out


def resumed_lines(resumed: Resumed) -> str:
    return (
        f"killed after its tool had run; resumed by id: {resumed.tokens:,} tokens, {resumed.pending:,} of them the "
        f"dead client's last words, not computed yet\n"
        f"edits planned again {resumed.planned}, made again {resumed.edited}; kept {resumed.kept:,}, computed "
        f"{resumed.computed:,}: those {resumed.pending:,} and the reply's opening; it {'; then '.join(resumed.steps)}"
    )


def removed_line(removed: Removed) -> str:
    remains = "kept rows had been computed from it" if removed.influence_remains else "no row comes from it"
    steps = "; then ".join(removed.steps)
    return f"{removed.arm} ({remains}): {removed.question} (it was {removed.value!r}) -> {steps}"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is judged."""

    what: str
    met: bool


def judge(results: Sequence[ArmResult], edited: Sequence[str]) -> list[Check]:
    """The edited arms answer well, and AMORTIZE computes clearly less than re-prefill, counted where the model is
    called. `edited` names the arms whose answers count."""
    by_name = {result.name: result for result in results}
    checks = []
    for name in edited:
        result = by_name[name]
        met = result.right >= MIN_RIGHT_SHARE * len(result.answers)
        checks.append(Check(f"{name} answers {result.right} of {len(result.answers)} (at least 11 of 12)", met))
    return [*checks, judge_computed(by_name), judge_counts(results)]


def judge_computed(by_name: Mapping[str, ArmResult]) -> Check:
    ours, theirs = by_name[WINNER].rows_computed, by_name[RIVAL].rows_computed
    share = ours / theirs if theirs else 1.0
    bound = f"at most {MAX_COMPUTED_SHARE:.0%}"
    return Check(
        f"{WINNER} computed {ours:,} rows, {RIVAL} {theirs:,}: {share:.0%} ({bound})", share <= MAX_COMPUTED_SHARE
    )


def judge_counts(results: Sequence[ArmResult]) -> Check:
    """Each reply computes what it reports, and then every token it generates but the last, which is only sampled."""
    reported = [result.total("computed") + result.total("generated") - len(result.turns) for result in results]
    met = reported == [result.rows_computed for result in results]
    return Check("what the replies reported adds up to what the model was called for", met)


def show_checks(console: Console, checks: Sequence[Check]) -> bool:
    """Prints them. Whether all are met."""
    for check in checks:
        console.print(
            Text("  met  " if check.met else "NOT MET", "green" if check.met else "bold red"), Text(check.what)
        )
    return all(check.met for check in checks)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def save_json(path: Path, arms: Sequence[Arm], results: Sequence[ArmResult], **more: Any) -> None:
    """Everything: every turn of every arm, every answer, and `more`."""
    content = {"arms": [asdict(arm) for arm in arms], "results": [asdict(result) for result in results], **more}
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n")
