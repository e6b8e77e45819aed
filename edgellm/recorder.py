"""What happened in a run, host by host: pyinfra's callbacks and our notes -> reports/<run>/.

The report is written when the process ends, so also when every host failed, none was reached, or
the run was interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyinfra.api.state import BaseStateCallback
from pyinfra.context import ctx_state
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgellm import live, report_files
from edgellm.drift import KnobState, Verdict, drifted
from edgellm.errors import (
    EdgellmError,
    HeldBackError,
    InventoryError,
    ModelError,
    SettingsError,
    printable,
)
from edgellm.hardware import HostProfile
from edgellm.health import HealthVerdict, Peer, SmokeResult, compare_with_peers
from edgellm.report import (
    EXIT_BY_SIGNAL,
    ExitCode,
    Fault,
    FleetReport,
    HostRecord,
    HostStatus,
    exit_code,
    knob_rows,
    reason_lines,
    summary,
    table_rows,
    told,
)
from edgellm.reports import retry
from edgellm.tuning import TuningPlan

if TYPE_CHECKING:
    from pyinfra.api import Host, State

COLOURS = {
    "ok": "green",
    "failed": "red",
    "unreachable": "yellow",
    "drifted": "magenta",
    "pending": "cyan",
}
# Nothing on a host has to be mended: what was given to the run is wrong.
INPUT_ERRORS = (SettingsError, InventoryError, ModelError)
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
    PROVEN = "asked"  # nothing is done on it, it answers well, and every knob is as it should be


@dataclass(slots=True, kw_only=True)
class HostNotes:
    """What our own code knows of a host beyond pyinfra's results; filled in as the run goes."""

    failure: EdgellmError | None = None
    unreachable: str | None = None
    plan: TuningPlan | None = None
    release: str | None = None  # the one that runs, as far as this run knows
    verified: bool = False
    smoke: SmokeResult | None = None
    from_control: SmokeResult | None = None  # the same questions, asked from the control machine
    verdict: HealthVerdict | None = None
    hardware_class: str | None = None
    kernel: str | None = None
    model_name: str | None = None
    model_sha256: str | None = None  # None: another server on the host has it
    knobs: tuple[KnobState, ...] = ()  # as they were when they were last compared
    repairable: tuple[str, ...] = ()  # knobs that had drifted when the run began
    is_first: bool = False  # nothing of ours was on the host then


@dataclass(slots=True, kw_only=True)
class Run:
    """The run of this process."""

    started_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    suffix: str = field(default_factory=lambda: secrets.token_hex(2))
    deploy: str | None = None  # None until a deploy file of ours has begun
    ok_when: OkWhen = OkWhen.VERIFIED
    model_name: str | None = None
    model_sha256: str | None = None
    hosts: dict[str, HostNotes] = field(default_factory=dict)
    state: State | None = None
    interrupted_by: str | None = None  # "SIGINT"
    ends_with_a_report: bool = False

    @property
    def id(self) -> str:
        """'20261202T101500Z-1a2b': sorts by time, and two at one time differ."""
        return f"{self.started_at.strftime('%Y%m%dT%H%M%SZ')}-{self.suffix}"

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
    _end_with_a_report()
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
        live.attach(state)
        _end_with_a_report()
        # Where nobody listens to its logger, paramiko prints a traceback for a host that is off
        logging.getLogger("paramiko").addHandler(logging.NullHandler())


def _end_with_a_report() -> None:
    """At the end of the process, also where a signal ends it."""
    if _run.ends_with_a_report:
        return
    _run.ends_with_a_report = True
    atexit.register(_finish)
    for name in EXIT_BY_SIGNAL:
        before = signal.getsignal(getattr(signal, name))
        if before is not signal.SIG_IGN:  # nohup
            signal.signal(getattr(signal, name), _noting(name, before))


def _noting(name: str, before: Any) -> Callable[[int, FrameType | None], None]:
    """pyinfra's own way to end where it has one (Ctrl-C), else the exit handlers run as well."""

    def handler(number: int, frame: FrameType | None) -> None:
        _run.interrupted_by = _run.interrupted_by or name
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        sys.exit(EXIT_BY_SIGNAL[name])

    return handler


def run_directory() -> Path:
    """Where the files of this run go, and what an operation leaves for the operator."""
    return reports_dir() / _run.id


