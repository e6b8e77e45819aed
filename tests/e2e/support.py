"""What the tests act with: the product's own command line, and plain ssh to look at the hosts."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from demo.fleet import Fleet
from demo.model import SMALL_MODEL

REPO = Path(__file__).parents[2]
PYINFRA = REPO / ".venv" / "bin" / "pyinfra"

THREE = ("edge-1", "edge-2", "edge-3")
SPARE = "edge-4"  # empty until a test wants a host that has never been rolled out to
LOGINS = {"edge-1": "root", "edge-2": "ops", "edge-3": "opspw", SPARE: "root"}
ARCH = "arm64" if platform.machine() == "aarch64" else "x86_64"
WRONG_ARCH = "x86_64" if ARCH == "arm64" else "arm64"

MODEL_NAME = str(SMALL_MODEL["model_name"])
MODEL_SHA256 = str(SMALL_MODEL["model_sha256"])
MODEL_SIZE_BYTES = int(SMALL_MODEL["model_size_bytes"])
MODEL_PATH = f"/opt/edgellm/models/{MODEL_SHA256}.gguf"
SETTINGS: dict[str, Any] = {
    **SMALL_MODEL,
    # Three hosts share the cores of this machine and are tested at the same time
    "ttft_budget_ms": 20000,
    "ttft_regression_percent": None,
}
# Operations of deploys/qwen.py by name, where a test expects them to have changed a host
PACKAGES = "numactl, chrt, libgomp and libstdc++ installed"
KERNEL_FILES = "sysctl.d and limits.d files present"
RUNTIME = "Runtime present and able to run here"
MODEL = "Model file present and verified"
ACCOUNT = "System account edgellm present"
API_KEYS = "API key files present"
RELEASE_FILES = "Release files present"
UNITS = "systemd units present"
SERVICE = "Service runs the release"
RECORD = "Verified host recorded"
ROLLED_BACK = "Previous release back"
PRUNED = "Old releases pruned"

# For runs whose smoke test is not what the test is about
FAST = ("--data", "smoke_requests=1", "--data", "smoke_max_tokens=4")
SOME_CHANGE = ("--data", "n_ctx=1024")  # makes another release
# Three hosts from nothing take about 40 s; twice that when the machine is busy.
RUN_DEADLINE_S = 240.0

T = TypeVar("T")


def knob_name(knob: str) -> str:
    """'server.env' of '/opt/edgellm/releases/<id>/server.env'; else as it is."""
    match = re.fullmatch(r"/opt/edgellm/releases/\w+/(.+)", knob)
    return match[1] if match else knob


def wait_until(what: str, look: Callable[[], T | None], deadline_s: float = 60.0) -> T:
    """The first value of `look` that is true. Raises AssertionError at the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


@dataclass(frozen=True)
class Run:
    """One run of the command line. `report` is the fleet.json that it wrote; None: none."""

    exit_code: int
    output: str
    report: dict[str, Any] | None
    duration_s: float

    def host(self, name: str) -> dict[str, Any]:
        """The host's record in the report."""
        assert self.report is not None, f"no report was written\n{self.output}"
        (record,) = [record for record in self.report["hosts"] if record["name"] == name]
        return dict(record)

    def statuses(self) -> dict[str, str]:
        assert self.report is not None, f"no report was written\n{self.output}"
        return {record["name"]: record["status"] for record in self.report["hosts"]}

    def changed(self) -> dict[str, list[str]]:
        """Host -> the operations that changed it, without the step before the '|'."""
        assert self.report is not None, f"no report was written\n{self.output}"
        return {
            record["name"]: [name.split(" | ")[-1] for name in record["changed"]]
            for record in self.report["hosts"]
        }

    def drifted(self) -> dict[str, list[str]]:
        """Host -> the knobs that are not as they should be, or that nobody could tell, sorted."""
        assert self.report is not None, f"no report was written\n{self.output}"
        return {
            record["name"]: sorted(
                knob_name(knob["knob"])
                for knob in record["knobs"]
                if knob["verdict"] in ("drifted", "unknown")
            )
            for record in self.report["hosts"]
        }

    def repaired(self) -> dict[str, list[str]]:
        """Host -> the knobs that this run put right, sorted."""
        assert self.report is not None, f"no report was written\n{self.output}"
        return {
            record["name"]: sorted(map(knob_name, record["repaired"]))
            for record in self.report["hosts"]
        }

    def assert_ok(self, *names: str) -> Run:
        """Exit 0, and these hosts and no others are ok. Returns the run."""
        assert self.exit_code == 0, self.output
        assert self.statuses() == dict.fromkeys(names, "ok"), self.output
        assert "Traceback" not in self.output, self.output
        return self

    def assert_changed_nothing(self) -> Run:
        assert {name: [] for name in self.changed()} == self.changed(), self.output
        return self

    def assert_bad(self, host: str, status: str, *words: str) -> Run:
        """Exit not 0; the host's reason has these words and a fix, in the report and on screen."""
        assert self.exit_code != 0, self.output
        assert "Traceback" not in self.output, self.output
        record = self.host(host)
        assert record["status"] == status, self.output
        assert all(word in record["reason"] for word in (*words, "fix: ")), record["reason"]
        return self.assert_told(host, *words, "fix: ")

    def assert_told(self, *words: str) -> Run:
        """One line of the output has all these words: as a person would look for them."""
        found = [line for line in self.output.splitlines() if all(word in line for word in words)]
        assert found, f"no line has all of {words}\n{self.output}"
        return self


