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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyinfra.api.state import BaseStateCallback
from pyinfra.context import ctx_state
from rich.console import Console
from rich.table import Table

from edgellm.errors import EdgellmError
from edgellm.health import SmokeResult
from edgellm.report import FleetReport, HostRecord, HostStatus, reason_lines, summary, table_rows
from edgellm.tuning import TuningPlan

if TYPE_CHECKING:
    from pyinfra.api import Host, State

EXIT_NOT_ALL_OK = 1
# A terminal tells its width; a pipe or a log file does not, and 80 columns would wrap every reason.
WIDTH_WITHOUT_TERMINAL = 160


def reports_dir() -> Path:
    """Where runs are kept: EDGELLM_REPORTS_DIR, or ./reports."""
    return Path(os.environ.get("EDGELLM_REPORTS_DIR") or "reports")


@dataclass(slots=True, kw_only=True)
class HostNotes:
    """What our own code knows of a host beyond pyinfra's results; filled in as the run goes."""

    failure: EdgellmError | None = None
    unreachable: str | None = None
    plan: TuningPlan | None = None
    release: str | None = None  # the one that runs, as far as this run knows
    verified: bool = False
    smoke: SmokeResult | None = None


@dataclass(slots=True, kw_only=True)
class Run:
    """The run of this process."""

    started_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    deploy: str | None = None  # None until a deploy file of ours has begun
    verifies: bool = True  # a host is ok when it was verified; else, when all was done on it
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


def begin(deploy: str, state: State, *, verifies: bool = True) -> None:
    """For deploy files; they run once a host, so only the first call has an effect."""
    _run.deploy, _run.verifies = deploy, verifies
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
    if any(host.status is not HostStatus.OK for host in report.hosts):
        # pyinfra exits with 0 when it is interrupted and when --no-wait hosts fail: a script that
        # rolls out would go on. Nothing of this process is left to do after the report.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_NOT_ALL_OK)


def _is_a_run(state: State) -> bool:
    """A deploy of ours that changed, or would have changed, hosts; not --dry, fact, exec."""
    ours = _run.deploy or _deploy_on_command_line()
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
    )


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
    if notes.verified if run.verifies else _all_done(state, host):
        return HostStatus.OK, None
    done = "verified" if run.verifies else "done"
    return HostStatus.FAILED, (
        f"the run ended before this host was {done}; fix: run again, it goes on where it stopped"
    )


def _all_done(state: State, host: Host) -> bool:
    operations = _operations(state, host)
    return state.is_executing and all(meta.is_complete() for _, meta in operations)


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
    table = Table(title=f"edgellm {report.command}: {summary(report)}", title_justify="left")
    for heading, options in (
        ("host", {"no_wrap": True}),
        ("status", {"no_wrap": True}),
        ("release", {"no_wrap": True}),
        ("TTFT ms median / p95", {"justify": "right", "no_wrap": True}),
        ("tokens/s", {"justify": "right"}),
        ("changed", {"no_wrap": True}),
        ("notes", {"overflow": "fold"}),
    ):
        table.add_column(heading, **options)
    colours = {"ok": "green", "failed": "red", "unreachable": "yellow"}
    for row in table_rows(report):
        colour = colours[row.status]
        table.add_row(
            row.host,
            f"[{colour}]{row.status}[/{colour}]",
            row.release,
            row.ttft_ms,
            row.output_throughput,
            row.changed,
            row.notes.replace("[", "\\["),
        )
    console.print(table)
    for line in reason_lines(report):
        console.print(f"  {line}", style="dim", highlight=False, markup=False)
    console.print(f"Report: {path}", highlight=False)


def _console() -> Console:
    if sys.stdout.isatty():
        return Console()
    return Console(width=int(os.environ.get("COLUMNS") or WIDTH_WITHOUT_TERMINAL))
