"""Figures of rounds -> value and spread."""

from __future__ import annotations

import pytest

from bench.stats import p95_ratio, pair_ratios, side, spread, summary


def test_a_ratio_is_taken_within_each_round() -> None:
    # The machine was twice as slow in the second round: for both, so the ratio does not see it.
    assert pair_ratios([1000, 2000], [100, 200]) == [10, 10]


def test_a_round_that_misses_one_side_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        pair_ratios([1000, 2000], [100])


def test_the_value_is_the_median_and_the_spread_holds_the_middle_half() -> None:
    found = summary([1, 2, 3, 4, 100])
    assert (found.value, found.n, found.spread) == (3, 5, (2, 4))


def test_few_values_are_shown_from_lowest_to_highest() -> None:
    assert spread([3, 1, 2]) == (1, 3)


def test_p95_of_twenty_is_the_nineteenth() -> None:
    assert side(list(range(1, 21))).p95 == 19


def test_a_p95_ratio_is_of_all_rounds_together_and_its_spread_of_each() -> None:
    found = p95_ratio([[100, 200], [100, 300]], [[100, 100], [100, 150]])
    assert found.value == 300 / 150
    assert (found.n, found.spread) == (4, (2.0, 2.0))


def test_no_values_have_no_summary() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summary([])
