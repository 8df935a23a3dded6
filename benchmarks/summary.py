"""The judged figures of all results as one Markdown table. `python -m benchmarks.summary [DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import Row, read
from benchmarks.run import NAMES, RESULTS
from benchmarks.tables import number


def judged(directory: Path) -> list[Row]:
    """Rows with a goal, in the order of the benchmarks."""
    files = [directory / f"{name}.jsonl" for name in NAMES]
    return [row for file in files if file.is_file() for row in read(file) if row.goal is not None]


def markdown(rows: Iterable[Row]) -> str:
    """One line a row: what was measured, its median and bounds, the goal, and whether it is met."""
    lines = ["| benchmark | case | arm | figure | goal | median (p5 to p95) | met |", "| --- " * 7 + "|"]
    for row in rows:
        value = "-" if row.value is None else _with_unit(row.value, row.unit)
        if row.low is not None and row.high is not None:
            value += f" ({number(row.low)} to {number(row.high)})"
        assert row.goal is not None
        cells = (row.bench, row.case, row.arm, row.metric, _with_unit(row.goal, row.unit), value)
        lines.append(f"| {' | '.join(cells)} | {'yes' if row.met else '**no**'} |")
    return "\n".join(lines)


def _with_unit(value: float, unit: str) -> str:
    return f"{number(value)} {unit}"


if __name__ == "__main__":
    print(markdown(judged(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)))