def note_failure(host: Host, error: EdgellmError) -> None:
    """Why a host failed; the first reason stands, later ones follow from it."""
    notes = _run.notes(host)
    notes.failure = notes.failure or error
    if isinstance(notes.failure, HeldBackError):
        live.note_held_back(host.name)


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


def note_model(host: Host, name: str, sha256: str | None) -> None:
    notes = _run.notes(host)
    notes.model_name, notes.model_sha256 = name, sha256
    if sha256 is not None:
        _run.model_name, _run.model_sha256 = name, sha256


def note_profile(host: Host, profile: HostProfile) -> None:
    notes = _run.notes(host)
    notes.hardware_class, notes.kernel = profile.hardware_class, profile.kernel.release


def note_smoke(host: Host, result: SmokeResult) -> None:
    _run.notes(host).smoke = result


def note_from_control(host: Host, result: SmokeResult) -> None:
    """What the smoke test saw through the ssh connection."""
    _run.notes(host).from_control = result


def note_verdict(host: Host, verdict: HealthVerdict) -> None:
    _run.notes(host).verdict = verdict


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
    """The report, whatever fails in it, and then the exit code."""
    if _run.deploy is None and _deploy_on_command_line() is None:
        return
    for name in EXIT_BY_SIGNAL:
        # A second Ctrl-C must not cut the report; it takes a second
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    code = EXIT_BY_SIGNAL[_run.interrupted_by] if _run.interrupted_by else None
    if _run.state is not None and _is_a_run(_run.state):
        try:
            _compare_with_peers(_run)
            report = report_of(_run, _run.state, ended_at=datetime.now(timezone.utc))
            code = exit_code(report)
            _tell(report_files.write(report, reports_dir()))
        except Exception as error:  # ours; what became of the hosts is in pyinfra's own lines
            code = code or ExitCode.FAILED
            _complain(f"no report: {type(error).__name__}: {error}")
    if code:
        # pyinfra exits with 0 when it is interrupted and when --no-wait hosts fail: a script that
        # rolls out would go on. Nothing of this process is left to do after the report.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _tell(written: report_files.Written) -> None:
    for fault in written.faults:
        _complain(f"report: {fault}")
    try:
        show(written.report, written.path)
    except OSError:
        pass  # the terminal is gone, or `| head` has ended
    except Exception as error:  # the files are there, and what the hosts are like is in them
        _complain(f"no table: {type(error).__name__}: {error}; see {written.path}")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"edgellm: {text}", file=sys.stderr)


def _compare_with_peers(run: Run) -> None:
    """An outlier among hosts alike gets a warning beside its verdict."""
    peers = [
        Peer(
            host=name,
            hardware_class=notes.hardware_class,
            model=notes.model_sha256 or notes.model_name,
            result=notes.smoke,
        )
        for name, notes in run.hosts.items()
        if notes.hardware_class is not None and notes.smoke is not None
    ]
    for name, warning in compare_with_peers(peers).items():
        notes = run.hosts[name]
        known = notes.verdict or HealthVerdict(healthy=notes.verified, reasons=())
        notes.verdict = replace(known, warnings=(*known.warnings, warning))


def _is_a_run(state: State) -> bool:
    """A deploy of ours that changed, or would have changed, hosts; not --dry, fact, exec.

    An audit is one as soon as it has begun: it never executes anything.
    """
    ours = _run.deploy or _deploy_on_command_line()
    if ours is not None and _run.ok_when is OkWhen.IN_ORDER:
        return True
    return ours is not None and "--dry" not in sys.argv and _anything_happened(state)


def _anything_happened(state: State) -> bool:
    return state.is_executing or bool(state.failed_hosts) or _run.interrupted_by is not None


def _deploy_on_command_line() -> str | None:
    """'qwen' where no host could be reached, so that no deploy file ever began."""
    names = [Path(argument) for argument in sys.argv[1:]]
    return next((p.stem for p in names if p.suffix == ".py" and p.parent.name == "deploys"), None)


