"""What a benchmark is: a name, a check, cases, and figures for each case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.record import Measured
from benchmarks.registry import Bed


class WrongResult(AssertionError):
    """A check failed: nothing is timed."""


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
    rows: the figures of a case. Yields as it goes; a case may be stopped between two of them.
    missing: why this bench can't run here (no recorded conversations, say); empty when it can.
    """

    name: str
    needs: Literal["cpu", "cuda"]
    check: Callable[[Bed], None]
    cases: Callable[[Bed], Sequence[str]]
    rows: Callable[[Bed, str], Iterable[Measured]]
    missing: Callable[[Bed], str] = _nothing_missing
