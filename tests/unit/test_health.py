"""The probe's line -> SmokeResult, and what makes a host healthy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import ParseError
from edgellm.health import (
    HostState,
    LastGood,
    Peer,
    Sample,
    SampleTogether,
    SmokeFailure,
    SmokeResult,
    TtftBudget,
    compare_with_peers,
    judge,
)
from edgellm.settings import Settings

PROBE = Path(__file__).parents[2] / "edgellm_server" / "probe.py"
BUDGET = TtftBudget(median_ttft_ms=1500)

# probe.py against a demo host, 2026-12-02; the lists of single values shortened to two requests
HEALTHY: dict[str, Any] = {
    "schema": 1,
    "ready": True,
    "ready_after_ms": 812.4,
    "n_requested": 2,
    "cold_ttft_ms": 402.7,
    "n": 2,
    "ttft_ms": [112.0, 140.2],
    "tpot_ms": [36.1, 36.4],
    "e2el_ms": [940.1, 977.5],
    "output_tokens": [24, 24],
    "median_ttft_ms": 126.1,
    "p95_ttft_ms": 138.8,
    "median_tpot_ms": 36.2,
    "output_throughput": 27.6,
    "answer_sample": "The sea is blue because",
    "failures": [],
    "host": {
        "psi_cpu_some_avg10": 45.17,
        "loadavg_1": 2.84,
        "temperature_c": 52.1,
        "cpu_freq_khz": None,
        "throttled": None,
    },
}

SAMPLE = {
    "n": 2,
    "median_ttft_ms": 126.1,
    "p95_ttft_ms": 138.8,
    "max_ttft_ms": 140.2,
    "median_tpot_ms": 36.2,
    "output_throughput": 27.6,
}
# What schema 2 has beside; probe.py on this machine, 2026-12-02, and a Raspberry Pi's heat
APART: dict[str, Any] = {
    "schema": 2,
    "max_ttft_ms": 140.2,
    "new_prefix_ttft_ms": 180.5,
    "cold": {**SAMPLE, "n": 1},
    "varied": SAMPLE,
    "known_prefix": {**SAMPLE, "median_ttft_ms": 40.1},
    "concurrency": [{"k": 1, **SAMPLE}, {"k": 4, **SAMPLE, "n": 8, "output_throughput": 61.0}],
    "host_before": {"psi_cpu_some_avg10": 2.5, "temperature_c": 61.0, "throttled": "0x0"},
    "host": {
        "psi_cpu_some_avg10": 45.17,
        "psi_memory_some_avg10": 0.0,
        "psi_io_some_avg10": 0.4,
        "loadavg_1": 2.84,
        "temperature_c": 82.3,
        "cpu_freq_khz": 1500000,
        "cpu_freq_max_khz": 2400000,
        "throttled": "0x50004",
        "cooling_state": None,
        "throttle_count": None,
    },
    "held_up_ms": 3.1,
    "overhead_ms": 12.0,
}


def line(**changed: Any) -> str:
    return json.dumps({**HEALTHY, **changed})


def smoke(median_ttft_ms: float | None = 126.1, **changed: Any) -> SmokeResult:
    """A cool and idle host's, of schema 2."""
    calm = {"psi_cpu_some_avg10": 0.5, "temperature_c": 48.0, "throttled": "0x0"}
    own = {"host": calm, "host_before": calm, "median_ttft_ms": median_ttft_ms}
    return SmokeResult.parse(line(**{**APART, **own, **changed}))


def test_a_healthy_line_reads_as_its_figures() -> None:
    assert SmokeResult.parse(line()) == SmokeResult(
        ready=True,
        ready_after_ms=812.4,
        n=2,
        cold_ttft_ms=402.7,
        median_ttft_ms=126.1,
        p95_ttft_ms=138.8,
        median_tpot_ms=36.2,
        output_throughput=27.6,
        answer_sample="The sea is blue because",
        failures=(),
        temperature_c=52.1,
        psi_cpu_some_avg10=45.17,
        host=HostState(psi_cpu_some_avg10=45.17, loadavg_1=2.84, temperature_c=52.1),
    )


