"""One record a host, one report a run: the table on the terminal and reports/<run>/fleet.json.

The other files of reports/<run>/ are made of fleet.json: edgellm/reports/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal

from edgellm import layout
from edgellm.drift import KnobState, Verdict
from edgellm.hardware import plain
from edgellm.health import HealthVerdict, SmokeResult
from edgellm.tuning import LEFT_ALONE, Reason, TuningPlan

SCHEMA_VERSION = 2  # docs/fleet.schema.json
MOST_NAMES = 6  # in one line of reasons; the JSON has them all


class HostStatus(str, Enum):
    """How a host came out of a run; the order is the table's: what needs a person comes first."""

    FAILED = "failed"
    UNREACHABLE = "unreachable"
    DRIFTED = "drifted"  # an audit found knobs that are not as a roll-out leaves them
    PENDING = "pending"  # the run did not come to it, or not to its end
    OK = "ok"


class ExitCode(IntEnum):
    """Of a whole run; docs/reports.md. 1 and 0 are pyinfra's own words for the same."""

    OK = 0
    FAILED = 1
    DRIFTED = 2
    UNREACHABLE = 3
    BAD_INPUT = 4


# 128 and the signal's number, as shells have it. The signals that a run reports after.
EXIT_BY_SIGNAL = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


class Fault(str, Enum):
    """Whose fault it is that a host failed: what was given to the run, or what the host is."""

    INPUT = "input"  # settings, inventory, a key, the model's pin: no host needs a visit
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """All that a run knows about one host."""

    name: str
    address: str
    groups: tuple[str, ...]
    status: HostStatus
    reason: str | None  # why it is not ok, with the fix
    release: str | None  # the release that runs now, None: not known or none
    changed: tuple[str, ...]  # names of the operations that changed the host
    smoke: SmokeResult | None
    plan: TuningPlan | None
    fault: Fault | None = None  # of a failed host
    hardware_class: str | None = None
    kernel: str | None = None
    model_name: str | None = None
    model_sha256: str | None = None
    verdict: HealthVerdict | None = None
    from_control: SmokeResult | None = None
    history: tuple[Mapping[str, Any], ...] = ()  # earlier runs as in the JSON, the oldest first
    trend: Literal["up", "down", "flat"] | None = None  # of the median TTFT; "up" is slower
    slower_since: str | None = None  # "slower since 2026-11-24: kernel 6.6.31 -> 6.12.1: …"
    knobs: tuple[KnobState, ...] = ()  # as the run left them; () where they were not compared
    repaired: tuple[str, ...] = ()  # names of those that had drifted, and that this run put right
    is_new: bool = False  # nothing of ours was on it when the run began

    @property
    def left_alone(self) -> tuple[Reason, ...]:
        """The knobs that were deliberately not touched."""
        return tuple(r for r in self.plan.reasons if r.left_alone) if self.plan else ()

    @property
    def warnings(self) -> tuple[Reason, ...]:
        """What the operator should act on although the host is served."""
        return tuple(r for r in self.plan.reasons if r.warning) if self.plan else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """A run. Times are UTC, ISO 8601."""

    run_id: str  # "20261202T101500Z-1a2b"
    started_at: str
    ended_at: str
    command: str  # the deploy's name: "qwen"
    model_name: str | None
    model_sha256: str | None
    hosts: tuple[HostRecord, ...]
    is_audit: bool = False  # nothing was changed or timed: its knobs are the result
    invocation: tuple[str, ...] = ()  # the command line to be given again, without secrets
    interrupted_by: str | None = None  # "SIGINT"

    def with_status(self, status: HostStatus) -> tuple[HostRecord, ...]:
        return tuple(host for host in self.hosts if host.status is status)

    def to_json(self) -> dict[str, Any]:
        """The shape of fleet.json: plain dicts, lists, strings and numbers."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "deploy": self.command,
            "invocation": list(self.invocation),
            "interrupted_by": self.interrupted_by,
            "exit_code": exit_code(self),
            "model": {"name": self.model_name, "sha256": self.model_sha256},
            "hosts": [_host_json(host) for host in self.hosts],
        }


def exit_code(report: FleetReport) -> int:
    """What a script around the run needs to know first. The order is in docs/reports.md."""
    if report.interrupted_by is not None:
        return EXIT_BY_SIGNAL[report.interrupted_by]
    statuses = {host.status for host in report.hosts}
    failed = report.with_status(HostStatus.FAILED)
    if any(host.fault is not Fault.INPUT for host in failed):
        return ExitCode.FAILED
    if failed:
        return ExitCode.BAD_INPUT
    if HostStatus.UNREACHABLE in statuses:
        return ExitCode.UNREACHABLE
    if HostStatus.PENDING in statuses:
        return ExitCode.FAILED  # held back or cut off, and no host says why
    if HostStatus.DRIFTED not in statuses:
        return ExitCode.OK
    untold = any(
        state.verdict is Verdict.UNKNOWN
        for host in report.hosts
        if not host.is_new
        for state in host.knobs
    )
    return ExitCode.FAILED if untold else ExitCode.DRIFTED


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of the table on the terminal, all text."""

    host: str
    status: str
    release: str
    ttft_ms: str  # "112 / 140 (n=5) ↗": median / p95, and slower than it used to be
    from_control_ms: str  # "131 / 160": the same, asked from the control machine
    output_throughput: str  # "27.6"
    changed: str
    notes: str


