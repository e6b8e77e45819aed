"""Fleets of pyinfra's @fake hosts, rolled out to by the real command line as a process of its own.

A fake host answers each command by the first text in it that it knows; nothing is changed anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgellm import cache, layout, render, runtime_build
from edgellm.hardware import Arch
from edgellm.parse import parse_profile
from edgellm.release import Release
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning

REPOSITORY = Path(__file__).parents[2]
HARDWARE = REPOSITORY / "tests" / "hardware"
BOARDS = {"arm64": "raspberry-pi-5", "x86_64": "i5-8250u"}
WITHIN_S = 60

Responses = dict[str, Any]


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

    def add(
        self,
        name: str,
        group: str = "arm64",
        *,
        board: str | None = None,
        data: dict[str, Any] | None = None,
        responses: Responses | None = None,
    ) -> None:
        """A healthy host of `board`, but for the answers in `responses`, which come first."""
        settings = {"ttft_budget_ms": 1500, **self.depot.model_data, **(data or {})}
        probe = (HARDWARE / (board or BOARDS[group]) / "probe.txt").read_text()
        answers = {**(responses or {}), **self._healthy(Arch(group), probe, settings)}
        answers.update(responses or {})  # the order of the first, the answers of the second
        self.hosts.setdefault(group, []).append(
            (
                f"@fake/{name}",
                {**settings, "fake_responses": answers, "fake_delay": 0, "fake_delay_jitter": 0},
            )
        )

    def _healthy(self, arch: Arch, probe: str, settings: dict[str, Any]) -> Responses:
        runtime_id = self.depot.runtime_ids[arch]
        known = {k: v for k, v in settings.items() if k in Settings.names()}
        known = {**known, "scheduling": "batch"}
        plan_settings = Settings.from_host_data(known, host="fake")
        profile = parse_profile(probe, control_time_s=None)
        plan = plan_tuning(profile, plan_settings)
        release = Release.of(
            model_sha256=self.depot.model_sha256 if plan_settings.holds_model else None,
            runtime_id=runtime_id,
            files=render.release_files(plan, plan_settings, ()),
        )
        directory = layout.release_directory(release.id)
        paths = [
            *layout.EVERYTHING,
            *(layout.MODELS, layout.RUNTIMES, layout.RELEASES, directory),
            layout.API_KEYS,
            layout.PROBE_KEY,
            f"{layout.BEFORE}/vm.swappiness",
            *(f"{directory}/{file.name}" for file in release.files),
            f"{directory}/model.gguf",
            f"{directory}/runtime",
        ]
        whole = {
            layout.model_path(self.depot.model_sha256): True,
            **{layout.runtime_directory(i): True for i in self.depot.runtime_ids.values()},
        }
        installed = {
            "releases": {},
            "models": [],
            "runtimes": [],
            "current": None,
            "previous": None,
            "leftovers": [],
        }
        return {
            "section format": probe,
            "def unit_state": "{}",
            '"drop_ins"': '{"differing": [], "surplus": []}',
            "def runtime_is_whole": json.dumps(whole),
            "def state_of": json.dumps({path: {"kind": "absent"} for path in paths}),
            "def release_of": json.dumps(installed),
            "SliceReload": ["ActiveState=inactive", "UnitFileState=", "Release=", "Current="],
            "is-enabled": ["Enabled=", "Size=", "Priority="],
            "edgellm_server/probe.py": smoke_line(),
            "command -v": "/usr/sbin/useradd",
            "uname -s": "Linux",
        }

    def run(self, deploy: str, *arguments: str) -> Ended:
        inventory = self.directory / "fleet.py"
        lines = [f"{group} = {hosts!r}" for group, hosts in self.hosts.items()]
        lines += ["from edgellm import recorder as _recorder"]
        lines += ["_recorder.attach_before_connecting()"]
        inventory.write_text("\n".join(lines) + "\n")
        reports = self.directory / "reports"
        command = [sys.executable, "-m", "pyinfra"]
        done = subprocess.run(
            [*command, str(inventory), f"deploys/{deploy}.py", "-y", *arguments],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "EDGELLM_CACHE_DIR": str(self.depot.directory),
                "EDGELLM_REPORTS_DIR": str(reports),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WITHIN_S,
        )
        return Ended(returncode=done.returncode, output=done.stdout, reports=reports)


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