def test_a_line_of_schema_2_reads_as_its_samples_and_both_states_of_the_host() -> None:
    result = SmokeResult.parse(line(**APART))
    sample = Sample(**SAMPLE)
    assert (result.median_ttft_ms, result.max_ttft_ms) == (126.1, 140.2)
    assert result.varied == sample
    assert result.known_prefix == replace(sample, median_ttft_ms=40.1)
    assert result.new_prefix_ttft_ms == 180.5
    assert result.concurrency == (
        SampleTogether(k=1, **SAMPLE),
        SampleTogether(k=4, **{**SAMPLE, "n": 8, "output_throughput": 61.0}),
    )
    assert result.host_before == HostState(
        psi_cpu_some_avg10=2.5, temperature_c=61.0, throttled="0x0"
    )
    assert result.host is not None
    assert (result.host.throttled, result.host.cpu_freq_khz) == ("0x50004", 1500000)
    assert (result.held_up_ms, result.overhead_ms) == (3.1, 12.0)


def test_the_smoke_of_a_report_holds_every_sample_and_can_be_json() -> None:
    told = SmokeResult.parse(line(**APART)).to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["known_prefix"]["median_ttft_ms"] == 40.1
    assert [(one["k"], one["output_throughput"]) for one in told["concurrency"]] == [
        (1, 27.6),
        (4, 61.0),
    ]
    assert (told["temperature_c"], told["throttled"], told["cpu_freq_khz"]) == (
        *(82.3, "0x50004", 1500000),
    )


def test_a_server_elsewhere_has_no_state_of_a_host() -> None:
    result = SmokeResult.parse(line(**{**APART, "host": None, "host_before": None}))
    assert (result.host, result.host_before, result.temperature_c) == (None, None, None)
    assert judge(result, BUDGET).healthy


def test_the_line_of_the_real_probe_on_a_port_where_nobody_listens_reads_as_not_ready() -> None:
    command = [sys.executable, str(PROBE), "--url", "http://127.0.0.1:9", "--model", "m"]
    done = subprocess.run(
        [*command, "--n", "1", "--load-deadline-s", "0.1"],
        capture_output=True,
        text=True,
        check=True,
    )
    result = SmokeResult.parse(done.stdout)
    assert (result.ready, result.n, result.median_ttft_ms) == (False, 0, None)
    assert [failure.kind for failure in result.failures] == ["not_ready"]
    assert not judge(result, BUDGET).healthy


def test_failures_keep_the_probes_words() -> None:
    result = SmokeResult.parse(
        line(failures=[{"kind": "http_status", "detail": "503 busy", "request": 1}])
    )
    assert result.failures == (SmokeFailure(kind="http_status", detail="503 busy"),)


def test_what_the_board_does_not_tell_is_none_and_not_zero() -> None:
    result = SmokeResult.parse(line(host={"temperature_c": None}))
    assert (result.temperature_c, result.psi_cpu_some_avg10) == (None, None)


def test_a_long_answer_is_kept_as_a_sample_only() -> None:
    assert len(SmokeResult.parse(line(answer_sample="a" * 1000)).answer_sample) == 80


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param("", id="nothing"),
        pytest.param("Traceback (most recent call last):", id="no JSON"),
        pytest.param(line()[:-20], id="cut short"),
        pytest.param("[1]", id="no object"),
        pytest.param("null", id="null"),
        pytest.param(line(schema=3), id="another schema"),
        pytest.param(line(**{**APART, "varied": {}}), id="a sample without n"),
        pytest.param(line(**{**APART, "concurrency": [4]}), id="no sample of streams at once"),
        pytest.param(line(**{**APART, "concurrency": [SAMPLE]}), id="streams at once without k"),
        pytest.param(line(n="many"), id="n is no number"),
        pytest.param(line(n=None), id="n is null"),
        pytest.param(line(failures=["slow"]), id="a failure without a kind"),
        pytest.param('{"schema": 1, "n": 1}', id="ready is missing"),
        pytest.param('{"schema": 1, "ready": true}', id="n is missing"),
        pytest.param('{"schema": 1, "ready": true, "n": Infinity}', id="n without bound"),
        pytest.param("[" * 100_000, id="nested without bound"),
        pytest.param(line(median_ttft_ms=10**400), id="a number larger than any float"),
    ],
)
def test_a_line_that_is_not_the_probes_is_a_parse_error_with_a_fix(bad: str) -> None:
    with pytest.raises(ParseError, match="fix: run the probe by hand"):
        SmokeResult.parse(bad)


