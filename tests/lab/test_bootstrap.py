"""Intervals over groups, by simulation: what depends within a group is not taken for as many witnesses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from leyline_server.lab.bootstrap import grouped_mean, paired_mean_difference
from leyline_server.lab.statistics import wilson

SIZE = 20


def sessions(rng: np.random.Generator, groups: int, breaks: float) -> NDArray[np.float64]:
    """Right answers of each session; so many break off somewhere and have no right one after it."""
    right = np.where(rng.random(groups) < breaks, rng.integers(0, SIZE, groups), SIZE)
    return right.astype(np.float64)


def sizes(groups: int) -> NDArray[np.float64]:
    return np.full(groups, float(SIZE))


@pytest.mark.parametrize(
    ("groups", "breaks"), [(200, 0.3), (200, 0.02), (60, 0.3), (20, 0.3), (10, 0.3), (4, 0.5), (2, 0.5), (1, 0.5)]
)
def test_equal_arms_are_seldom_called_different(groups: int, breaks: float) -> None:
    """Also where few sessions differ, or there are few: there percentiles alone call a tenth of them so."""
    rng, runs, called = np.random.default_rng(0), 500, 0
    for _ in range(runs):
        one, other = sessions(rng, groups, breaks), sessions(rng, groups, breaks)
        _, low, high = paired_mean_difference(one, other, sizes(groups), (0, 1))
        called += not low <= 0 <= high
    assert called <= 0.07 * runs


def test_a_difference_is_found_and_its_interval_holds_it() -> None:
    rng, runs, found, covered = np.random.default_rng(1), 500, 0, 0
    truth = -0.2 * (SIZE + 1) / (2 * SIZE)
    for _ in range(runs):
        value, low, high = paired_mean_difference(sessions(rng, 200, 0.5), sessions(rng, 200, 0.3), sizes(200), (0, 1))
        assert low <= value <= high
        found += high < 0
        covered += low <= truth <= high
    assert found > 0.7 * runs
    assert 0.92 * runs <= covered <= 0.98 * runs


def test_shares_of_groups_cover_the_truth() -> None:
    rng, runs, covered = np.random.default_rng(2), 500, 0
    truth = 1 - 0.3 * (SIZE + 1) / (2 * SIZE)
    for _ in range(runs):
        _, low, high = grouped_mean(sessions(rng, 200, 0.3), sizes(200), (0, 1))
        covered += low <= truth <= high
    assert 0.92 * runs <= covered <= 0.98 * runs


def test_groups_weigh_what_they_hold_and_repetition_is_no_evidence() -> None:
    rng = np.random.default_rng(3)
    size = rng.integers(1, 30, 40).astype(np.float64)
    total = rng.binomial(size.astype(int), rng.random(40)).astype(np.float64)
    value, low, high = grouped_mean(total, size)
    assert value == total.sum() / size.sum()
    assert low < value < high
    assert grouped_mean(10 * total, 10 * size) == pytest.approx((value, low, high))
    assert grouped_mean(total, size) == (value, low, high), "the seed is fixed"
    assert grouped_mean(total, size, seed=1)[1:] == pytest.approx((low, high), abs=0.02)
    _, narrow_low, narrow_high = grouped_mean(np.tile(total, 4), np.tile(size, 4))
    assert narrow_high - narrow_low == pytest.approx((high - low) / 2, rel=0.15)


def test_groups_that_are_all_alike_leave_what_wilson_leaves() -> None:
    assert grouped_mean([20.0] * 50, sizes(50), (0, 1)) == pytest.approx((1.0, *wilson(50, 50)))
    assert grouped_mean([0.0] * 50, sizes(50), (0, 1)) == pytest.approx((0.0, *wilson(0, 50)))
    value, low, high = paired_mean_difference([18.0] * 50, [18.0] * 50, sizes(50), (0, 1))
    assert (value, low, high) == pytest.approx((0.0, -wilson(0, 50)[1], wilson(0, 50)[1]))
    assert paired_mean_difference([7.0] * 50, [4.0] * 50, [1.0] * 50) == (3.0, 3.0, 3.0)
    assert paired_mean_difference([7.0], [4.0], [1.0]) == (3.0, 0.0, 3.0), "one pair says nothing"


def test_what_is_not_paired_or_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="2 groups against 1"):
        paired_mean_difference([1.0, 2.0], [1.0], [1.0, 1.0])
    for totals, counts in (([], []), ([1.0], [1.0, 1.0]), ([1.0], [0.0])):
        with pytest.raises(ValueError, match="every group needs members"):
            grouped_mean(totals, counts)
