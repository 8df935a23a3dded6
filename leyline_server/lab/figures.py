"""A figure of the lab: what was measured, of how many, with its interval. Rows of a JSON-lines file.

Owns their form alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leyline_server.lab.statistics import wilson


@dataclass(frozen=True, slots=True)
class Figure:
    """`low` and `high`: the 95 % interval of a share, the 5th and 95th percentile of a distribution, or None."""

    bench: str
    case: str
    arm: str
    metric: str
    value: float
    unit: str = ""
    n: int = 1
    low: float | None = None
    high: float | None = None


def share(bench: str, case: str, arm: str, metric: str, outcomes: Sequence[bool]) -> Figure:
    """A share of outcomes, with Wilson's interval."""
    right, total = sum(outcomes), len(outcomes)
    return Figure(bench, case, arm, metric, right / total if total else 0.0, "share", total, *wilson(right, total))


def spread(bench: str, case: str, arm: str, metric: str, values: Sequence[float], unit: str = "") -> Figure:
    """A median and its 5th and 95th percentile."""
    ordered = sorted(values)
    at = [ordered[round(part * (len(ordered) - 1))] for part in (0.05, 0.5, 0.95)]
    return Figure(bench, case, arm, metric, at[1], unit, len(ordered), at[0], at[2])


def write(path: Path, figures: Iterable[Figure], common: dict[str, Any]) -> None:
    """One JSON object a line; `common` (model, device, versions, command) is part of each."""
    path.write_text("".join(json.dumps({**asdict(figure), **common}) + "\n" for figure in figures))
