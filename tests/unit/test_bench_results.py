"""What is kept of a measurement, and how it is shown."""

from __future__ import annotations

from bench.results import Bar, Measure, report, table, vector_flags
from bench.stats import Summary, side

AT_LEAST = Bar(key="faster", label="times faster", limit=9, sense="at_least")
AT_MOST = Bar(key="memory", label="memory", limit=0.4)
UNJUDGED = Bar(key="shown", label="shown only")


def measured(bar: Bar, value: float) -> Measure:
    return Measure(bar=bar, summary=Summary(value=value, n=3, spread=(value, value)))


def test_a_bar_is_met_at_its_very_limit_from_either_side() -> None:
    assert AT_LEAST.met(9) is True
    assert AT_LEAST.met(8.99) is False
    assert AT_MOST.met(0.4) is True
    assert AT_MOST.met(0.41) is False


def test_without_a_limit_nothing_is_judged() -> None:
    assert measured(UNJUDGED, 5).as_json()["met"] is None


def test_a_measure_keeps_value_bar_verdict_number_and_spread() -> None:
    kept = measured(AT_LEAST, 10.12345).as_json()
    assert kept["value"] == 10.123
    assert kept["bar"] == 9
    assert kept["met"] is True
    assert kept["n"] == 3
    assert kept["spread"] == [10.123, 10.123]


def test_what_could_not_be_measured_says_why_and_is_not_met() -> None:
    measure = Measure(bar=AT_MOST, summary=None, why_not="needs root")
    kept = measure.as_json()
    assert (kept["value"], kept["met"], kept["why_not"]) == (None, None, "needs root")
    assert "needs root" in table([measure])


def test_a_missed_bar_is_seen_in_the_table() -> None:
    shown = table([measured(AT_LEAST, 5), measured(AT_MOST, 0.3)])
    missed, met = (line for line in shown.splitlines() if "3" in line and "=" in line)
    assert "MISSED" in missed
    assert "MISSED" not in met


def test_a_report_has_its_measures_by_key() -> None:
    told = report(
        [measured(AT_LEAST, 10), measured(AT_MOST, 0.3)],
        machine={"cores": 2},
        date="2026-01-01T00:00:00+00:00",
        about={},
    )
    assert list(told["measures"]) == ["faster", "memory"]
    assert told["machine"] == {"cores": 2}


def test_both_sides_are_kept_in_their_unit() -> None:
    measure = Measure(
        bar=AT_LEAST,
        summary=Summary(value=10, n=2, spread=(10, 10)),
        unit="ms",
        ours=side([100, 110]),
        common_way=side([1000, 1100]),
    )
    kept = measure.as_json()
    assert kept["unit"] == "ms"
    assert kept["ours"] == {"n": 2, "median": 105, "p95": 110}
    assert kept["common_way"]["median"] == 1050


def test_vector_flags_name_what_decides_matrix_speed() -> None:
    assert vector_flags("processor\t: 0\nflags\t\t: fpu avx2 sse avx512_vnni\n") == [
        "avx2",
        "avx512_vnni",
    ]
    assert vector_flags("Features\t: fp asimd asimddp i8mm\n") == ["asimddp", "i8mm"]