def report_of(run: Run, state: State, *, ended_at: datetime) -> FleetReport:
    """pyinfra's state and our notes as one report."""
    hosts = [host for host in state.inventory if state.is_host_in_limit(host)]
    return FleetReport(
        run_id=run.id,
        started_at=run.started_at.isoformat(timespec="seconds"),
        ended_at=ended_at.isoformat(timespec="seconds"),
        command=run.deploy or _deploy_on_command_line() or "",
        model_name=run.model_name,
        model_sha256=run.model_sha256,
        is_audit=run.ok_when is OkWhen.IN_ORDER,
        invocation=tuple(retry.invocation_of(sys.argv)),
        interrupted_by=run.interrupted_by,
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
        fault=_fault(notes) if status is HostStatus.FAILED else None,
        hardware_class=notes.hardware_class,
        kernel=notes.kernel,
        model_name=notes.model_name,
        model_sha256=notes.model_sha256,
        verdict=notes.verdict,
        from_control=notes.from_control,
        knobs=notes.knobs,
        repaired=_repaired(notes),
        is_new=notes.is_first,
    )


def _fault(notes: HostNotes) -> Fault:
    return Fault.INPUT if isinstance(notes.failure, INPUT_ERRORS) else Fault.HOST


def _repaired(notes: HostNotes) -> tuple[str, ...]:
    """What had drifted when the run began, and no longer has."""
    if not notes.verified:
        return ()
    still = drifted(notes.knobs)
    return tuple(knob for knob in notes.repairable if knob not in still)


def _status(run: Run, state: State, host: Host) -> tuple[HostStatus, str | None]:
    notes = run.notes(host)
    if host not in state.activated_hosts:
        if run.interrupted_by is not None and notes.unreachable is None:
            return HostStatus.PENDING, _cut_off(run, "was connected to")
        address = host.data.get("ssh_hostname") or host.name
        port = host.data.get("ssh_port") or 22
        return HostStatus.UNREACHABLE, (
            f"{notes.unreachable or 'no ssh connection'} ({address} port {port}); fix: check power "
            f"and network, then run again with --limit {host.name}"
        )
    if notes.failure is not None:
        held_back = isinstance(notes.failure, HeldBackError)
        status = HostStatus.PENDING if held_back else HostStatus.FAILED
        return status, str(notes.failure).removeprefix(f"{host.name}: ")
    if host in state.failed_hosts:
        return HostStatus.FAILED, _failed_operation(state, host)
    if run.ok_when is OkWhen.IN_ORDER and notes.knobs:
        return _audited(notes)
    if run.ok_when is OkWhen.PROVEN and notes.verified:
        return _audited(notes)
    if notes.verified if run.ok_when is OkWhen.VERIFIED else _all_done(run, state, host):
        return HostStatus.OK, None
    return HostStatus.PENDING, _cut_off(run, f"was {run.ok_when.value}", _changed(state, host))


def _cut_off(run: Run, until: str, changed: tuple[str, ...] = ()) -> str:
    by = f" ({run.interrupted_by})" if run.interrupted_by else ""
    so_far = f", after {len(changed)} operations had changed it" if changed else ""
    return (
        f"the run ended before this host {until}{by}{so_far}; fix: run again, it goes on where it "
        "stopped"
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


def show(report: FleetReport, path: Path, console: Console | None = None) -> None:
    """The table on the terminal: one line a host, what needs a person first."""
    console = console or _console()
    # Of an audit nothing is timed or changed
    figures = [] if report.is_audit else ["ttft_ms", "output_throughput", "changed"]
    if any(host.from_control is not None for host in report.hosts):
        figures.insert(1, "from_control_ms")
    titles = {
        "ttft_ms": "TTFT ms median / p95",
        "from_control_ms": "as seen from here",
        "output_throughput": "tokens/s",
    }
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
            escape(printable(row.host)),
            f"[{colour}]{row.status}[/{colour}]",
            escape(printable(row.release)),
            *(getattr(row, name) for name in figures),
            escape(printable(row.notes)),
        )
    console.print(table)
    if report.is_audit:
        _show_knobs(report, console)
    for line in reason_lines(report):
        console.print(f"  {printable(line)}", style="dim", highlight=False, markup=False)
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
            states.add_row(name, escape(printable(value)))
        verdict = f"[{colour}]{row.verdict}[/{colour}]"
        knob = escape(printable(row.knob))
        table.add_row(escape(row.hosts), knob, verdict, states)
    console.print(table)


def _console() -> Console:
    if sys.stdout.isatty():
        return Console()
    return Console(width=int(os.environ.get("COLUMNS") or WIDTH_WITHOUT_TERMINAL))
