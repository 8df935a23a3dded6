"""Means and paired differences of groups, with intervals from a bootstrap over groups. Knows no model.

For outcomes that depend on each other within a group (tasks of a session) while groups do not. A difference whose
interval includes zero is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from leyline_server.lab.statistics import wilson

Totals = Sequence[float] | NDArray[np.float64]
Figure = tuple[float, float, float]
Bounds = tuple[float, float]
ALPHA = 0.05


def grouped_mean(
    totals: Totals, sizes: Totals, bounds: Bounds | None = None, seed: int = 0, draws: int = 5000
) -> Figure:
    """sum(totals) / sum(sizes), and its 95 % interval: groups are drawn again, with replacement (Efron and Tibshirani
    1993, percentiles).

    totals: what the members of each group add up to; sizes: how many they are. bounds: what a member lies between,
    where there are such; groups that are all alike then have the interval that Wilson's leaves to some not being so.
    Raises ValueError where there is nothing.
    """
    total, size = np.asarray(totals, np.float64), np.asarray(sizes, np.float64)
    if total.shape != size.shape or not size.size or not (size > 0).all():
        raise ValueError(f"{total.size} groups with sizes of {size.size}: every group needs members")
    value = float(total.sum() / size.sum())
    if bounds is not None and np.ptp(total / size) == 0:
        others = wilson(0, len(total))[1]
        low, high = (value + others * (bound - value) for bound in bounds)
        return value, low, high
    often = _often(len(total), seed, draws)
    low, high = np.quantile((often @ total) / (often @ size), [ALPHA / 2, 1 - ALPHA / 2])
    return value, float(low), float(high)


def paired_mean_difference(
    one: Totals, other: Totals, sizes: Totals, bounds: Bounds | None = None, seed: int = 0, draws: int = 5000
) -> Figure:
    """The mean of one less that of the other, paired by group, and its 95 % interval as above.

    Where few groups differ, or there are few, percentiles are too narrow: the interval is widened to zero unless one
    and other, exchanged at random group by group, differ as much in less than 5 % of draws (Fisher 1935).
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} groups against {len(other)}: a paired difference needs as many on both sides")
    differences = np.asarray(one, np.float64) - np.asarray(other, np.float64)
    span = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    value, low, high = grouped_mean(differences, sizes, span, seed, draws)
    exchanged = np.abs(_signs(len(differences), seed, draws) @ differences)
    as_much = (exchanged >= abs(differences.sum()) - 1e-9 * np.abs(differences).sum()).sum()
    if (as_much + 1) / (draws + 1) >= ALPHA:
        low, high = min(low, 0.0), max(high, 0.0)
    return value, low, high


@lru_cache(maxsize=4)
def _often(groups: int, seed: int, draws: int) -> NDArray[np.float64]:
    """[draws, groups]: how often each group is drawn."""
    rng = np.random.default_rng((seed, 0))
    return rng.multinomial(groups, np.full(groups, 1 / groups), draws).astype(np.float64)


@lru_cache(maxsize=4)
def _signs(groups: int, seed: int, draws: int) -> NDArray[np.float64]:
    """[draws, groups] of 1 and -1."""
    rng = np.random.default_rng((seed, 1))
    return 1 - 2 * rng.integers(0, 2, (draws, groups)).astype(np.float64)
