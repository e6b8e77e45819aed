"""Busy neighbours on this machine, and the CPU weights that the plan sets against them.

On a host systemd makes edgellm.slice a top-level cgroup with CPUWeight=1000 beside system.slice and
user.slice, which have 100. Here the same is made by hand, by cgroup v1 (cpu.shares) or v2
(cpu.weight).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.process_tree import tree
from bench.servers import end

PREFIX = "edgellm-bench"
DEFAULT_WEIGHT = 100
# A CPUWeight= of 100 is cgroup v1's 1024 shares, systemd.resource-control(5).
SHARES_A_WEIGHT = 1024 / 100


class GroupError(Exception):
    """This machine lets us make no CPU cgroups; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`home` is where all that we start lives before it is moved."""

    home: Path
    server: Path
    neighbours: Path
    clients: Path

    def move(self, pid: int, group: Path) -> None:
        """A process, its descendants and all their threads."""
        for member in tree(pid):
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(member))


@contextlib.contextmanager
def cpu_groups(server_weight: int) -> Iterator[Groups]:
    """Top-level groups: the server's weighs `server_weight`, the neighbours' 100.

    This process, which plays the clients, moves into a third one: clients are other machines and
    must not wait for this one's CPU. All of it is undone. Raises GroupError.
    """
    mount, version = _cpu_mount()
    home = mount / _own_group(version).lstrip("/")
    made: list[Path] = []

    def make(name: str, weight: int) -> Path:
        group = mount / f"{PREFIX}-{os.getpid()}-{name}"
        group.mkdir()
        made.append(group)
        if version == 1:
            (group / "cpu.shares").write_text(str(round(weight * SHARES_A_WEIGHT)))
        else:
            (group / "cpu.weight").write_text(str(weight))
        return group

    try:
        try:
            _sweep(mount)
            if version == 2:
                (mount / "cgroup.subtree_control").write_text("+cpu")
            groups = Groups(
                home=home,
                server=make("server", server_weight),
                neighbours=make("neighbours", DEFAULT_WEIGHT),
                clients=make("clients", server_weight),
            )
            # Alone: the servers are children of this process, and stay where they are.
            (groups.clients / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise GroupError(f"CPU cgroups: {error.strerror} (they need root)") from error
        yield groups
    finally:
        for group in made:
            _remove(group, home)


@contextlib.contextmanager
def busy_neighbours(count: int, group: Path) -> Iterator[None]:
    """`count` processes that compute for ever, each in a session of its own."""
    with contextlib.ExitStack() as started:
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", "while True: pass"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            started.callback(end, process)
            (group / "cgroup.procs").write_text(str(process.pid))
        time.sleep(0.5)  # until they run, and the scheduler has spread them over the cores
        yield


def _cpu_mount() -> tuple[Path, int]:
    """(where the cpu controller's hierarchy is mounted, its version). Raises GroupError."""
    unified = None
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(mount), 1
        if kind == "cgroup2":
            unified = Path(mount)
    if unified is not None and "cpu" in (unified / "cgroup.controllers").read_text().split():
        return unified, 2
    raise GroupError("no cgroup hierarchy here has the cpu controller")


def _own_group(version: int) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" if version == 2 else "cpu" in controllers.split(","):
            return path
    return "/"


def _sweep(mount: Path) -> None:
    """What a killed run left: groups of processes that are gone. Only empty ones can be removed."""
    for group in mount.glob(f"{PREFIX}-*"):
        owner = group.name.split("-")[2]
        if not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _remove(group: Path, home: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (home / "cgroup.procs").write_text(pid)
    for _ in range(50):  # a group is busy until its last process is reaped
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)
        else:
            return