@given(st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_of_a_host_raises_anything_but_a_parse_error(text: str) -> None:
    with pytest.raises(ParseError):
        SmokeResult.parse(text)


@given(
    st.fixed_dictionaries(
        {"ready": st.booleans(), "n": st.integers()},
        optional={
            name: st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.integers())
            for name in (
                *("median_ttft_ms", "p95_ttft_ms", "failures", "host", "answer_sample"),
                *("host_before", "varied", "known_prefix", "concurrency", "held_up_ms"),
            )
        },
    ),
    st.sampled_from((1, 2)),
)
def test_any_object_of_a_known_schema_is_judged_or_refused_and_json_can_hold_it(
    value: dict[str, Any], schema: int
) -> None:
    try:
        result = SmokeResult.parse(json.dumps({"schema": schema, **value}))
    except ParseError:
        return
    judge(result, BUDGET)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_parse_error_shows_the_start_of_the_line_only() -> None:
    with pytest.raises(ParseError) as raised:
        SmokeResult.parse("x" * 10_000)
    assert len(str(raised.value)) < 500


def test_a_host_within_its_budget_is_healthy_without_reasons() -> None:
    verdict = judge(SmokeResult.parse(line()), BUDGET)
    assert (verdict.healthy, verdict.reasons) == (True, ())


def test_a_median_on_the_budget_is_within_it() -> None:
    assert judge(SmokeResult.parse(line(median_ttft_ms=1500)), BUDGET).healthy


def test_a_slow_host_is_unhealthy_and_the_reason_has_both_numbers() -> None:
    verdict = judge(SmokeResult.parse(line(median_ttft_ms=1500.4)), BUDGET)
    assert not verdict.healthy
    assert verdict.reasons == ("slow: median TTFT 1500 ms is over the budget of 1500 ms (n=2)",)


def test_one_failed_request_is_unhealthy_although_the_median_is_good() -> None:
    verdict = judge(
        SmokeResult.parse(line(failures=[{"kind": "stalled", "detail": "no token for 10 s"}])),
        BUDGET,
    )
    assert not verdict.healthy
    assert verdict.reasons == ("stalled: no token for 10 s",)


def test_the_same_failure_of_each_request_is_one_reason() -> None:
    failure = {"kind": "empty_answer", "detail": "no content"}
    verdict = judge(SmokeResult.parse(line(failures=[failure, failure, failure])), BUDGET)
    assert verdict.reasons == ("empty_answer: no content",)


def test_a_server_that_never_was_ready_is_unhealthy_without_a_failure_of_the_probe() -> None:
    result = replace(SmokeResult.parse(line()), ready=False, median_ttft_ms=None)
    assert judge(result, BUDGET).reasons == ("not_ready: the server never said that it is ready",)


def test_a_ready_server_without_a_single_first_token_is_unhealthy() -> None:
    result = replace(SmokeResult.parse(line()), median_ttft_ms=None)
    verdict = judge(result, BUDGET)
    assert not verdict.healthy
    assert verdict.reasons == ("no_token: no request gave a first token",)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_figure_that_is_no_number_never_passes_for_a_fast_one(number: str) -> None:
    with pytest.raises(ParseError):
        SmokeResult.parse(line(median_ttft_ms=0.5).replace("0.5", number))


def test_the_budget_is_the_settings_own(settings_with: Callable[..., Settings]) -> None:
    budget = TtftBudget.from_settings(settings_with(ttft_budget_ms=4000))
    assert budget == TtftBudget(median_ttft_ms=4000)


def test_failures_of_one_kind_are_one_reason_that_says_how_many() -> None:
    failures = [{"kind": "stalled", "detail": f"{n} chunks, then none"} for n in (1, 2, 3)]
    verdict = judge(SmokeResult.parse(line(failures=failures)), BUDGET)
    assert verdict.reasons == ("stalled: 1 chunks, then none (and 2 more of this kind)",)