def table_rows(report: FleetReport) -> tuple[TableRow, ...]:
    """Failures first, then by name."""
    order = list(HostStatus)
    hosts = sorted(report.hosts, key=lambda host: (order.index(host.status), host.name))
    return tuple(_row(host) for host in hosts)


def summary(report: FleetReport) -> str:
    """'3 hosts: 2 ok, 1 failed'."""
    counts = [
        f"{len(hosts)} {status.value}"
        for status in (HostStatus.OK, *(s for s in HostStatus if s is not HostStatus.OK))
        if (hosts := report.with_status(status))
    ]
    word = "host" if len(report.hosts) == 1 else "hosts"
    return f"{len(report.hosts)} {word}: {', '.join(counts) or 'none'}"


def _row(host: HostRecord) -> TableRow:
    smoke = host.smoke
    ttft, from_control, tokens = _median_and_p95(smoke), _median_and_p95(host.from_control), "-"
    if smoke is not None and ttft != "-":
        ttft += f" (n={smoke.n})" + (f" {ARROWS[host.trend]}" if host.trend else "")
    if smoke is not None and smoke.output_throughput is not None:
        tokens = f"{smoke.output_throughput:.1f}"
    return TableRow(
        host=host.name,
        status=host.status.value,
        release=host.release or "-",
        ttft_ms=ttft,
        from_control_ms=from_control,
        output_throughput=tokens,
        changed=f"{len(host.changed)} operations" if host.changed else "nothing",
        notes="; ".join(filter(None, (host.reason or _notes(host), host.slower_since))),
    )


def _median_and_p95(smoke: SmokeResult | None) -> str:
    if smoke is None or smoke.median_ttft_ms is None or smoke.p95_ttft_ms is None:
        return "-"
    return f"{smoke.median_ttft_ms:.0f} / {smoke.p95_ttft_ms:.0f}"


ARROWS = {"up": "↗", "down": "↘", "flat": "→"}


def _notes(host: HostRecord) -> str:
    """The knobs by name; reason_lines() has the why of each, once for all hosts that share it."""
    notes = list(host.verdict.warnings) if host.verdict else []
    notes += [f"repaired: {', '.join(map(short, host.repaired))}"] if host.repaired else []
    for label, reasons in (("see below", host.warnings), ("left alone", host.left_alone)):
        knobs = dict.fromkeys(reason.knob for reason in reasons if reason not in LEFT_ALONE)
        if knobs:
            notes.append(f"{label}: {', '.join(knobs)}")
    return "; ".join(notes)


def reason_lines(report: FleetReport) -> tuple[str, ...]:
    """Why knobs were left alone or need a person: 'zram: … (edge-1, edge-2)', warnings first.

    What is left alone on every host of every fleet (tuning.LEFT_ALONE) is in the JSON only.
    """
    hosts_of: dict[Reason, list[str]] = {}
    for host in sorted(report.hosts, key=lambda host: host.name):
        for reason in (*host.warnings, *host.left_alone):
            if reason not in LEFT_ALONE:
                hosts_of.setdefault(reason, []).append(host.name)
    ordered = sorted(hosts_of.items(), key=lambda item: not item[0].warning)
    return tuple(
        f"{reason.knob}: {reason.text} ({_names(names, len(report.hosts))})"
        for reason, names in ordered
    )


