"""What happened in a run, host by host: pyinfra's callbacks and our notes -> reports/<run>/.

The report is written when the process ends, so also when every host failed, none was reached, or
the run was interrupted.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyinfra.api.state import BaseStateCallback
from pyinfra.context import ctx_state
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgellm.drift import KnobState, Verdict, drifted
from edgellm.errors import EdgellmError
from edgellm.health import SmokeResult
from edgellm.report import (
    FleetReport,
    HostRecord,
    HostStatus,
    knob_rows,
    reason_lines,
    summary,
    table_rows,
    told,
)
from edgellm.tuning import TuningPlan

if TYPE_CHECKING:
    from pyinfra.api import Host, State

COLOURS = {"ok": "green", "failed": "red", "unreachable": "yellow", "drifted": "magenta"}
EXIT_NOT_ALL_OK = 1
EXIT_DRIFTED = 2  # of an audit that could tell of every host; docs/audit.md
# A terminal tells its width; a pipe or a log file does not, and 80 columns would wrap every reason.
WIDTH_WITHOUT_TERMINAL = 160


def reports_dir() -> Path:
    """Where runs are kept: EDGELLM_REPORTS_DIR, or ./reports."""
    return Path(os.environ.get("EDGELLM_REPORTS_DIR") or "reports")


class OkWhen(Enum):
    """What makes a host ok in a run."""

    VERIFIED = "verified"
    DONE = "done"  # all was done on it
    IN_ORDER = "compared"  # nothing is done on it, and every knob is as it should be


@dataclass(slots=True, kw_only=True)
class HostNotes:
    """What our own code knows of a host beyond pyinfra's results; filled in as the run goes."""

    failure: EdgellmError | None = None
    unreachable: str | None = None
    plan: TuningPlan | None = None
    release: str | None = None  # the one that runs, as far as this run knows
    verified: bool = False
    smoke: SmokeResult | None = None
    knobs: tuple[KnobState, ...] = ()  # as they were when they were last compared
    repairable: tuple[str, ...] = ()  # knobs that had drifted when the run began
    is_first: bool = False  # nothing of ours was on the host then


@dataclass(slots=True, kw_only=True)
class Run:
    """The run of this process."""

    started_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    deploy: str | None = None  # None until a deploy file of ours has begun
    ok_when: OkWhen = OkWhen.VERIFIED
    model_name: str | None = None
    model_sha256: str | None = None
    hosts: dict[str, HostNotes] = field(default_factory=dict)
    state: State | None = None

    def notes(self, host: Host) -> HostNotes:
        return self.hosts.setdefault(host.name, HostNotes())


_run = Run()


class _Callbacks(BaseStateCallback):
    @staticmethod
    def host_connect_error(state: State, host: Host, error: Exception) -> None:
        _run.notes(host).unreachable = str(error)


