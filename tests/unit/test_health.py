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
from edgellm.health import SmokeFailure, SmokeResult, TtftBudget, judge
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


def line(**changed: Any) -> str:
    return json.dumps({**HEALTHY, **changed})


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
    )


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
        pytest.param(line(schema=2), id="another schema"),
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
            for name in ("median_ttft_ms", "p95_ttft_ms", "failures", "host", "answer_sample")
        },
    )
)
def test_any_object_of_schema_1_is_judged_or_refused_and_json_can_hold_it(
    value: dict[str, Any],
) -> None:
    try:
        result = SmokeResult.parse(json.dumps({"schema": 1, **value}))
    except ParseError:
        return
    judge(result, BUDGET)
    json.dumps(result.median_ttft_ms, allow_nan=False)


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
