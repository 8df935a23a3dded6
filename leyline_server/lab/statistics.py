"""Intervals and tests for shares of right answers, and for scores that tell two kinds apart. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float] | NDArray[np.float64]

_Z = 1.959963984540054  # of 95 %


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927). Of nothing: [0, 1]."""
    if not total:
        return 0.0, 1.0
    share = right / total
    middle = share + _Z**2 / (2 * total)
    spread = _Z * sqrt(share * (1 - share) / total + _Z**2 / (4 * total**2))
    return max(0.0, (middle - spread) / (1 + _Z**2 / total)), min(1.0, (middle + spread) / (1 + _Z**2 / total))


def mcnemar(one: Sequence[bool], other: Sequence[bool]) -> float:
    """The two-sided exact p value that two paired series have equal shares (McNemar 1947).

    Raises ValueError when they are not paired.
    """
    if len(one) != len(other):
        raise ValueError(f"{len(one)} outcomes against {len(other)}: a paired test needs as many on both sides")
    only_one = sum(a and not b for a, b in zip(one, other, strict=True))
    only_other = sum(b and not a for a, b in zip(one, other, strict=True))
    differ = only_one + only_other
    tail = sum(comb(differ, k) for k in range(min(only_one, only_other) + 1)) / 2**differ
    return min(1.0, 2 * tail)


def paired_difference(one: Sequence[bool], other: Sequence[bool]) -> tuple[float, float, float]:
    """share(one) - share(other) of paired outcomes, and its 95 % interval (Newcombe 1998, method 10: Wilson's intervals
    of both, joined by the correlation of the pairs). An interval that includes zero is no difference."""
    mcnemar(one, other)  # raises when they are not paired
    n = len(one)
    if not n:
        return 0.0, -1.0, 1.0
    both = sum(a and b for a, b in zip(one, other, strict=True))
    ones, others = sum(one), sum(other)
    neither = n - ones - others + both
    p, q = ones / n, others / n
    (low_p, high_p), (low_q, high_q) = wilson(ones, n), wilson(others, n)
    product = ones * (n - ones) * others * (n - others)
    phi = 0.0
    if product:
        joint = float(both * neither - (ones - both) * (others - both))
        if joint > 0:  # continuity correction where the pairs agree
            joint = max(joint - n / 2, 0.0)
        phi = joint / sqrt(product)
    low = sqrt((p - low_p) ** 2 - 2 * phi * (p - low_p) * (high_q - q) + (high_q - q) ** 2)
    high = sqrt((high_p - p) ** 2 - 2 * phi * (high_p - p) * (q - low_q) + (q - low_q) ** 2)
    return p - q, p - q - low, p - q + high


def auc(positive: Scores, negative: Scores) -> float:
    """The area under the ROC curve: the chance that a positive scores above a negative, ties counted half (Mann and
    Whitney 1947). Exact. Raises ValueError when one side is empty."""
    wins = _wins(np.asarray(positive), np.sort(negative))
    if not len(positive) or not len(negative):
        raise ValueError(f"{len(positive)} positives and {len(negative)} negatives have no ROC curve")
    return wins / (len(positive) * len(negative))


def grouped_auc(
    groups: Sequence[tuple[Scores, Scores]], seed: int = 0, draws: int = 2000
) -> tuple[float, float, float]:
    """`auc` of all groups' (positives, negatives) together, and its 95 % interval: groups are drawn again, with
    replacement (Efron and Tibshirani 1993, chapter 13), since scores within one depend on each other. Of one group the
    interval says nothing: [0, 1]."""
    ordered = [np.sort(negative) for _, negative in groups]
    wins = np.array([[_wins(np.asarray(positive), negative) for negative in ordered] for positive, _ in groups])
    counts = np.array([[len(positive), len(negative)] for positive, negative in groups], np.float64)
    if not len(groups) or not counts.sum(0).all():
        raise ValueError("no positives or no negatives: there is no ROC curve")
    whole = float(wins.sum() / counts.sum(0).prod())
    if len(groups) == 1:
        return whole, 0.0, 1.0
    generator = np.random.default_rng(seed)
    often = generator.multinomial(len(groups), np.full(len(groups), 1 / len(groups)), draws).astype(np.float64)
    pairs = (often @ counts).prod(1)
    drawn = np.einsum("di,ij,dj->d", often, wins, often)[pairs > 0] / pairs[pairs > 0]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return whole, float(low), float(high)


def _wins(positive: NDArray[np.float64], ordered: NDArray[np.float64]) -> float:
    """How many (positive, negative) pairs the positive wins; a tie is half a win. `ordered`: negatives, ascending."""
    return (
        float(np.searchsorted(ordered, positive, "left").sum() + np.searchsorted(ordered, positive, "right").sum()) / 2
    )
