"""The fleet's report: the JSON's keys and the table's order."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgellm import layout, recorder
from edgellm.drift import KnobState, Verdict
from edgellm.hardware import HostProfile
from edgellm.health import SmokeResult
from edgellm.report import (
    FleetReport,
    HostRecord,
    HostStatus,
    knob_rows,
    reason_lines,
    short,
    summary,
    table_rows,
    told,
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


def knob(name: str, verdict: Verdict = Verdict.DRIFTED, **changed: Any) -> KnobState:
    values: dict[str, Any] = {
        "knob": name,
        "desired": "10",
        "configured": "60",
        "configured_by": "/etc/sysctl.d/99-vendor.conf",
        "effective": "60",
        "verdict": verdict,
        "reason": "60 now",
    }
    return KnobState(**{**values, **changed})


ENTRYPOINT = f"{layout.RELEASES}/3abadcf8e3b5c3fa/entrypoint.sh"


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
        "knobs",
        "repaired",
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


def test_json_has_the_four_states_of_every_knob_in_the_order_they_were_told() -> None:
    knobs = (knob("swappiness"), knob("zram", Verdict.LEFT_ALONE, desired=None, reason="enough"))
    found = report(host("pi5-01", knobs=knobs)).to_json()["hosts"][0]["knobs"]
    assert found[0] == {
        "knob": "swappiness",
        "desired": "10",
        "configured": "60",
        "configured_by": "/etc/sysctl.d/99-vendor.conf",
        "effective": "60",
        "verdict": "drifted",
        "reason": "60 now",
    }
    assert (found[1]["knob"], found[1]["desired"], found[1]["verdict"]) == (
        "zram",
        None,
        "left alone",
    )


def test_json_names_what_was_repaired_in_full() -> None:
    entry = report(host("pi5-01", repaired=("swappiness", ENTRYPOINT))).to_json()["hosts"][0]
    assert entry["repaired"] == ["swappiness", ENTRYPOINT]


def test_knobs_of_a_host_that_was_not_compared_are_an_empty_list() -> None:
    entry = report(host("pi5-01")).to_json()["hosts"][0]
    assert (entry["knobs"], entry["repaired"]) == ([], [])


# The table


def test_table_shows_what_needs_a_person_first_and_then_names_in_order() -> None:
    rows = table_rows(
        report(
            host("b-ok"),
            host("z-unreachable", status=HostStatus.UNREACHABLE),
            host("a-ok"),
            host("z-failed", status=HostStatus.FAILED),
            host("a-drifted", status=HostStatus.DRIFTED),
            host("a-failed", status=HostStatus.FAILED),
        )
    )
    assert [row.host for row in rows] == [
        *("a-failed", "z-failed", "z-unreachable", "a-drifted", "a-ok", "b-ok")
    ]


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


def test_the_note_of_a_host_says_first_what_was_repaired_on_it(plan: TuningPlan) -> None:
    reason = Reason(knob="zram", text="8 GiB are enough", left_alone=True)
    record = host("rk-01", plan=with_reasons(plan, reason), repaired=("swappiness", ENTRYPOINT))
    (row,) = table_rows(report(record))
    assert row.notes == "repaired: swappiness, entrypoint.sh; left alone: zram"


def test_the_note_of_a_drifted_host_is_its_reason() -> None:
    record = host("rk-01", status=HostStatus.DRIFTED, reason="swappiness: 60 now; fix: …")
    (row,) = table_rows(report(record))
    assert (row.status, row.notes) == ("drifted", "swappiness: 60 now; fix: …")


def test_a_run_that_asked_from_the_control_machine_shows_both_figures() -> None:
    from_here = replace(SMOKE, median_ttft_ms=131.4, p95_ttft_ms=160.2)
    asked = report(host("pi5-01", from_control=from_here), host("pi5-02"))
    assert [row.from_control_ms for row in table_rows(asked)] == ["131 / 160", "-"]
    lines = shown(asked).splitlines()
    (line,) = [line for line in lines if "pi5-01" in line]
    assert line.index("112 / 140 (n=5)") < line.index("131 / 160")
    assert "as seen from here" in shown(asked)
    assert "as seen from here" not in shown(report(host("pi5-02")))


def test_a_row_shows_the_trend_beside_the_figures_and_says_since_when() -> None:
    since = "slower since 2026-11-24: kernel 6.6 -> 6.12: median TTFT 90 -> 112 ms"
    (row,) = table_rows(report(host("pi5-01", trend="up", slower_since=since)))
    assert row.ttft_ms == "112 / 140 (n=5) ↗"
    assert row.notes == since


# Knobs in words


def test_knobs_of_one_verdict_are_told_with_their_reasons() -> None:
    knobs = (
        knob("swappiness"),
        knob("zram", Verdict.UNKNOWN, reason="not read"),
        knob(ENTRYPOINT, reason="other content"),
        knob("cpus", Verdict.IN_ORDER, reason=None),
    )
    assert told(knobs, Verdict.DRIFTED) == "swappiness: 60 now; entrypoint.sh: other content"
    assert told(knobs, Verdict.UNKNOWN) == "zram: not read"
    assert told(knobs, Verdict.LIMITED) == ""


def test_of_many_knobs_the_first_are_told_and_the_others_counted() -> None:
    assert told([knob(f"k{n}") for n in range(6)], Verdict.DRIFTED).endswith("k5: 60 now")
    found = told([knob(f"k{n}") for n in range(8)], Verdict.DRIFTED)
    assert found.startswith("k0: 60 now; k1: 60 now; ")
    assert found.endswith("k5: 60 now; and 2 more")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (ENTRYPOINT, "entrypoint.sh"),
        (f"{layout.RELEASES}/3abadcf8e3b5c3fa/upstream.d/vllm.service.conf", None),
        (f"{layout.RELEASES}/3abadcf8e3b5c3fa", f"{layout.RELEASES}/3abadcf8e3b5c3fa"),
        (layout.RELEASES, layout.RELEASES),
        (layout.SYSCTL_CONF, layout.SYSCTL_CONF),
        ("swappiness", "swappiness"),
    ],
)
def test_a_file_of_a_release_is_named_by_its_place_in_it(name: str, expected: str | None) -> None:
    assert short(name) == (expected or "upstream.d/vllm.service.conf")


# The knobs' table


def test_the_knobs_table_has_the_drifted_first_then_the_unknown_then_the_limited_by_name() -> None:
    knobs = (
        knob("cpu_weight", Verdict.LIMITED),
        knob("zram"),
        knob("numa", Verdict.UNKNOWN),
        knob("cpus", Verdict.IN_ORDER),
        knob("packages", Verdict.LEFT_ALONE),
        knob("account"),
    )
    rows = knob_rows(report(host("pi5-01", knobs=knobs)))
    assert [(row.knob, row.verdict) for row in rows] == [
        ("account", "drifted"),
        ("zram", "drifted"),
        ("numa", "unknown"),
        ("cpu_weight", "limited"),
    ]


def test_hosts_that_are_alike_in_a_knob_share_its_row_and_others_do_not() -> None:
    rows = knob_rows(
        report(
            host("c", knobs=(knob("swappiness", effective="100"),)),
            host("b", knobs=(knob("swappiness"),)),
            host("a", knobs=(knob("swappiness"), knob("zram", reason="not on"))),
            host("d"),
        )
    )
    assert [(row.hosts, row.knob, dict(row.states)["effective"]) for row in rows] == [
        ("a, b", "swappiness", "60"),
        ("c", "swappiness", "100"),
        ("a", "zram", "60"),
    ]


def test_a_row_of_the_knobs_table_has_the_states_the_file_and_the_reason() -> None:
    (row,) = knob_rows(report(host("pi5-01", knobs=(knob("swappiness"),))))
    assert row.states == (
        ("desired", "10"),
        ("configured", "60 by /etc/sysctl.d/99-vendor.conf"),
        ("effective", "60"),
    )
    assert (row.hosts, row.why) == ("pi5-01", "60 now")


def test_a_state_that_is_not_known_is_left_out() -> None:
    unread = knob("numa", Verdict.UNKNOWN, configured=None, configured_by=None, effective=None)
    (row,) = knob_rows(report(host("pi5-01", knobs=(unread,))))
    assert row.states == (("desired", "10"),)


def test_a_file_is_not_said_to_be_configured_by_itself() -> None:
    state = knob(ENTRYPOINT, configured_by=ENTRYPOINT, desired="file 0755", effective="file 0644")
    (row,) = knob_rows(report(host("pi5-01", knobs=(state,))))
    assert row.knob == "entrypoint.sh"
    assert row.states == (("desired", "file 0755"), ("effective", "file 0644"))


def test_a_file_of_a_release_that_decides_a_knob_is_named_shortly() -> None:
    state = knob("scheduling", configured="batch", configured_by=ENTRYPOINT)
    (row,) = knob_rows(report(host("pi5-01", knobs=(state,))))
    assert dict(row.states)["configured"] == "batch by entrypoint.sh"


def test_of_a_host_that_was_never_rolled_out_to_the_knobs_table_has_none() -> None:
    record = host("new", status=HostStatus.DRIFTED, knobs=(knob("swappiness"),), is_new=True)
    assert knob_rows(report(record)) == ()


# Both on a terminal


def shown(found: FleetReport, width: int = 160) -> str:
    text = io.StringIO()
    recorder.show(found, Path("reports/x/fleet.json"), Console(file=text, width=width))
    return text.getvalue()


def test_an_audit_shows_knobs_and_no_figures_and_a_roll_out_the_other_way_round() -> None:
    record = host("pi5-01", status=HostStatus.DRIFTED, knobs=(knob("swappiness"),))
    audit = shown(replace(report(record), is_audit=True))
    assert "60 by /etc/sysctl.d/99-vendor.conf" in audit
    assert "TTFT" not in audit
    roll_out = shown(report(record))
    assert "99-vendor.conf" not in roll_out
    assert "TTFT" in roll_out


def test_what_a_host_says_neither_moves_the_terminal_nor_costs_the_table() -> None:
    bad = host("pi5-01", status=HostStatus.FAILED, reason="\x1b[2Jgone\udc80", release="[/red]")
    text = shown(report(bad))
    assert "?[2Jgone?" in text
    assert "[/red]" in text
    assert "Report: reports/x/fleet.json" in text


def test_an_audit_in_which_all_is_in_order_shows_no_knobs() -> None:
    record = host("pi5-01", knobs=(knob("swappiness", Verdict.IN_ORDER),))
    assert "swappiness" not in shown(replace(report(record), is_audit=True))


def test_what_hosts_say_is_no_markup_of_the_terminals() -> None:
    states: dict[str, Any] = {
        "desired": "[bold]",
        "effective": "[/x]",
        "reason": "[red]60[/red] now",
    }
    record = host("pi5-01", knobs=(knob("/etc/[a]", **states),))
    text = shown(replace(report(record), is_audit=True))
    for said in ("/etc/[a]", *states.values()):
        assert said in text


def test_a_path_is_not_cut_on_a_terminal_of_120_columns() -> None:
    state = knob("login_limits", configured="none", configured_by=layout.LIMITS_CONF)
    assert f"none by {layout.LIMITS_CONF}" in shown(
        replace(report(host("factory-floor-0001", knobs=(state,))), is_audit=True), width=120
    )


# The exit code


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ((), 0),
        ((HostStatus.OK, HostStatus.OK), 0),
        ((HostStatus.OK, HostStatus.DRIFTED), 2),
        ((HostStatus.DRIFTED, HostStatus.DRIFTED), 2),
        ((HostStatus.OK, HostStatus.FAILED), 1),
        ((HostStatus.DRIFTED, HostStatus.FAILED), 1),
        ((HostStatus.UNREACHABLE, HostStatus.DRIFTED, HostStatus.OK), 3),
        ((HostStatus.UNREACHABLE,), 3),
    ],
)
def test_the_exit_code_is_2_only_where_all_that_is_not_ok_has_drifted(
    statuses: tuple[HostStatus, ...], code: int
) -> None:
    hosts = [host(f"h{n}", status=status) for n, status in enumerate(statuses)]
    assert recorder.exit_code(report(*hosts)) == code


def test_what_could_not_be_told_of_a_drifted_host_keeps_the_exit_code_at_1() -> None:
    off = knob("swappiness", Verdict.DRIFTED)
    unread = knob("nofile", Verdict.UNKNOWN)
    drifted = host("a", status=HostStatus.DRIFTED, knobs=(off,))
    untold = host("b", status=HostStatus.DRIFTED, knobs=(off, unread))
    new = host("c", status=HostStatus.DRIFTED, knobs=(unread,), is_new=True)
    assert recorder.exit_code(report(drifted, new)) == 2
    assert recorder.exit_code(report(drifted, untold)) == 1


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


def test_summary_counts_the_drifted_after_those_that_could_not_be_told() -> None:
    statuses = (HostStatus.DRIFTED, HostStatus.OK, HostStatus.UNREACHABLE, HostStatus.DRIFTED)
    hosts = [host(f"h{n}", status=status) for n, status in enumerate(statuses)]
    assert summary(report(*hosts)) == "4 hosts: 1 ok, 1 unreachable, 2 drifted"


def test_summary_of_one_host_speaks_of_one() -> None:
    assert summary(report(host("a", status=HostStatus.UNREACHABLE))) == "1 host: 1 unreachable"


def test_summary_of_no_host_at_all_is_still_a_sentence() -> None:
    assert summary(report()) == "0 hosts: none"
