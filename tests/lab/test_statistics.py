"""Intervals and tests against figures that others published."""

from __future__ import annotations

from random import Random

import pytest

from leyline_server.lab.roc import auc, grouped_auc
from leyline_server.lab.statistics import mcnemar, paired_difference, wilson


def test_wilson_intervals_are_those_of_newcombes_table() -> None:
    # Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3.
    for right, total, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        assert wilson(right, total) == pytest.approx((low, high), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def pairs(both: int, one: int, other: int, neither: int) -> tuple[list[bool], list[bool]]:
    first = [True] * (both + one) + [False] * (other + neither)
    second = [True] * both + [False] * one + [True] * other + [False] * neither
    return first, second


def test_mcnemar_is_the_exact_binomial_test_of_pairs_that_differ() -> None:
    assert mcnemar(*pairs(10, 0, 0, 10)) == 1.0
    assert mcnemar(*pairs(5, 1, 9, 5)) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(*pairs(5, 9, 1, 5)) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(*pairs(0, 5, 5, 0)) == 1.0
    with pytest.raises(ValueError, match="2 outcomes against 1"):
        mcnemar([True, False], [True])


def test_the_paired_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = Random(0)
    covered = 0
    for _ in range(1000):
        chosen = rng.choices(["both", "one", "other", "neither"], [0.5, 0.2, 0.1, 0.2], k=60)
        counts = [chosen.count(name) for name in ("both", "one", "other", "neither")]
        difference, low, high = paired_difference(*pairs(*counts))
        assert low <= difference <= high
        covered += low <= 0.1 <= high
    assert 930 <= covered <= 980


def test_equal_pairs_show_no_difference() -> None:
    same, low, high = paired_difference(*pairs(20, 3, 3, 4))
    assert same == 0
    assert low < 0 < high
    assert paired_difference(*pairs(30, 0, 0, 30))[1:] == pytest.approx((0, 0), abs=0.05)
    assert paired_difference([], []) == (0.0, -1.0, 1.0)


def test_auc_counts_pairs_and_half_of_ties() -> None:
    rng = Random(1)
    positive = [rng.randrange(8) + 1.5 * rng.randrange(2) for _ in range(60)]
    negative = [float(rng.randrange(8)) for _ in range(45)]
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    assert auc(positive, negative) == wins / (60 * 45)
    assert auc([1.0, 2.0], [0.0, 0.5]) == 1
    assert auc([0.0], [0.0, 0.0]) == 0.5
    assert auc(negative, positive) == pytest.approx(1 - auc(positive, negative))
    with pytest.raises(ValueError, match="0 positives and 1 negatives"):
        auc([], [1.0])


def test_the_auc_of_groups_is_that_of_all_scores_and_its_interval_that_of_groups() -> None:
    rng = Random(2)

    def group(above: float, size: int) -> tuple[list[float], list[float]]:
        return [rng.gauss(above, 1) for _ in range(size)], [rng.gauss(0, 1) for _ in range(size)]

    groups = [group(rng.choice([0.5, 1.5]), 50) for _ in range(20)]
    whole, low, high = grouped_auc(groups)
    positive, negative = ([score for part in groups for score in part[side]] for side in (0, 1))
    assert whole == pytest.approx(auc(positive, negative))
    assert low < whole < high
    assert grouped_auc(groups, seed=1)[1:] == pytest.approx((low, high), abs=0.02)
    # The same scores many times over are no more evidence; more groups of them are.
    assert grouped_auc([(10 * p, 10 * n) for p, n in groups])[1:] == pytest.approx((low, high))
    _, narrow_low, narrow_high = grouped_auc(4 * groups)
    assert narrow_high - narrow_low == pytest.approx((high - low) / 2, rel=0.2)
    assert grouped_auc(groups[:1])[1:] == (0, 1)
    with pytest.raises(ValueError, match="no ROC curve"):
        grouped_auc([([], [1.0])])
