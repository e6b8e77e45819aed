"""The plan against a plain start: what counts, and what a difference is."""

from __future__ import annotations

from typing import Any

import pytest

from edgellm.comparison import PLAIN, Ratio, compare, table
from edgellm.hardware import HostProfile
from edgellm.measured import PLANNED, Trial, plain_start
from tests.rolled_out import Case, rolled_out


def rounds(plain_ms: tuple[float, ...], planned_ms: tuple[float, ...], **more: Any) -> list[Trial]:
    """One figure a round for each, as TTFT; later tokens take 10 ms under both."""
    return [
        Trial(candidate=name, round=n, condition="idle", ttft_ms=ms, tpot_ms=10.0, **more)
        for n, pair in enumerate(zip(plain_ms, planned_ms, strict=True))
        for name, ms in zip((PLAIN, PLANNED), pair, strict=True)
    ]


def ttft(trials: list[Trial]) -> Ratio:
    found = compare(trials, ended="rounds", duration_s=1.0)
    return next(ratio for ratio in found.ratios if ratio.metric == "ttft_ms")


def test_a_ratio_is_of_one_rounds_times_with_its_quartiles() -> None:
    # Each round is slower than the one before, for both alike
    one = ttft(rounds((200, 400, 600, 800, 1000), (100, 200, 300, 400, 500)))
    assert (one.n, one.ratio, one.low, one.high) == (5, 2.0, 2.0, 2.0)
    assert (one.plain_ms, one.planned_ms) == (600, 300)
    assert one.outcome == "faster"


@pytest.mark.parametrize(
    ("planned_ms", "outcome"),
    [
        ((90, 91, 92, 93, 94), "faster"),
        ((110, 111, 112, 113, 114), "slower"),
        ((90, 95, 100, 105, 110), "no difference"),
    ],
)
def test_a_difference_is_one_where_most_rounds_agree(
    planned_ms: tuple[float, ...], outcome: str
) -> None:
    assert ttft(rounds((100,) * 5, planned_ms)).outcome == outcome


def test_few_rounds_tell_nothing() -> None:
    assert ttft(rounds((100,) * 4, (10,) * 4)).outcome == "4 rounds tell nothing"


def test_a_round_without_its_partner_and_a_disturbed_one_do_not_count() -> None:
    trials = rounds((100,) * 6, (50,) * 6)
    del trials[0]
    found = compare(
        [*trials, *rounds((900,) * 9, (1,) * 9, disturbed=True)[12:]], ended="", duration_s=1.0
    )
    assert {ratio.n for ratio in found.ratios} == {5}
    assert found.left_out == 6
    assert "6 trials were disturbed" in table(found)[-1]


def test_from_the_first_throttled_round_on_nothing_counts() -> None:
    trials = rounds((100,) * 7, (50,) * 7)
    hot = Trial(
        candidate=PLANNED, round=5, condition="loaded", ttft_ms=1.0, tpot_ms=1.0, throttled=True
    )
    assert ttft([*trials, hot]).n == 5


def test_nothing_in_common_is_no_ratio() -> None:
    assert compare(rounds((100,), (50,))[:1], ended="", duration_s=1.0).ratios == ()


def test_the_table_has_a_line_for_each_figure_under_each_condition() -> None:
    found = compare(rounds((200,) * 5, (100,) * 5), ended="", duration_s=1.0)
    head, first, *rest = table(found)
    assert head.split()[:3] == ["plain", "start", "plan"]
    assert first.split() == [
        *("idle", "TTFT", "200.0", "ms", "100.0", "ms", "2.00", "(2.00", "to", "2.00)", "5"),
        "faster",
    ]
    assert len(rest) == 2


def test_the_json_says_what_the_table_says() -> None:
    found = compare(rounds((200,) * 5, (100,) * 5), ended="12 rounds", duration_s=4.0).to_json()
    assert found["ended"] == "12 rounds"
    assert found["ratios"][0] == {
        **{"condition": "idle", "metric": "ttft_ms", "n": 5, "plain_ms": 200, "planned_ms": 100},
        **{"ratio": 2.0, "low": 2.0, "high": 2.0, "outcome": "faster"},
    }


def test_the_plain_start_has_the_name_that_is_looked_for() -> None:
    case = rolled_out(Case(board="raspberry-pi-5"))
    profile: HostProfile = case.observed.profile
    assert plain_start(profile, case.plan).name == PLAIN
