"""What a benchmark is: a name, a check, cases, and figures for each case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import RenderableType

from benchmarks.record import Measured, Row
from benchmarks.registry import Bed


class WrongResult(AssertionError):
    """A check failed: nothing is timed."""


class OutOfTime(Exception):
    """`Bed.until` is over in the middle of a case: these parts of it were not begun."""

    def __init__(self, left: Sequence[str]) -> None:
        super().__init__("; ".join(left))
        self.left = list(left)


def require(condition: bool, message: str) -> None:
    """Raises WrongResult."""
    if not condition:
        raise WrongResult(message)


def _nothing_missing(bed: Bed) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark. Every one runs at any shape; figures of the full one alone are judged.

    needs: "cuda" where a CPU's figures would say nothing even about the code path.
    check: raises WrongResult; runs before anything is timed.
    cases: what `rows` is called with, one after another.
    rows: the figures of a case. Yields as it goes; a case of long parts raises OutOfTime between two of them.
    missing: why this bench can't run here (no recorded conversations, say); empty when it can.
    about: what is measured, in words, where it is not the bed's model.
    host: there is no model in it, but ids and the host's clock: its sizes are the same everywhere, and always judged.
    summary: a table of its own from its rows, shown after that of all figures.
    """

    name: str
    needs: Literal["cpu", "cuda"]
    check: Callable[[Bed], None]
    cases: Callable[[Bed], Sequence[str]]
    rows: Callable[[Bed, str], Iterable[Measured]]
    missing: Callable[[Bed], str] = _nothing_missing
    about: str = ""
    host: bool = False
    summary: Callable[[Sequence[Row]], RenderableType] | None = None