def told(knobs: Iterable[KnobState], verdict: Verdict) -> str:
    """'swappiness: 60 now; /etc/…: other content' of the knobs with this verdict; '' of none."""
    states = [state for state in knobs if state.verdict is verdict]
    named = [f"{short(state.knob)}: {state.reason}" for state in states[:MOST_NAMES]]
    more = [f"and {len(states) - MOST_NAMES} more"] if len(states) > MOST_NAMES else []
    return "; ".join((*named, *more))


def short(knob: str) -> str:
    """A knob as the table names it: of a file in the release, the name in it is enough."""
    return re.sub(rf"^{layout.RELEASES}/[^/]+/", "", knob)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobRow:
    """One knob that is not simply in order, on one host or on several that are alike in it."""

    hosts: str
    knob: str
    states: tuple[tuple[str, str], ...]  # ("desired", "10"), ("configured", "60 by /etc/…"), …
    verdict: str
    why: str


SHOWN = (Verdict.DRIFTED, Verdict.UNKNOWN, Verdict.LIMITED)  # in the table's order


def knob_rows(report: FleetReport) -> tuple[KnobRow, ...]:
    """What an audit's table shows: the drifted first, then by knob. fleet.json has every knob.

    Not of hosts that were never rolled out to: all of them are off there, for one reason.
    """
    alike: dict[KnobState, list[str]] = {}
    for host in sorted(report.hosts, key=lambda host: host.name):
        for state in () if host.is_new else host.knobs:
            if state.verdict in SHOWN:
                alike.setdefault(state, []).append(host.name)
    ordered = sorted(
        alike.items(), key=lambda item: (SHOWN.index(item[0].verdict), item[0].knob, item[1])
    )
    return tuple(
        KnobRow(
            hosts=_names(names, len(report.hosts)),
            knob=short(state.knob),
            states=_states(state),
            verdict=state.verdict.value,
            why=state.reason or "",
        )
        for state, names in ordered
    )


def _states(state: KnobState) -> tuple[tuple[str, str], ...]:
    """Those that are known. A file is configured by no other, and is what is in force as well."""
    itself = state.configured_by == state.knob
    by = None if itself or state.configured_by is None else f"by {short(state.configured_by)}"
    configured = None if itself else " ".join(filter(None, (state.configured, by)))
    values = (
        ("desired", state.desired),
        ("configured", configured),
        ("effective", state.effective),
    )
    return tuple((name, value) for name, value in values if value)


def _names(names: list[str], of_hosts: int) -> str:
    if len(names) == of_hosts > 1:
        return f"all {of_hosts} hosts"
    if len(names) > MOST_NAMES:
        return f"{len(names)} hosts: {', '.join(names[:MOST_NAMES])}, …"
    return ", ".join(names)


def _host_json(host: HostRecord) -> dict[str, Any]:
    smoke, verdict, from_control = host.smoke, host.verdict, host.from_control
    plan = None if host.plan is None else plain(host.plan)
    return {
        "name": host.name,
        "address": host.address,
        "groups": list(host.groups),
        "status": host.status.value,
        "reason": host.reason,
        "fault": None if host.fault is None else host.fault.value,
        "release": host.release,
        "is_new": host.is_new,
        "hardware_class": host.hardware_class,
        "kernel": host.kernel,
        "model": None
        if host.model_name is None
        else {"name": host.model_name, "sha256": host.model_sha256},
        "changed": list(host.changed),
        "repaired": list(host.repaired),
        "knobs": [plain(state) for state in host.knobs],
        "verdict": None if verdict is None else plain(verdict),
        "smoke": None if smoke is None else smoke.to_json(),
        "from_control": None if from_control is None else from_control.to_json(),
        "history": [dict(past) for past in host.history],
        "ttft_ms": None
        if smoke is None
        else {
            "median": smoke.median_ttft_ms,
            "p95": smoke.p95_ttft_ms,
            "n": smoke.n,
            "cold": smoke.cold_ttft_ms,
        },
        "output_throughput": smoke.output_throughput if smoke else None,
        "median_tpot_ms": smoke.median_tpot_ms if smoke else None,
        "temperature_c": smoke.temperature_c if smoke else None,
        "psi_cpu_some_avg10": smoke.psi_cpu_some_avg10 if smoke else None,
        "answer_sample": smoke.answer_sample if smoke else None,
        "plan": None if plan is None else {k: v for k, v in plan.items() if k != "reasons"},
        "reasons": [] if plan is None else plan["reasons"],
    }
