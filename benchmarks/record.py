"""What a benchmark writes down: one row a figure, one line of JSON a row.

Owns the fields of a row and what stands behind them (medians, bounds, versions, commit). Knows no benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

SOFTWARE: Final = ("torch", "triton", "transformers", "grpcio")


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of one arm in one case.

    value: the median where there are several samples, else the one number; None where it could not be had.
    low, high: 5th and 95th percentile of the samples, or the 95 % interval of a share or a difference; None for a
        single number.
    goal, met: what issue 3 asks for, and whether `value` is there; None where nothing is asked.
    """

    case: str
    arm: str
    metric: str
    value: float | None
    unit: str
    n: int = 1
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    met: bool | None = None

    def at_most(self, goal: float, applies: bool = True) -> Measured:
        return self._judged(goal, applies, lambda value: value <= goal)

    def at_least(self, goal: float, applies: bool = True) -> Measured:
        return self._judged(goal, applies, lambda value: value >= goal)

    def _judged(self, goal: float, applies: bool, met: Any) -> Measured:
        """`applies`: goals are for the full shape on its device, and mean nothing elsewhere."""
        if not applies or self.value is None:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Measured(**{**values, "goal": float(goal), "met": bool(met(self.value))})


def measured(case: str, arm: str, metric: str, samples: Sequence[float], unit: str) -> Measured:
    """Median with 5th and 95th percentile. Raises ValueError for no samples."""
    if not len(samples):
        raise ValueError(f"{case}, {arm}, {metric}: no samples")
    low, middle, high = (float(x) for x in np.percentile(np.asarray(samples, np.float64), [5, 50, 95]))
    return Measured(case, arm, metric, middle, unit, len(samples), low, high)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a results file."""

    bench: str
    case: str
    arm: str
    metric: str
    value: float | None
    unit: str
    n: int
    low: float | None
    high: float | None
    goal: float | None
    met: bool | None
    device: str
    dtype: str
    versions: Mapping[str, str]
    commit: str
    command: str


class Recorder:
    """Turns figures into rows and appends them to NAME.jsonl, at once, so that a run that is cut short leaves them.

    The first row takes the place of an earlier run's: until then the file is left as it is, so that a run that
    measures nothing costs no results.

    model: what was run, in words ("DeepSeek-V2-Lite's shape, random weights"); it stands among the versions.
    only: what names of the cases that are measured have in them; rows of others stay in the file.
    """

    def __init__(
        self,
        bench: str,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        model: str,
        command: str,
        only: Sequence[str] = (),
    ) -> None:
        self._bench, self._path, self._command = bench, path, command
        self._device, self._dtype = device_name(device), str(dtype).removeprefix("torch.")
        self._versions = {"model": model, **versions(device)}
        self._commit = commit()
        self._only = only
        self.rows: list[Row] = []

    def add(self, figure: Measured) -> Row:
        row = Row(
            bench=self._bench,
            **asdict(figure),
            device=self._device,
            dtype=self._dtype,
            versions=self._versions,
            commit=self._commit,
            command=self._command,
        )
        line = _line(row)
        if not self.rows:
            self._begin()
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(line)
        return row

    def _begin(self) -> None:
        """The file with the rows that stay, put in place whole: a run killed here leaves the old one."""
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read(path) if not chosen(row.case, self._only)] if path.is_file() else []
        beside = path.with_name(f"{path.name}.new")
        beside.write_text("".join(_line(row) for row in kept))
        beside.replace(path)


def chosen(case: str, only: Sequence[str]) -> bool:
    """Whether a case is one of those that a run was asked for; all are when it was asked for none."""
    return not only or any(text in case for text in only)


def _line(row: Row) -> str:
    return json.dumps(asdict(row), allow_nan=False) + "\n"


def read(path: Path) -> list[Row]:
    """The rows of a results file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def versions(device: torch.device) -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    out["torch"] = torch.__version__
    if device.type == "cuda":
        out["cuda"] = str(torch.version.cuda)
    return out


def commit() -> str:
    """The revision of the tree, with "+" when it has changes; BENCH_COMMIT where there is no git."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    root = Path(__file__).parents[1]
    try:
        revision = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if changed else "")


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
