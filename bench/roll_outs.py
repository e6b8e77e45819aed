"""A fleet of this machine, and pyinfra's command line on it as a person types it."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers import REPO
from demo.fleet import DemoHost, Fleet
from demo.model import SMALL_MODEL

RUN_DEADLINE_S = 600.0
ROOT = "root"  # both sides log in as root: sudo would cost each of them the same

SETTINGS: dict[str, Any] = {
    **SMALL_MODEL,
    # A demo host's vm.* is its own copy and would be left alone: asked for, there is one more knob
    "swappiness": 10,
    # Eight hosts share the cores of this machine, and all of them load at the same time
    "ttft_budget_ms": 120_000,
    "ttft_regression_percent": None,
    "first_token_deadline_s": 120,
    "request_deadline_s": 300,
    "load_deadline_s": 600,
    "smoke_requests": 1,
    "smoke_max_tokens": 2,
}


class RerunError(Exception):
    """A run did not do what is to be measured; the message has what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that has ended. `cpu_s`: of it and of all that it started here, not of the hosts"""

    exit_code: int
    output: str
    wall_s: float
    cpu_s: float


def run_timed(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Finished:
    """From the start of the process to its end. Raises RerunError at the deadline."""

    def children_cpu_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    cpu_before_s = children_cpu_s()
    with log.open("w") as output:
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=RUN_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RerunError(f"{command[0]}: still running after {RUN_DEADLINE_S:.0f} s") from None
        wall_s = time.monotonic() - began
    return Finished(
        exit_code=done.returncode,
        output=log.read_text(errors="replace"),
        wall_s=wall_s,
        cpu_s=children_cpu_s() - cpu_before_s,
    )


def environment(**more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "LANG": "C.UTF-8", "COLUMNS": "2000", **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollOuts:
    """`pyinfra -y INVENTORY deploys/….py`, with the inventory and the reports in `folder`."""

    fleet: Fleet
    folder: Path

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    @property
    def environment(self) -> dict[str, str]:
        return environment(EDGELLM_REPORTS_DIR=str(self.reports))

    def command(self, *arguments: str, deploy: str = "qwen") -> list[str]:
        program = str(Path(sys.executable).with_name("pyinfra"))
        return [program, "-y", str(self._inventory()), f"deploys/{deploy}.py", *arguments]

    def run(self, *arguments: str, deploy: str = "qwen") -> Finished:
        return run_timed(
            self.command(*arguments, deploy=deploy),
            cwd=REPO,
            env=self.environment,
            log=self.folder / f"{deploy}.log",
        )

    def report(self) -> dict[str, Any]:
        """fleet.json of the last run. Raises RerunError."""
        try:
            path = self.reports / "latest" / "fleet.json"
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise RerunError(f"no report of the last run: {error}") from None
        return found

    def run_well(self, *arguments: str) -> tuple[Finished, dict[str, list[str]]]:
        """deploys/qwen.py with all hosts ok -> it, and host -> what it changed. Else RerunError."""
        done = self.run(*arguments)
        if done.exit_code != 0:
            raise RerunError(f"deploys/qwen.py: exit {done.exit_code}\n{tail(done.output)}")
        return done, changed(self.report(), [host.name for host in self.fleet.hosts])

    def run_unchanged(self, *arguments: str) -> Finished:
        """The same, and nothing changed on any host. Else RerunError."""
        done, changes = self.run_well(*arguments)
        if any(changes.values()):
            raise RerunError(f"a run that should change nothing changed {changes}")
        return done

    def _inventory(self) -> Path:
        arch = "arm64" if platform.machine() == "aarch64" else "x86_64"
        # Each host's own data: group_data of its architecture would beat the data of a group
        hosts = [(host.name, SETTINGS | self._host_data(host)) for host in self.fleet.hosts]
        path = self.folder / "rerun.py"
        path.write_text(
            "from edgellm import recorder as _recorder\n"
            f"rerun = {hosts!r}\n"
            f"{arch} = {[host.name for host in self.fleet.hosts]!r}\n"
            "_recorder.attach_before_connecting()\n"
        )
        return path

    def _host_data(self, host: DemoHost) -> dict[str, Any]:
        return {
            "ssh_hostname": host.address,
            "ssh_port": host.ssh_port,
            "ssh_user": ROOT,
            "ssh_key": str(self.fleet.private_key),
            "ssh_known_hosts_file": str(self.fleet.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "site": "bench",
        }


def changed(report: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """fleet.json -> host: operations that changed it. Raises RerunError unless all are ok."""
    statuses = {record["name"]: record["status"] for record in report["hosts"]}
    if statuses != dict.fromkeys(names, "ok"):
        reasons = [record["reason"] for record in report["hosts"] if record["reason"]]
        raise RerunError(f"want {', '.join(names)} ok, have {statuses}: {'; '.join(reasons)}")
    return {record["name"]: list(record["changed"]) for record in report["hosts"]}


def tail(text: str, n_lines: int = 25) -> str:
    return "\n".join(text.splitlines()[-n_lines:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecChannels:
    """Counts the commands that a host's own sshd was asked to run, whoever the client is."""

    fleet: Fleet
    host: DemoHost

    def start(self) -> None:
        """From now on sshd says of each channel what it is for, in the host's journal."""
        config = "/etc/ssh/sshd_config.d/05-bench.conf"  # the first setting of a name counts
        self.fleet.exec(
            self.host, "sh", "-c", f"echo 'LogLevel VERBOSE' > {config} && systemctl reload ssh"
        )

    def total(self) -> int:
        self.fleet.exec(self.host, "journalctl", "--sync")
        said = self.fleet.exec(self.host, "journalctl", "-b", "-o", "cat", "--no-pager").stdout
        return count_sessions(said)


def count_sessions(journal: str) -> int:
    """Lines 'Starting session: command for root from …' and those of subsystems (sftp)."""
    return sum(line.startswith("Starting session: ") for line in journal.splitlines())
