"""Fleets of pyinfra's @fake hosts, rolled out to by the real command line as a process of its own.

A fake host answers each command by the first text in it that it knows; nothing is changed anywhere,
but from the start of its service on it answers as one that the release runs on. One that was rolled
out to before answers so from the beginning, but for what has happened to it `since`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import cache, layout, render, runtime_build
from edgellm.desired import DesiredState, desired_state
from edgellm.hardware import Arch, HostProfile, plain
from edgellm.observed import PathState, ServiceState
from edgellm.operations import kernel
from edgellm.parse import parse_profile
from edgellm.release import Release
from edgellm.reports import schema
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning
from tests.fleet.answers import Answers, Responses
from tests.rolled_out import Case, RolledOut, afterwards, effective_in_order, in_order

REPOSITORY = Path(__file__).parents[2]
HARDWARE = REPOSITORY / "tests" / "hardware"
BOARDS = {"arm64": "raspberry-pi-5", "x86_64": "i5-8250u"}
WITHIN_S = 60

Since = Callable[[RolledOut], RolledOut]
WHOLE = "def runtime_is_whole"
ABSENT = PathState(kind="absent")
LIBGOMP = "\tlibgomp.so.1 (libc6,AArch64) => /lib/aarch64-linux-gnu/libgomp.so.1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Depot:
    """A cache directory of a control machine that has a model and both runtimes already."""

    directory: Path
    model_path: Path
    model_sha256: str
    runtime_ids: dict[Arch, str]

    @property
    def model_data(self) -> dict[str, Any]:
        return {
            "model_name": "tiny",
            "model_source": f"file:{self.model_path}",
            "model_sha256": self.model_sha256,
            "model_size_bytes": self.model_path.stat().st_size,
        }


@pytest.fixture(scope="session")
def depot(tmp_path_factory: pytest.TempPathFactory) -> Depot:
    directory = tmp_path_factory.mktemp("cache")
    model_path = directory / "tiny.gguf"
    model_path.write_bytes(_gguf())
    ids = {}
    runtimes = directory / "runtimes"
    (runtimes / "index").mkdir(parents=True)
    for arch in Arch:
        # What build_runtime leaves, without pip: here no host ever unpacks it
        runtime_id = hashlib.sha256(arch.value.encode()).hexdigest()[:16]
        part = runtimes / "part"
        part.write_bytes(f"no archive, {arch.value}".encode())
        cache.place(part, runtimes / f"{runtime_id}.tar.gz", cache.sha256_of(part))
        key = runtime_build._inputs_key(
            arch, runtime_build.REQUIREMENTS, runtime_build.SERVER_SOURCES
        )
        noted = {"id": runtime_id, "unpacked_size_bytes": 110_000_000}
        (runtimes / "index" / f"{key}.json").write_text(json.dumps(noted))
        ids[arch] = runtime_id
    return Depot(
        directory=directory,
        model_path=model_path,
        model_sha256=cache.sha256_of(model_path),
        runtime_ids=ids,
    )


def _gguf() -> bytes:
    """The header of a model that is none: enough for every check of the control machine."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    pairs = {
        "general.architecture": "qwen2",
        "general.type": "model",
        "tokenizer.chat_template": "{{ messages }}",
    }
    body = b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in pairs.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 291, len(pairs)) + body + bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended, and what it left."""

    returncode: int
    output: str
    reports: Path

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.reports / "latest" / "fleet.json").read_text())
        schema.check(found)  # no run of any test writes what docs/fleet.schema.json does not have
        return found

    def host(self, name: str) -> dict[str, Any]:
        (found,) = [host for host in self.report["hosts"] if host["name"] == f"@fake/{name}"]
        return dict(found)

    @property
    def statuses(self) -> dict[str, str]:
        return {
            host["name"].removeprefix("@fake/"): host["status"] for host in self.report["hosts"]
        }


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A generated inventory. `add` hosts, then `run` a deploy."""

    depot: Depot
    directory: Path
    hosts: dict[str, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)
    more_lines: tuple[str, ...] = ()  # of the inventory file

    def add(
        self,
        name: str,
        group: str = "arm64",
        *,
        board: str | None = None,
        data: dict[str, Any] | None = None,
        responses: Responses | None = None,
        since: Since | None = None,
        stays: bool = False,
    ) -> None:
        """A host of `board` that becomes healthy, but for the answers in `responses`, which come
        first. `since`: what has happened to it after it was rolled out to; None: it never was.
        `stays`: whatever is done to it, it remains as it is found.
        """
        settings = {"ttft_budget_ms": 1500, **self.depot.model_data, **(data or {})}
        board = board or BOARDS[group]
        probe = (HARDWARE / board / "probe.txt").read_text()
        given = responses or {}
        profile = parse_profile(probe, control_time_s=None)
        desired = self._desired(Arch(group), profile, settings)
        done = afterwards(profile, desired.plan)
        host = RolledOut(case=Case(board=board), desired=desired, observed=in_order(desired, done))
        # The order of the first, the answers of the second
        before = {**given, **self._before(probe, desired, profile), **given}
        after = {**given, **self._after(_probe_of(probe, host), host), **given}
        if since is not None:
            found = since(host)
            text = _probe_of(probe, found)
            assert parse_profile(text, control_time_s=None) == found.observed.profile
            before = {**given, **self._after(text, found), **given}
            after = before if stays else after
        elif WHOLE in given:
            after[WHOLE] = self._whole()
        self.hosts.setdefault(group, []).append(
            (
                f"@fake/{name}",
                {
                    **settings,
                    "fake_responses": Answers(before, after),
                    "fake_delay": 0,
                    "fake_delay_jitter": 0,
                },
            )
        )

    def add_unreachable(self, name: str, group: str = "arm64") -> None:
        """A host whose ssh port nobody listens on."""
        nowhere = {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "ssh_connect_retries": 0}
        self.hosts.setdefault(group, []).append((name, {**self.depot.model_data, **nowhere}))

    def _desired(self, arch: Arch, profile: HostProfile, data: dict[str, Any]) -> DesiredState:
        known = {k: v for k, v in data.items() if k in Settings.names()}
        settings = Settings.from_host_data({**known, "scheduling": "batch"}, host="fake")
        plan = plan_tuning(profile, settings)
        release = Release.of(
            model_sha256=self.depot.model_sha256 if settings.holds_model else None,
            runtime_id=self.depot.runtime_ids[arch],
            files=render.release_files(plan, settings, ()),
        )
        return desired_state(settings=settings, plan=plan, release=release, text=render.text)

    def _whole(self) -> str:
        places = map(layout.runtime_directory, self.depot.runtime_ids.values())
        model = layout.model_path(self.depot.model_sha256)
        return json.dumps(dict.fromkeys((model, *places), True))

    def _before(self, probe: str, desired: DesiredState, profile: HostProfile) -> Responses:
        """Of a host that nothing of ours is on, but for the model and the runtime."""
        installed: dict[str, Any] = {
            "releases": {},
            "models": [],
            "runtimes": [],
            "current": None,
            "previous": None,
            "leftovers": [],
        }
        idle = replace(
            effective_in_order(desired, profile),
            account=None,
            service_state="inactive",
            main_pid=None,
            processes=(),
            slices=(),
            node_pages=(),
        )
        return {
            "section format": probe,
            "def swappiness_lines": json.dumps(plain(idle)),
            "def unit_state": "{}",
            '"drop_ins"': '{"differing": [], "surplus": []}',
            WHOLE: self._whole(),
            "def state_of": _paths(desired, {}),
            "def release_of": json.dumps(installed),
            "SliceReload": ["ActiveState=inactive", "UnitFileState=", "Release=", "Current="],
            "is-enabled": ["Enabled=", "Size=", "Priority="],
            "edgellm_server/probe.py": smoke_line(),
            "getent passwd": ["Passwd=", "Group="],
            "cat /proc/sys/vm/swappiness": "60",
            "echo Slice=": ["Slice=system.slice", "Slice=user.slice"],
            "command -v": "/usr/sbin/useradd",
            "uname -s": "Linux",
        }

    def _after(self, probe: str, host: RolledOut) -> Responses:
        """Of a host that was rolled out to, as it is found."""
        observed, desired = host.observed, host.desired
        account = host.effective.account
        passwd = (
            ""
            if account is None
            else f"edgellm:x:{account.uid}:{account.uid}:{account.comment}:{account.home}"
            f":{account.shell}"
        )
        return {
            **self._before(probe, desired, observed.profile),
            "def swappiness_lines": json.dumps(plain(host.effective)),
            WHOLE: json.dumps({**json.loads(self._whole()), **observed.whole}),
            "def state_of": _paths(desired, observed.paths),
            "SliceReload": _service_lines(host.service),
            "getent passwd": [f"Passwd={passwd}", f"Group={account.group if account else ''}"],
            "cat /proc/sys/vm/swappiness": str(host.effective.swappiness),
        }

    @property
    def reports(self) -> Path:
        return self.directory / "reports"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "EDGELLM_CACHE_DIR": str(self.depot.directory),
            "EDGELLM_REPORTS_DIR": str(self.reports),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "160",
        }

    def command(self, deploy: str, *arguments: str) -> list[str]:
        """Writes the inventory, and names it in the command."""
        inventory = self.directory / "fleet.py"
        lines = [f"{group} = {hosts!r}" for group, hosts in self.hosts.items()]
        lines.insert(0, "from tests.fleet.answers import Answers")
        lines += ["from edgellm import recorder as _recorder"]
        lines += ["_recorder.attach_before_connecting()", *self.more_lines]
        inventory.write_text("\n".join(lines) + "\n")
        pyinfra = [sys.executable, "-m", "pyinfra"]
        return [*pyinfra, str(inventory), f"deploys/{deploy}.py", "-y", *arguments]

    def run(self, deploy: str, *arguments: str, interrupt_at: str | None = None) -> Ended:
        """`interrupt_at`: Ctrl-C as soon as this text is in the output."""
        process = subprocess.Popen(
            self.command(deploy, *arguments),
            cwd=REPOSITORY,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = threading.Timer(WITHIN_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        output = ""
        for line in process.stdout:
            output += line
            if interrupt_at is not None and interrupt_at in line:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        code = process.wait()
        deadline.cancel()
        return Ended(returncode=code, output=output, reports=self.reports)


def _probe_of(probe: str, host: RolledOut) -> str:
    """The probe's text of a board once it was rolled out to, where that makes no zram of ours."""
    recorded = host.observed.profile.recorded
    assert recorded is not None
    text = probe.replace("@@ libraries\n", f"@@ libraries\n{LIBGOMP}")
    text = text.replace("@@ service_user\n", "@@ service_user\n997\n")
    return text.replace("@@ recorded\n", f"@@ recorded\n{recorded.to_json_text()}")


def _service_lines(state: ServiceState) -> list[str]:
    """What systemctl and the links say of this state."""

    def said(value: bool, words: str) -> str:
        return words.split("/")[0 if value else 1]

    def link(release: str | None) -> str:
        return "" if release is None else layout.release_directory(release)

    values = {
        "ActiveState": said(state.active, "active/inactive"),
        "UnitFileState": said(state.enabled, "enabled/disabled"),
        "NeedDaemonReload": said(state.needs_daemon_reload, "yes/no"),
        "MainPID": 0 if state.running_release is None else 812,
        "SliceReload": "no",
        "SocketLoadState": "loaded",
        "SocketActiveState": said(state.socket_active, "active/inactive"),
        "SocketUnitFileState": said(state.socket_enabled, "enabled/disabled"),
        "SocketNeedDaemonReload": said(state.socket_stale, "yes/no"),
        "Release": state.running_release or "",
        "SocketsPassed": 1,
        "SocketOfRelease": "same",
        "Replaced": int(state.runs_replaced_files),
        "Current": link(state.current_release),
        "Previous": link(state.previous_release),
    }
    return [f"{name}={value}" for name, value in values.items()]


def _paths(desired: DesiredState, found: Mapping[str, PathState]) -> str:
    """The answer about every path that a roll-out or an uninstallation looks at."""
    records = (kernel.SWAPPINESS_BEFORE, kernel.GOVERNORS_BEFORE)
    asked = (*desired.paths, layout.STATE_DIR, *layout.EVERYTHING, *records)
    return json.dumps({path: plain(found.get(path, ABSENT)) for path in asked})


def smoke_line(**changed: Any) -> str:
    """The probe's line of a healthy host."""
    healthy = {
        "schema": 1,
        "ready": True,
        "n": 5,
        "median_ttft_ms": 112.4,
        "p95_ttft_ms": 139.6,
        "output_throughput": 27.6,
        "failures": [],
    }
    return json.dumps({**healthy, **changed})


@pytest.fixture(scope="module")
def new_fleet(depot: Depot, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Fleet]:
    return lambda: Fleet(depot=depot, directory=tmp_path_factory.mktemp("fleet"))
