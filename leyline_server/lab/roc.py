"""ROC curves: how well scores tell two kinds apart. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float] | NDArray[np.float64]


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