LAST_GOOD = LastGood(
    median_ttft_ms=200.0, n=5, at="2026-12-01", kernel="6.6.31", release="20261201-1a2b"
)


def budget(percent: float | None = 50.0, last: LastGood | None = LAST_GOOD) -> TtftBudget:
    return TtftBudget(median_ttft_ms=1500, regression_percent=percent, last_good=last)


def test_a_host_much_slower_than_its_own_last_good_run_is_unhealthy_within_the_budget_of_all() -> (
    None
):
    verdict = judge(smoke(320.0, n=5), budget(), kernel="6.6.51")
    assert not verdict.healthy
    assert verdict.reasons == (
        "regressed: median TTFT 320 ms (n=5) is 60 % over this host's last good 200 ms "
        "(2026-12-01, n=5, release 20261201-1a2b), more than 50 % are allowed; "
        "the kernel was 6.6.31 and is 6.6.51",
    )


@pytest.mark.parametrize(("now_n", "then_n"), [(2, 5), (5, 1)])
def test_a_regression_of_one_or_two_requests_is_a_warning(now_n: int, then_n: int) -> None:
    verdict = judge(smoke(900.0, n=now_n), budget(last=replace(LAST_GOOD, n=then_n)))
    assert (verdict.healthy, verdict.reasons) == (True, ())
    (warning,) = verdict.warnings
    assert warning.startswith(f"regressed: median TTFT 900 ms (n={now_n})")


@pytest.mark.parametrize(
    ("now_ms", "given"),
    [
        pytest.param(300.0, budget(), id="on the bound"),
        pytest.param(150.0, budget(), id="faster"),
        pytest.param(900.0, budget(percent=None), id="not compared"),
        pytest.param(900.0, budget(last=None), id="nothing to compare with"),
        pytest.param(
            60.0, budget(last=replace(LAST_GOOD, median_ttft_ms=20.0)), id="nobody would notice"
        ),
        pytest.param(
            900.0, budget(last=replace(LAST_GOOD, median_ttft_ms=0.0)), id="a last of nothing"
        ),
    ],
)
def test_no_regression_where(now_ms: float, given: TtftBudget) -> None:
    verdict = judge(smoke(now_ms), given)
    assert (verdict.healthy, verdict.reasons, verdict.warnings) == (True, (), ())


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"host_before": {"psi_cpu_some_avg10": 61.2}}, "CPU pressure 61 %"),
        ({"host": {"throttled": "0x4", "temperature_c": 82.3}}, "throttled, 82 °C"),
    ],
)
def test_a_regression_of_a_disturbed_host_is_a_warning_with_its_cause(
    state: dict[str, Any], cause: str
) -> None:
    verdict = judge(smoke(900.0, n=5, **state), budget())
    assert verdict.healthy
    assert verdict.warnings[0].startswith("regressed: median TTFT 900 ms")
    assert verdict.warnings[0].endswith(f"; {cause}")


def test_a_disturbed_host_is_held_to_the_budget_of_all() -> None:
    verdict = judge(smoke(1600.0, host_before={"psi_cpu_some_avg10": 90.0}), budget(last=None))
    assert verdict.reasons == ("slow: median TTFT 1600 ms is over the budget of 1500 ms (n=2)",)


def test_a_throttled_host_is_healthy_with_a_warning() -> None:
    verdict = judge(SmokeResult.parse(line(**APART)), BUDGET)
    assert verdict.healthy
    assert verdict.warnings == (
        "held down while it was measured: throttled, 82 °C, clock at 1500 of 2400 MHz",
    )


@pytest.mark.parametrize(
    ("state", "causes"),
    [
        (HostState(), ()),
        (HostState(temperature_c=74.9, throttled="0x50000"), ()),  # it was throttled once
        (HostState(temperature_c=75.0), ("75 °C",)),
        (HostState(throttled="0x1", temperature_c=60.0), ("under-voltage", "60 °C")),
        (HostState(throttled="0xf"), ("throttled", "under-voltage", "clock capped", *(
            "at its soft temperature limit",
        ))),
        (HostState(cooling_state=2), ("throttled",)),
        (HostState(throttled="no hex"), ()),
        (HostState(psi_memory_some_avg10=12.0, psi_io_some_avg10=9.9), ("memory pressure 12 %",)),
    ],
)  # fmt: skip
def test_what_makes_a_host_slow_is_told_in_words(state: HostState, causes: tuple[str, ...]) -> None:
    assert state.causes() == causes


