"""The fleet's report: the JSON's keys and the table's order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgellm.hardware import HostProfile
from edgellm.health import SmokeResult
from edgellm.report import (
    FleetReport,
    HostRecord,
    HostStatus,
    reason_lines,
    summary,
    table_rows,
)
from edgellm.settings import Settings
from edgellm.tuning import LEFT_ALONE, Reason, TuningPlan, plan_tuning

SMOKE = SmokeResult(
    ready=True,
    ready_after_ms=812.4,
    n=5,
    cold_ttft_ms=402.7,
    median_ttft_ms=112.4,
    p95_ttft_ms=139.6,
    median_tpot_ms=36.2,
    output_throughput=27.64,
    answer_sample="The sea is blue",
    failures=(),
    temperature_c=52.1,
    psi_cpu_some_avg10=4.5,
)


@pytest.fixture(scope="module")
def plan(board: Callable[[str], HostProfile], settings_with: Callable[..., Settings]) -> TuningPlan:
    return plan_tuning(board("rk3588"), settings_with())


def host(name: str, **changed: Any) -> HostRecord:
    values: dict[str, Any] = {
        "name": name,
        "address": "192.0.2.7",
        "groups": ("factory", "arm64"),
        "status": HostStatus.OK,
        "reason": None,
        "release": "3abadcf8e3b5c3fa",
        "changed": (),
        "smoke": SMOKE,
        "plan": None,
    }
    return HostRecord(**{**values, **changed})


def report(*hosts: HostRecord) -> FleetReport:
    return FleetReport(
        run_id="20261202T101500Z-1a2b",
        started_at="2026-12-02T10:15:00+00:00",
        ended_at="2026-12-02T10:16:00+00:00",
        command="qwen",
        model_name="qwen2.5-0.5b-instruct",
        model_sha256="0" * 64,
        hosts=hosts,
    )


def with_reasons(plan: TuningPlan, *reasons: Reason) -> TuningPlan:
    return replace(plan, reasons=(*reasons, *LEFT_ALONE))


# fleet.json


def test_json_names_run_model_and_hosts() -> None:
    found = report(host("pi5-01")).to_json()
    assert found["run_id"] == "20261202T101500Z-1a2b"
    assert found["started_at"] == "2026-12-02T10:15:00+00:00"
    assert found["model"] == {"sha256": "0" * 64, "name": "qwen2.5-0.5b-instruct"}
    assert [entry["name"] for entry in found["hosts"]] == ["pi5-01"]


@pytest.mark.parametrize("status", HostStatus)
def test_every_host_has_every_key_whatever_became_of_it(
    status: HostStatus, plan: TuningPlan
) -> None:
    reached = status is not HostStatus.UNREACHABLE
    record = host(
        "pi5-01",
        status=status,
        smoke=SMOKE if reached else None,
        plan=plan if reached else None,
    )
    entry = report(record).to_json()["hosts"][0]
    assert entry.keys() >= {
        "name",
        "address",
        "groups",
        "status",
        "reason",
        "release",
        "changed",
        "ttft_ms",
        "output_throughput",
        "plan",
        "reasons",
    }
    assert entry["status"] == status.value


def test_json_has_the_measured_figures_under_the_fields_words() -> None:
    entry = report(host("pi5-01", changed=("Model | present",))).to_json()["hosts"][0]
    assert {"median": 112.4, "p95": 139.6, "n": 5}.items() <= entry["ttft_ms"].items()
    assert entry["output_throughput"] == 27.64
    assert entry["groups"] == ["factory", "arm64"]
    assert entry["changed"] == ["Model | present"]


def test_a_host_that_was_not_measured_has_null_and_not_zero() -> None:
    entry = report(host("pi5-01", smoke=None)).to_json()["hosts"][0]
    assert (entry["ttft_ms"], entry["output_throughput"]) == (None, None)
    assert (entry["plan"], entry["reasons"]) == (None, [])


def test_json_writes_cpus_as_the_kernel_does_and_reasons_beside_the_plan(plan: TuningPlan) -> None:
    entry = report(host("rk-01", plan=plan)).to_json()["hosts"][0]
    assert entry["plan"]["cpus"] == "4-7"
    assert "reasons" not in entry["plan"]
    assert entry["reasons"][0].keys() == {"knob", "text", "left_alone", "warning"}
    assert len(entry["reasons"]) == len(plan.reasons)


def test_json_of_a_full_report_survives_json_dumps_and_loads(plan: TuningPlan) -> None:
    found = report(host("rk-01", plan=plan), host("pi5-01", smoke=None, plan=None)).to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_json_of_a_run_that_never_came_to_its_model_is_complete() -> None:
    found = replace(report(), model_name=None, model_sha256=None).to_json()
    assert found["model"] == {"sha256": None, "name": None}
    assert found["hosts"] == []


# The table


def test_table_shows_what_needs_a_person_first_and_then_names_in_order() -> None:
    rows = table_rows(
        report(
            host("b-ok"),
            host("z-unreachable", status=HostStatus.UNREACHABLE),
            host("a-ok"),
            host("z-failed", status=HostStatus.FAILED),
            host("a-failed", status=HostStatus.FAILED),
        )
    )
    assert [row.host for row in rows] == ["a-failed", "z-failed", "z-unreachable", "a-ok", "b-ok"]


def test_a_row_has_figures_as_a_person_reads_them() -> None:
    (row,) = table_rows(report(host("pi5-01", changed=("Model | present", "Server | running"))))
    assert (row.status, row.release) == ("ok", "3abadcf8e3b5c3fa")
    assert (row.ttft_ms, row.output_throughput) == ("112 / 140 (n=5)", "27.6")
    assert row.changed == "2 operations"


def test_a_row_of_an_unchanged_host_says_nothing_changed() -> None:
    assert table_rows(report(host("pi5-01")))[0].changed == "nothing"


def test_a_row_without_figures_has_dashes() -> None:
    (row,) = table_rows(report(host("pi5-01", smoke=None, release=None)))
    assert (row.ttft_ms, row.output_throughput, row.release) == ("-", "-", "-")


def test_the_note_of_a_failed_host_is_its_reason_and_not_its_tuning(plan: TuningPlan) -> None:
    record = host("rk-01", status=HostStatus.FAILED, reason="no power; fix: plug it in", plan=plan)
    assert table_rows(report(record))[0].notes == "no power; fix: plug it in"


def test_the_note_of_a_healthy_host_names_its_knobs_once_and_warnings_first(
    plan: TuningPlan,
) -> None:
    reasons = (
        Reason(knob="zram", text="8 GiB are enough", left_alone=True),
        Reason(knob="zram", text="log2ram holds zram0", left_alone=True),
        Reason(knob="cgroup", text="no memory controller", warning=True),
    )
    (row,) = table_rows(report(host("rk-01", plan=with_reasons(plan, *reasons))))
    assert row.notes == "see below: cgroup; left alone: zram"


# Reasons under the table


def test_hosts_that_share_a_reason_share_its_line(plan: TuningPlan) -> None:
    shared = with_reasons(plan, Reason(knob="zram", text="8 GiB are enough", left_alone=True))
    lines = reason_lines(
        report(host("b", plan=shared), host("a", plan=shared), host("c", plan=None))
    )
    assert lines == ("zram: 8 GiB are enough (a, b)",)


def test_a_reason_that_every_host_has_counts_them(plan: TuningPlan) -> None:
    shared = with_reasons(plan, Reason(knob="zram", text="8 GiB are enough", left_alone=True))
    lines = reason_lines(report(host("b", plan=shared), host("a", plan=shared)))
    assert lines == ("zram: 8 GiB are enough (all 2 hosts)",)


def test_a_reason_of_many_hosts_names_the_first_few(plan: TuningPlan) -> None:
    shared = with_reasons(plan, Reason(knob="zram", text="8 GiB are enough", left_alone=True))
    hosts = [host(f"pi5-{n:02}", plan=shared) for n in range(40)]
    (line,) = reason_lines(report(*hosts, host("x86-01", plan=None)))
    assert line.startswith("zram: 8 GiB are enough (40 hosts: pi5-00, pi5-01, ")
    assert line.endswith(", …)")
    assert "pi5-39" not in line


def test_warnings_come_before_knobs_left_alone(plan: TuningPlan) -> None:
    reasons = (
        Reason(knob="zram", text="8 GiB are enough", left_alone=True),
        Reason(knob="cgroup", text="no memory controller", warning=True),
    )
    lines = reason_lines(report(host("rk-01", plan=with_reasons(plan, *reasons))))
    assert [line.split(":")[0] for line in lines] == ["cgroup", "zram"]


def test_a_plain_choice_is_in_the_json_only(plan: TuningPlan) -> None:
    record = host("rk-01", plan=with_reasons(plan, Reason(knob="threads", text="4 of 8 cores")))
    assert reason_lines(report(record)) == ()
    assert report(record).to_json()["hosts"][0]["reasons"][0]["knob"] == "threads"


# The summary


def test_summary_counts_each_status_that_occurs() -> None:
    assert (
        summary(report(host("a"), host("b"), host("c", status=HostStatus.FAILED)))
        == "3 hosts: 2 ok, 1 failed"
    )


def test_summary_of_one_host_speaks_of_one() -> None:
    assert summary(report(host("a", status=HostStatus.UNREACHABLE))) == "1 host: 1 unreachable"


def test_summary_of_no_host_at_all_is_still_a_sentence() -> None:
    assert summary(report()) == "0 hosts: none"
