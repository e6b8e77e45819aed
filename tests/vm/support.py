"""What these tests act with: the product's command line on the arm64 machine, and plain ssh."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.arm64_machine import Arm64Machine
from tests.e2e.support import NOT_OURS, REPO, Run, latest_run
from tests.e2e.support import SETTINGS as REAL_MODEL_SETTINGS

from . import tiny_model

NAME = "edge-arm64"
PYINFRA = REPO / ".venv" / "bin" / "pyinfra"
RUN_DEADLINE_S = 1200.0  # a first roll-out takes 90 s when this machine has two cores to spare

# What is slow here is the emulation: deadlines and budget only tell a hang from patience.
PATIENCE = {
    "load_deadline_s": 600,
    "first_token_deadline_s": 300,
    "request_deadline_s": 600,
    "ttft_budget_ms": 600_000,
    "smoke_requests": 1,
    "smoke_max_tokens": 4,
    "n_ctx": 512,
    "max_tokens": 64,
}
# Requests are slow here; that the server gets ready and runs as planned is proven without them
WITHOUT_SMOKE_TEST = {"smoke_requests": 0}
REAL_MODEL = {name: REAL_MODEL_SETTINGS[name] for name in REAL_MODEL_SETTINGS if "model" in name}

IS_READY = r"""(exec 3<>/dev/tcp/127.0.0.1/8000 && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 &&
    head -n 1 <&3 | grep -q ' 200 ') 2>/dev/null"""
ASK = """
import json, sys, urllib.request as r
m = [{"role": "user", "content": sys.argv[1]}]
q = {"messages": m, "max_tokens": int(sys.argv[2]), "temperature": 0}
u = "http://127.0.0.1:8000/v1/chat/completions"
a = r.urlopen(r.Request(u, json.dumps(q).encode(), {"Content-Type": "application/json"}))
print(json.load(a)["choices"][0]["message"]["content"])
"""


def tiny_model_settings(folder: Path) -> dict[str, Any]:
    """Writes the model that counts; the four settings that pin it."""
    path = folder / f"{tiny_model.NAME}.gguf"
    tiny_model.write(path)
    content = path.read_bytes()
    return {
        "model_name": tiny_model.NAME,
        "model_source": f"file:{path}",
        "model_sha256": hashlib.sha256(content).hexdigest(),
        "model_size_bytes": len(content),
    }


@dataclass(frozen=True)
class Control:
    """`pyinfra -y INVENTORY deploys/….py` in the clone, as a person types it."""

    arm64: Arm64Machine
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, deploy: str = "qwen", **settings: Any) -> Run:
        reports = self.folder / "reports"
        reports.mkdir(exist_ok=True)
        latest_before = latest_run(reports)
        inventory = self._inventory({**PATIENCE, **self.settings, **settings})
        started = time.monotonic()
        done = subprocess.run(
            [PYINFRA, "-y", inventory, f"deploys/{deploy}.py"],
            cwd=REPO,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "LANG": "C.UTF-8",
                "COLUMNS": "2000",  # or the table's reasons wrap
                "EDGELLM_REPORTS_DIR": str(reports),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_DEADLINE_S,
            check=False,
        )
        report = None
        if latest_run(reports) != latest_before:
            report = json.loads((reports / "latest" / "fleet.json").read_text())
        return Run(done.returncode, done.stdout, report, time.monotonic() - started)

    def _inventory(self, settings: dict[str, Any]) -> Path:
        data = {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": self.arm64.ssh_port,
            "ssh_user": "root",
            "ssh_key": str(self.arm64.private_key),
            "ssh_known_hosts_file": str(self.arm64.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "ssh_connect_retries": 2,
            "site": "vm",
            **settings,  # here, and not with the group: group_data/arm64.py would beat them
        }
        path = self.folder / "one_board.py"
        path.write_text(
            "from edgellm import recorder as _recorder\n"
            f"arm64 = [({NAME!r}, {data!r})]\n"
            "_recorder.attach_before_connecting()\n"
        )
        return path


@dataclass(frozen=True)
class Board:
    """The machine as plain ssh sees it: nothing here goes through the product's own facts."""

    arm64: Arm64Machine

    def __call__(self, command: str) -> str:
        """The command's standard output; it must exit 0."""
        return self.arm64.ssh(command).stdout.strip()

    def read(self, path: str) -> str:
        return self(f"cat {shlex.quote(path)}")

    def wait_ready(self) -> None:
        """Until the service has loaded its model."""
        self.arm64.ssh(f"until {IS_READY}; do sleep 1; done", timeout_s=600)

    def ask(self, question: str, max_tokens: int = 40) -> str:
        return self(shlex.join(["python3", "-I", "-c", ASK, question, str(max_tokens)]))

    def current_release(self) -> str:
        return self("readlink /opt/edgellm/current").removeprefix("releases/")

    def main_pid(self) -> int:
        return int(self("systemctl show edgellm.service --property=MainPID --value"))

    def threads(self) -> list[tuple[str, str]]:
        """(CPUs, policy) of every thread of every process of the service: ('2-3', 'SCHED_BATCH')"""
        said = self(
            """for task in $(cat /sys/fs/cgroup/edgellm.slice/edgellm.service/cgroup.threads); do
                 sed -n 's/^Cpus_allowed_list:\\t//p' /proc/$task/status
                 chrt -p $task | sed -n 's/.*policy: //p'
               done"""
        ).splitlines()
        assert len(said) % 2 == 0, said
        return list(zip(said[::2], said[1::2], strict=True))

    def status(self) -> dict[str, str]:
        """/proc/<pid>/status of the server: {'VmLck': '94320 kB', …}"""
        lines = self.read(f"/proc/{self.main_pid()}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def limit(self, name: str) -> tuple[str, str]:
        """(soft, hard) of the server: limit('Max open files')"""
        for line in self.read(f"/proc/{self.main_pid()}/limits").splitlines():
            if line.startswith(name):
                soft, hard, *_ = line.removeprefix(name).split()
                return soft, hard
        raise AssertionError(f"no limit {name!r}")

    def memory_policies(self) -> set[str]:
        """Of every mapping of the server: {'default'}, {'bind:0-1'}"""
        path = f"/proc/{self.main_pid()}/numa_maps"
        return set(self(f"cut -d ' ' -f 2 {path} | sort -u").split())

    def things(self) -> dict[str, str]:
        """What a roll-out could leave behind: path or account -> how it is. Hashes nothing: slow.

        Sizes of files only: of folders they grow with use.
        """
        text = self(
            """find /etc /opt /var/lib /root -type f -printf '%p|%m %u:%g %s\n'
            find /etc /opt /var/lib /root -not -type f -printf '%p|%y %m %u:%g %l\n'
            sed 's/:/|/' /etc/passwd /etc/group /etc/shadow"""
        )
        things = dict(line.split("|", 1) for line in text.splitlines())
        return {name: how for name, how in things.items() if not name.startswith(NOT_OURS)}

    def swaps(self) -> list[dict[str, str]]:
        """Rows of /proc/swaps."""
        head, *rows = self.read("/proc/swaps").splitlines()
        return [dict(zip(head.split(), row.split(), strict=True)) for row in rows]
