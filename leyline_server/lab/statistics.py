"""Intervals and tests for shares of right answers. Knows no model; plain Python, for those who have nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

_Z = 1.959963984540054  # of 95 %


def wilson(right: float, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927). Of nothing: [0, 1]. `right` may count ties half."""
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