@dataclass(frozen=True)
class Started:
    """A run that is under way in a process of its own."""

    process: subprocess.Popen[str]
    console: Path
    reports: Path
    latest_before: str | None
    started_s: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        """What it has said so far."""
        return self.console.read_text(errors="replace")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """A test that fails meanwhile leaves no run behind."""
        if self.is_running():
            self.process.kill()
            self.process.wait()

    def finish(self, deadline_s: float = RUN_DEADLINE_S) -> Run:
        try:
            exit_code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s\n{self.output()}") from None
        latest = latest_run(self.reports)
        report = None
        if latest != self.latest_before:
            report = json.loads((self.reports / "latest" / "fleet.json").read_text())
        return Run(exit_code, self.output(), report, time.monotonic() - self.started_s)


def latest_run(reports: Path) -> str | None:
    link = reports / "latest"
    return os.readlink(link) if link.is_symlink() else None


@dataclass(frozen=True)
class CommandLine:
    """`pyinfra -y INVENTORY deploys/qwen.py …` in the clone, as a person types it."""

    fleet: Fleet
    folder: Path

    @property
    def reports(self) -> Path:
        return self.folder / "reports"

    def inventory(
        self,
        name: str,
        hosts: Sequence[str] = THREE,
        *,
        in_wrong_group: Sequence[str] = (),
        per_host: Mapping[str, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Path:
        """An inventory file like inventories/demo.py; `settings` are added to SETTINGS."""
        own = per_host or {}
        # Each host's own data: group_data of its architecture would beat the data of a group
        everywhere = {**SETTINGS, **settings}
        data = [(host, everywhere | self._host_data(host) | own.get(host, {})) for host in hosts]
        right = [host for host in hosts if host not in in_wrong_group]
        lines = [
            "from edgellm import recorder as _recorder",
            f"{name} = {data!r}",
            f"{ARCH} = {right!r}",
            f"{WRONG_ARCH} = {list(in_wrong_group)!r}",
            "_recorder.attach_before_connecting()",
        ]
        path = self.folder / f"{name}.py"
        path.touch(mode=0o600)  # a sudo password is in it
        path.write_text("\n".join(lines) + "\n")
        return path

    def _host_data(self, name: str) -> dict[str, Any]:
        host = self.fleet.host(name)
        data = {
            "ssh_hostname": host.address,
            "ssh_port": host.ssh_port,
            "ssh_user": LOGINS[name],
            "ssh_key": str(self.fleet.private_key),
            "ssh_known_hosts_file": str(self.fleet.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "ssh_connect_retries": 2,
            "site": "e2e",
        }
        if LOGINS[name] != "root":
            data["_sudo"] = True
        if LOGINS[name] == "opspw":
            data["_sudo_password"] = self.fleet.opspw_password_file.read_text().strip()
        return data

    def start(
        self,
        *arguments: str,
        inventory: Path | None = None,
        deploy: str = "qwen",
        env: dict[str, str] | None = None,
    ) -> Started:
        """Starts the run and comes back at once."""
        command = [
            *(str(PYINFRA), "-y", str(inventory or self.inventory("three"))),
            *(f"deploys/{deploy}.py", *arguments),
        ]
        self.reports.mkdir(exist_ok=True)
        console = self.folder / "console.log"
        environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "LANG": "C.UTF-8",
            "COLUMNS": "2000",  # or the table's reasons wrap, and cannot be searched
            "EDGELLM_REPORTS_DIR": str(self.reports),
            **(env or {}),
        }
        latest_before = latest_run(self.reports)
        with console.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=REPO,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return Started(process, console, self.reports, latest_before)

    def __call__(
        self,
        *arguments: str,
        inventory: Path | None = None,
        deploy: str = "qwen",
        env: dict[str, str] | None = None,
    ) -> Run:
        """The whole run."""
        with self.start(*arguments, inventory=inventory, deploy=deploy, env=env) as run:
            return run.finish()


def get(fleet: Fleet, host: str, path: str) -> httpx.Response | None:
    """A GET through the host's http port; None: nobody answers."""
    url = f"http://127.0.0.1:{fleet.host(host).http_port}{path}"
    try:
        return httpx.get(url, timeout=10)
    except httpx.HTTPError:
        return None


def wait_ready(fleet: Fleet, host: str) -> None:
    """Until the server has loaded its model."""

    def is_ready() -> bool:
        answer = get(fleet, host, "/health")
        return answer is not None and answer.status_code == 200

    wait_until(f"{host} ready", is_ready)


@dataclass(frozen=True)
class Ssh:
    """The plain ssh program with the fleet's key and pinned host keys, as root."""

    fleet: Fleet

    def __call__(self, host: str, command: str, *, check: bool = True) -> str:
        """The command's standard output. With `check`, it must exit 0."""
        done = subprocess.run(
            [*self.fleet.ssh_command(host), command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        said = f"{host}: {command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0 or not check, said
        return done.stdout

    def values(self, host: str, command: str) -> dict[str, str]:
        """Lines 'name=value' of the command's output."""
        lines = self(host, command).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def service(self, host: str, *properties: str) -> dict[str, str]:
        """`systemctl show` of the service."""
        return self.values(
            host, f"systemctl show edgellm.service --property={','.join(properties)}"
        )

    def main_pid(self, host: str) -> int:
        return int(self.service(host, "MainPID")["MainPID"])

    def running_release(self, host: str) -> str | None:
        """What the service's own process has in its environment."""
        pid = self.main_pid(host)
        text = self(host, f"tr '\\000' '\\n' </proc/{pid}/environ", check=False)
        found = [line for line in text.splitlines() if line.startswith("EDGELLM_RELEASE=")]
        return found[0].partition("=")[2] if found else None

    def current_release(self, host: str) -> str:
        target = self(host, "readlink /opt/edgellm/current").strip()
        assert target.startswith("releases/"), target
        return target.removeprefix("releases/")


# What is written on any host that somebody logs in to, adds an account on, and boots
NOT_OURS = (
    *("/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-"),  # useradd's backups
    "/var/lib/systemd",  # the random seed, when timers last ran
    "/var/lib/sudo",  # who has read sudo's lecture
)
LAST_CHANGE = re.compile(r"^([^:]*):[0-9]*:")
"""Of a line of /etc/shadow after its name: password, and the day it was last changed. An
account that is made anew has today's, and a test may run over midnight."""


def snapshot(ssh: Ssh, host: str) -> dict[str, str]:
    """Everything that a roll-out could leave behind, one line a thing: what -> how it is."""
    text = ssh(
        host,
        r"""set -e
        find /etc /opt /var/lib /usr/lib/systemd -printf 'path %p|%y %m %u:%g %l\n'
        find /etc /opt /var/lib /usr/lib/systemd -type f ! -path /etc/shadow -print0 \
            | xargs -0 sha256sum \
            | sed -E 's/^([0-9a-f]+) +(.*)/sha256 \2|\1/'
        for file in passwd group shadow gshadow subuid subgid; do
            sed "s/^/$file /; s/:/|/" /etc/$file
        done
        systemctl list-unit-files --no-legend --no-pager \
            | awk '{ print "unit-file " $1 "|" $2 " " $3 }'
        systemctl list-units --all --plain --no-legend --no-pager '*edgellm*' \
            | awk '{ print "unit " $1 "|" $2 " " $3 " " $4 }'
        find /run -maxdepth 4 -name '*edgellm*' -printf 'run %p|%y %m %u:%g\n' || true
        awk 'NR > 1 { print "swap " $1 "|" $2 " " $3 " " $5 }' /proc/swaps
        echo "sysctl vm.swappiness|$(cat /proc/sys/vm/swappiness)"
        """,
    )
    things = dict(line.split("|", 1) for line in text.splitlines() if "|" in line)
    return {
        what: LAST_CHANGE.sub(r"\1::", how) if what.startswith("shadow ") else how
        for what, how in things.items()
        if not any(
            path == name or path.startswith(f"{name}/")
            for path in [what.split(" ", 1)[1]]
            for name in NOT_OURS
        )
    }


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """'path /opt/edgellm: None -> d 755 …', sorted."""
    names = sorted(before.keys() | after.keys())
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name)
    ]


@contextmanager
def slow_link(fleet: Fleet, host: str, mbit_s: int) -> Iterator[None]:
    """What goes to the host goes at this rate: 100 MB pass in no time over a bridge."""
    name = f"to-{fleet.host(host).index}"
    tc = ["tc", "-n", f"edgellm.{fleet.name}.control", "qdisc"]
    shape = ["tbf", "rate", f"{mbit_s}mbit", "burst", "256kb", "latency", "200ms"]
    subprocess.run([*tc, "add", "dev", name, "root", *shape], check=True)
    try:
        yield
    finally:
        subprocess.run([*tc, "del", "dev", name, "root"], check=True)
