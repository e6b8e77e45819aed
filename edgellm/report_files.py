"""reports/: a directory a run, `latest`, history.jsonl and metrics. One FleetReport -> all of it.

What cannot be rendered or written is told, and costs no other file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgellm import reports
from edgellm.report import FleetReport, HostRecord
from edgellm.reports import history, prometheus, schema

HISTORY = "history.jsonl"
# Apart from `latest`: that has the hosts of one run, and of a run that tells nothing of health none
METRICS = "metrics/fleet.prom"
# 1,000 hosts with 20 runs each are about 6 MB.
MAX_HISTORY_BYTES = 16 * 2**20
LOCK_WITHIN_S = 5.0  # somebody else's run is writing: a few milliseconds

Earlier = dict[str, tuple[schema.PastRun, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a report's files."""

    report: FleetReport  # with each host's history
    path: Path  # of fleet.json
    faults: tuple[str, ...]  # "fleet.html: No space left on device"


def write(report: FleetReport, root: Path) -> Written:
    """reports/<run>/, `latest` pointing to it, and the host's lines in history and metrics.

    Never raises.
    """
    faults: list[str] = []

    def kept(name: str, do: Callable[[], object]) -> bool:
        try:
            do()
        except Exception as error:
            faults.append(f"{name}: {error or type(error).__name__}")
            return False
        return True

    fleet: schema.Fleet | None = None

    def remembered() -> None:
        nonlocal report, fleet
        if fleet is not None:
            report, fleet = with_history(report, fleet, earlier_runs(root))

    directory = root / report.run_id
    kept(str(directory), lambda: directory.mkdir(parents=True, exist_ok=True))
    try:
        fleet = schema.load(report.to_json())
    except Exception as error:
        faults.append(f"all but fleet.json: {error}")
    kept(HISTORY, remembered)
    path = directory / "fleet.json"
    kept(path.name, lambda: _place(path, fleet_json_text(report)))
    if fleet is not None:
        for name, render in reports.RENDERERS.items():
            kept(name, partial(_render, fleet, render, directory / name))
        kept(HISTORY, lambda: append(root, history.lines(fleet)))
        kept(METRICS, partial(_publish, root, directory / "fleet.prom"))
    kept("latest", lambda: _point(root, report.run_id))
    return Written(report=report, path=path, faults=tuple(faults))


def fleet_json_text(report: FleetReport) -> str:
    found = schema.without_halves(report.to_json())
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def with_history(
    report: FleetReport, fleet: schema.Fleet, earlier: Earlier
) -> tuple[FleetReport, schema.Fleet]:
    """Each host with its earlier runs, and what they say of this one.

    `fleet` is the same report as its readers have it, and stays so.
    """
    hosts = [
        host.model_copy(
            update={
                "history": tuple(
                    run for run in earlier.get(host.name, ()) if run.run_id != fleet.run_id
                )
            }
        )
        for host in fleet.hosts
    ]
    records = [
        _with_history(record, fleet, host) for record, host in zip(report.hosts, hosts, strict=True)
    ]
    return (
        replace(report, hosts=tuple(records)),
        fleet.model_copy(update={"hosts": tuple(hosts)}),
    )


def _with_history(record: HostRecord, fleet: schema.Fleet, host: schema.Host) -> HostRecord:
    trend = history.trend_of(fleet, host)
    since = history.slower_since_of(fleet, host)
    return replace(
        record,
        history=tuple(run.model_dump(exclude_none=True) for run in host.history),
        trend=None if trend is None else trend.direction,
        slower_since=None if since is None else since.text,
    )


def earlier_runs(root: Path) -> Earlier:
    """The last runs of each host. {} where there is no history."""
    return history.read(_tail(root / HISTORY))


def _tail(path: Path) -> str:
    """At most the last MAX_HISTORY_BYTES: what another tool left there must not fill the memory."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_HISTORY_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def append(root: Path, lines: str) -> None:
    """One write, under a lock; the oldest runs go where the file has become too long."""
    if not lines:
        return
    path = root / HISTORY
    with _locked(root / f".{HISTORY}.lock") as locked:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            data = lines.encode()
            if os.write(descriptor, data) < len(data):
                raise OSError("not all of it could be written")
            size_bytes = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if locked and size_bytes > MAX_HISTORY_BYTES:
            _place(path, history.kept(_tail(path)))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """False where it could not be had in time: a run must end, and lines are appended whole."""
    with path.open("ab") as file:
        until = time.monotonic() + LOCK_WITHIN_S
        locked = False
        while not locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError:
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)
        yield locked


def _publish(root: Path, of_this_run: Path) -> None:
    """The newest of every host, for what scrapes. The lock is for runs that end together."""
    if not of_this_run.exists():
        return  # it tells nothing of health
    path = root / METRICS
    path.parent.mkdir(exist_ok=True)
    with _locked(root / f".{path.name}.lock"):
        earlier = path.read_text("utf-8", "replace") if path.exists() else ""
        _place(path, prometheus.merged(of_this_run.read_text("utf-8"), earlier))


def _render(fleet: schema.Fleet, render: Callable[[schema.Fleet], str], path: Path) -> None:
    """Of a list without hosts there is no file: an empty --limit would limit nothing."""
    if text := render(fleet):
        _place(path, text)


def _place(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(text.encode("utf-8", "replace"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _point(root: Path, run_id: str) -> None:
    link = root / f".latest-{run_id}"
    link.symlink_to(run_id)
    link.replace(root / "latest")