def attach_before_connecting() -> None:
    """For inventory files: hear of hosts that cannot be reached, and report when none can.

    pyinfra makes its callback list after it has read the inventory and connects before it reads a
    deploy file, so the only place between the two is the end of State.init.
    """
    if not ctx_state.isset():
        return  # the inventory was imported, not run by pyinfra
    state = ctx_state.get()
    init: Callable[..., None] = state.init

    def init_and_attach(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        _attach(state)

    state.init = init_and_attach


def begin(deploy: str, state: State, *, ok_when: OkWhen = OkWhen.VERIFIED) -> None:
    """For deploy files; they run once a host, so only the first call has an effect."""
    _run.deploy, _run.ok_when = deploy, ok_when
    _attach(state)


def _attach(state: State) -> None:
    if _run.state is None:
        _run.state = state
        state.add_callback_handler(_Callbacks())
        atexit.register(_finish)
        # Where nobody listens to its logger, paramiko prints a traceback for a host that is off
        logging.getLogger("paramiko").addHandler(logging.NullHandler())


def note_failure(host: Host, error: EdgellmError) -> None:
    """Why a host failed; the first reason stands, later ones follow from it."""
    notes = _run.notes(host)
    notes.failure = notes.failure or error


def failure_of(host: Host) -> EdgellmError | None:
    return _run.notes(host).failure


def note_plan(host: Host, plan: TuningPlan) -> None:
    _run.notes(host).plan = plan


def note_found(
    host: Host, knobs: Iterable[KnobState], *, repairable: Iterable[str], is_first: bool
) -> None:
    """The host as the run met it."""
    notes = _run.notes(host)
    notes.knobs, notes.repairable, notes.is_first = tuple(knobs), tuple(repairable), is_first


def note_knobs(host: Host, knobs: Iterable[KnobState]) -> None:
    """The host as the run leaves it."""
    _run.notes(host).knobs = tuple(knobs)


def knobs_of(host: Host) -> tuple[KnobState, ...]:
    return _run.notes(host).knobs


def note_model(name: str, sha256: str) -> None:
    _run.model_name, _run.model_sha256 = name, sha256


def note_smoke(host: Host, result: SmokeResult) -> None:
    _run.notes(host).smoke = result


def note_release(host: Host, release_id: str | None) -> None:
    """The release that runs on the host."""
    _run.notes(host).release = release_id


def note_verified(host: Host, release_id: str) -> None:
    notes = _run.notes(host)
    notes.release, notes.verified = release_id, True


def evidence_against(hosts: Iterable[str]) -> str | None:
    """Why the release that these hosts got must not go further; None: they have proven it.

    A host that is offline or that never got the release (wrong group, no disk) says nothing of
    the release, as long as another one has proven it.
    """
    notes = {name: _run.hosts.get(name, HostNotes()) for name in sorted(hosts)}
    broken = [name for name, note in notes.items() if note.plan is not None and not note.verified]
    if broken:
        return f"{', '.join(broken)} got it and did not become healthy"
    if not any(note.verified for note in notes.values()):
        return f"none of {', '.join(notes)} could prove it"
    return None


def _finish() -> None:
    state = _run.state
    if state is None or not _is_a_run(state):
        return
    report = report_of(_run, state, ended_at=datetime.now(timezone.utc))
    path = write(report, reports_dir())
    show(report, path)
    code = exit_code(report)
    if code:
        # pyinfra exits with 0 when it is interrupted and when --no-wait hosts fail: a script that
        # rolls out would go on. Nothing of this process is left to do after the report.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(report: FleetReport) -> int:
    """0 all ok; 2 where something has drifted and everything could be told; else 1."""
    statuses = {host.status for host in report.hosts} - {HostStatus.OK}
    if not statuses:
        return 0
    untold = any(
        state.verdict is Verdict.UNKNOWN
        for host in report.hosts
        if not host.is_new
        for state in host.knobs
    )
    return EXIT_DRIFTED if statuses == {HostStatus.DRIFTED} and not untold else EXIT_NOT_ALL_OK


def _is_a_run(state: State) -> bool:
    """A deploy of ours that changed, or would have changed, hosts; not --dry, fact, exec.

    An audit is one as soon as it has begun: it never executes anything.
    """
    ours = _run.deploy or _deploy_on_command_line()
    if ours is not None and _run.ok_when is OkWhen.IN_ORDER:
        return True
    return ours is not None and "--dry" not in sys.argv and _anything_happened(state)


def _anything_happened(state: State) -> bool:
    return state.is_executing or bool(state.failed_hosts)


def _deploy_on_command_line() -> str | None:
    """'qwen' where no host could be reached, so that no deploy file ever began."""
    names = [Path(argument) for argument in sys.argv[1:]]
    return next((p.stem for p in names if p.suffix == ".py" and p.parent.name == "deploys"), None)


def report_of(run: Run, state: State, *, ended_at: datetime) -> FleetReport:
    """pyinfra's state and our notes as one report."""
    hosts = [host for host in state.inventory if state.is_host_in_limit(host)]
    stamp = run.started_at.strftime("%Y%m%dT%H%M%SZ")
    return FleetReport(
        run_id=f"{stamp}-{secrets.token_hex(2)}",
        started_at=run.started_at.isoformat(timespec="seconds"),
        ended_at=ended_at.isoformat(timespec="seconds"),
        command=run.deploy or _deploy_on_command_line() or "",
        model_name=run.model_name,
        model_sha256=run.model_sha256,
        is_audit=run.ok_when is OkWhen.IN_ORDER,
        hosts=tuple(
            _host_record(run, state, host) for host in sorted(hosts, key=lambda host: host.name)
        ),
    )


def _host_record(run: Run, state: State, host: Host) -> HostRecord:
    notes = run.notes(host)
    status, reason = _status(run, state, host)
    return HostRecord(
        name=host.name,
        address=str(host.data.get("ssh_hostname") or host.name),
        groups=tuple(dict.fromkeys(group for group in host.groups if group != "all")),
        status=status,
        reason=reason,
        release=notes.release,
        changed=_changed(state, host),
        smoke=notes.smoke,
        plan=notes.plan,
        knobs=notes.knobs,
        repaired=_repaired(notes),
        is_new=notes.is_first,
    )


def _repaired(notes: HostNotes) -> tuple[str, ...]:
    """What had drifted when the run began, and no longer has."""
    if not notes.verified:
        return ()
    still = drifted(notes.knobs)
    return tuple(knob for knob in notes.repairable if knob not in still)


def _status(run: Run, state: State, host: Host) -> tuple[HostStatus, str | None]:
    notes = run.notes(host)
    if host not in state.activated_hosts:
        address = host.data.get("ssh_hostname") or host.name
        port = host.data.get("ssh_port") or 22
        return HostStatus.UNREACHABLE, (
            f"{notes.unreachable or 'no ssh connection'} ({address} port {port}); fix: check power "
            f"and network, then run again with --limit {host.name}"
        )
    if notes.failure is not None:
        return HostStatus.FAILED, str(notes.failure).removeprefix(f"{host.name}: ")
    if host in state.failed_hosts:
        return HostStatus.FAILED, _failed_operation(state, host)
    if run.ok_when is OkWhen.IN_ORDER and notes.knobs:
        return _audited(notes)
    if notes.verified if run.ok_when is OkWhen.VERIFIED else _all_done(run, state, host):
        return HostStatus.OK, None
    return HostStatus.FAILED, (
        f"the run ended before this host was {run.ok_when.value}; fix: run again, it goes on where "
        "it stopped"
    )


def _audited(notes: HostNotes) -> tuple[HostStatus, str | None]:
    """A host that has drifted is called so, also where of some knob it could not be told."""
    if notes.is_first:
        return HostStatus.DRIFTED, "never rolled out to; fix: run deploys/qwen.py"
    off, unknown = (told(notes.knobs, verdict) for verdict in (Verdict.DRIFTED, Verdict.UNKNOWN))
    untold = f"could not tell: {unknown}"
    if off:
        off = f"{off}; {untold}" if unknown else off
        return HostStatus.DRIFTED, f"{off}; fix: deploys/qwen.py puts it right"
    if unknown:
        return HostStatus.FAILED, f"{untold}; fix: run again with --debug"
    return HostStatus.OK, None


def _all_done(run: Run, state: State, host: Host) -> bool:
    operations = _operations(state, host)
    executes = state.is_executing and run.ok_when is OkWhen.DONE
    return executes and all(meta.is_complete() for _, meta in operations)


def _failed_operation(state: State, host: Host) -> str:
    for name, meta in _operations(state, host):
        if meta.is_complete() and meta.did_error():
            said = meta.stderr_lines[-1:] or meta.stdout_lines[-1:] or ["no output"]
            return f"{name}: {said[0]}; fix: run again with -v to see all of its output"
    return "pyinfra failed it before its first operation; fix: see the lines above"


def _changed(state: State, host: Host) -> tuple[str, ...]:
    return tuple(
        name for name, meta in _operations(state, host) if meta.is_complete() and meta.did_change()
    )


def _operations(state: State, host: Host) -> list[tuple[str, Any]]:
    """(name, OperationMeta) in the order of the run."""
    return [
        (min(state.get_op_meta(op_hash).names), state.ops[host][op_hash].operation_meta)
        for op_hash in host.op_hash_order
        if op_hash in state.ops[host]
    ]


def write(report: FleetReport, reports: Path) -> Path:
    """reports/<run>/fleet.json, and reports/latest pointing to the run. Returns the file's path."""
    directory = reports / report.run_id
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "fleet.json"
    partial = directory / ".fleet.json"
    partial.write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    partial.replace(path)
    link = reports / f".latest-{report.run_id}"
    link.symlink_to(report.run_id)
    link.replace(reports / "latest")
    return path


def show(report: FleetReport, path: Path, console: Console | None = None) -> None:
    """The table on the terminal: one line a host, what needs a person first."""
    console = console or _console()
    # Of an audit nothing is timed or changed
    figures = () if report.is_audit else ("ttft_ms", "output_throughput", "changed")
    titles = {"ttft_ms": "TTFT ms median / p95", "output_throughput": "tokens/s"}
    table = Table(title=f"edgellm {report.command}: {summary(report)}", title_justify="left")
    for name in ("host", "status", "release"):
        table.add_column(name, no_wrap=True)
    for name in figures:
        right = name != "changed"
        table.add_column(titles.get(name, name), justify="right" if right else "left", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for row in table_rows(report):
        colour = COLOURS[row.status]
        table.add_row(
            row.host,
            f"[{colour}]{row.status}[/{colour}]",
            row.release,
            *(getattr(row, name) for name in figures),
            escape(row.notes),
        )
    console.print(table)
    if report.is_audit:
        _show_knobs(report, console)
    for line in reason_lines(report):
        console.print(f"  {line}", style="dim", highlight=False, markup=False)
    console.print(f"Report: {path}", highlight=False)


def _show_knobs(report: FleetReport, console: Console) -> None:
    rows = knob_rows(report)
    if not rows:
        return
    table = Table(
        title="Knobs that are not as planned; the report has all of them",
        title_justify="left",
        show_lines=True,
    )
    for name in ("hosts", "knob", "verdict", "states"):
        table.add_column(name, overflow="fold", no_wrap=name == "verdict")
    for row in rows:
        colour = COLOURS.get(row.verdict, "yellow")
        # Below each other: side by side, a path in one of them would leave the others no room
        states = Table.grid(padding=(0, 2, 0, 0))
        states.add_column(no_wrap=True, style="dim")
        states.add_column(overflow="fold")
        for name, value in (*row.states, ("why", row.why)):
            states.add_row(name, escape(value))
        verdict = f"[{colour}]{row.verdict}[/{colour}]"
        table.add_row(escape(row.hosts), escape(row.knob), verdict, states)
    console.print(table)


def _console() -> Console:
    if sys.stdout.isatty():
        return Console()
    return Console(width=int(os.environ.get("COLUMNS") or WIDTH_WITHOUT_TERMINAL))
