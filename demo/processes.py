"""Process ids that are safe to signal, daemons, and a lock on a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from demo.errors import DemoError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_boot_id() -> str:
    """'5f2c…-…': changes with every boot of this machine."""
    return BOOT_ID.read_text().strip()


@dataclasses.dataclass(frozen=True)
class ProcessRecord:
    """A pid with what tells it from a later process of the same number.

    `start_ticks` is field 22 of /proc/<pid>/stat (proc(5)): clock ticks since the machine booted.
    """

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int, proc: Path = Path("/proc")) -> ProcessRecord:
        """The record of a live process. Raises OSError when there is none."""
        return cls(pid, _stat(pid, proc)[1], machine_boot_id())

    @classmethod
    def read(cls, path: Path) -> ProcessRecord | None:
        """None when the file is missing or was not written whole."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Atomic: a reader sees the old record or the new one."""
        replace_text(path, json.dumps(dataclasses.asdict(self)))

    def is_alive(self) -> bool:
        """False for a process that is gone, is a zombie, or has another one's number now."""
        if self.boot_id != machine_boot_id():
            return False
        try:
            state, start_ticks = _stat(self.pid, Path("/proc"))
        except OSError:
            return False
        return state not in "ZX" and start_ticks == self.start_ticks

    def kill(self, wait_s: float = 5.0) -> None:
        """SIGKILL, and wait until it is gone. Nothing happens when it is gone already."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor pins the process; only now does comparing the start time mean much.
            if self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        deadline = time.monotonic() + wait_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)


def _stat(pid: int, proc: Path) -> tuple[str, int]:
    # The command's name, field 2, is in parentheses and may hold anything: split behind it.
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes beside `path` and renames: never half a file under that name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.chmod(mode)
    temporary.rename(path)


def daemonise(record_path: Path) -> None:
    """Carries on as a process of its own session, recorded in `record_path`; the caller's exits 0.

    So whoever started this program has, once it ended, a record of the daemon that it left. The
    daemon writes it by itself: nothing is lost if the caller is killed half-way.
    """
    is_recorded, record_it = os.pipe()
    if os.fork():
        os.close(record_it)
        os.read(is_recorded, 1)  # returns when the daemon closes its end
        os._exit(0)
    os.setsid()
    os.chdir("/")
    ProcessRecord.of(os.getpid()).write(record_path)
    os.close(is_recorded)
    os.close(record_it)


def run_tool(*command: str | Path, stdin: str = "") -> str:
    """Runs a program and returns what it printed. Raises DemoError with its complaint."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(
            "demo fleet",
            want=f"'{' '.join(words)}' to work",
            have=f"exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}",
            fix="run 'down', then 'up'; it needs a kernel with namespaces, veth and overlay",
        )
    return done.stdout


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Holds flock(2) on the directory `path`, made if need be; blocks while another has it.

    Whoever removes the directory does so with the lock held, hence the second look.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            is_same = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            is_same = False
        if is_same:
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)