def test_the_pressure_that_the_requests_make_themselves_explains_nothing() -> None:
    result = smoke(host={"psi_cpu_some_avg10": 80.0}, host_before={"psi_cpu_some_avg10": 1.0})
    assert result.causes() == ()


def test_an_x86_host_that_was_slowed_down_by_heat_meanwhile_says_how_often() -> None:
    result = smoke(host={"throttle_count": 17}, host_before={"throttle_count": 14})
    assert result.causes() == ("slowed down by heat 3 times meanwhile",)


# Peers

PI = "Raspberry Pi 5"


def peers(*ttft_ms: float, hardware_class: str = PI, first: int = 1, **more: Any) -> list[Peer]:
    return [
        Peer(host=f"edge-{n}", hardware_class=hardware_class, result=smoke(value), **more)
        for n, value in enumerate(ttft_ms, first)
    ]


ELEVEN = (340.0, 345.0, 350.0, 351.0, 352.0, 353.0, 355.0, 358.0, 360.0, 362.0, 370.0)


def test_an_outlier_is_told_with_its_ratio_its_peers_and_its_cause() -> None:
    hot = {"throttled": "0x50004", "temperature_c": 82.3}
    slow = Peer(host="edge-17", hardware_class=PI, result=smoke(812.0, host=hot))
    assert compare_with_peers([*peers(*ELEVEN), slow]) == {
        "edge-17": "edge-17 is 2.3 times slower than its 11 peers (Raspberry Pi 5): "
        "throttled, 82 °C; median TTFT 812 ms, theirs 353 ms (median absolute deviation 5 ms)"
    }


def test_an_outlier_without_a_cause_says_so() -> None:
    (warning,) = compare_with_peers(peers(*ELEVEN, 812.0)).values()
    assert "(Raspberry Pi 5): nothing in its load, heat or clock says why; " in warning


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(peers(350.0, 351.0, 352.0, 900.0), id="three peers are too few"),
        pytest.param(peers(*ELEVEN, 500.0), id="1.4 times is within what hosts differ"),
        pytest.param(peers(10.0, 11.0, 12.0, 11.0, 40.0), id="30 ms are nothing to notice"),
        pytest.param(peers(100.0, 200.0, 300.0, 400.0, 550.0), id="they all differ"),
        pytest.param(peers(*ELEVEN, 80.0), id="faster than all"),
        pytest.param(
            [*peers(*ELEVEN), *peers(900.0, first=50, hardware_class="Raspberry Pi 4")],
            id="other hardware",
        ),
        pytest.param(
            [*peers(*ELEVEN, model="a"), *peers(900.0, first=50, model="b")], id="another model"
        ),
        pytest.param([], id="nobody"),
    ],
)
def test_no_warning_where(hosts: list[Peer]) -> None:
    assert compare_with_peers(hosts) == {}


def test_four_peers_are_enough_and_a_host_without_figures_is_none() -> None:
    silent = Peer(host="edge-9", hardware_class=PI, result=smoke(None))
    hosts = peers(350.0, 351.0, 352.0, 353.0, 900.0)
    assert list(compare_with_peers([*hosts, silent])) == ["edge-5"]
    assert compare_with_peers([*hosts[1:], silent]) == {}


def test_two_slow_hosts_do_not_hide_each_other() -> None:
    assert list(compare_with_peers(peers(*ELEVEN, 812.0, 1400.0))) == ["edge-12", "edge-13"]


@given(st.lists(st.floats(1, 1e5), max_size=12))
def test_no_warning_for_whoever_is_not_half_again_as_slow_as_the_median(
    values: list[float],
) -> None:
    slow = compare_with_peers(peers(*values))
    for name in slow:
        own_ms = values[int(name.removeprefix("edge-")) - 1]
        others = sorted(values)
        others.remove(own_ms)
        assert own_ms >= 1.5 * others[(len(others) - 1) // 2]
        assert len(others) >= 4
