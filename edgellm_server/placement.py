"""Several workers, each on its own CPUs: uvicorn starts them all alike and tells none its number.

Memory follows: the kernel gives a page from the node of the CPU that first touches it, so a worker
that is placed before it loads the model has its weights beside its threads.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

READY = b"ready"


class PlacementError(Exception):
    """There are more workers than places, or the CPUs of a place cannot be used here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's place, held for as long as its process lives.

    The kernel frees a dead worker's lock, and the worker that uvicorn starts in its stead finds it.
    """

    index: int
    count: int
    folder: Path
    descriptor: int

    def say_ready(self) -> None:
        """For the others: this worker has generated a token."""
        os.pwrite(self.descriptor, READY, 0)

    def all_ready(self) -> bool:
        """Whether every worker has. A request may reach any of them: they share the port."""
        try:
            return all(
                _lock_path(self.folder, index).read_bytes() == READY for index in range(self.count)
            )
        except FileNotFoundError:
            return False


def take_a_place(places: Sequence[tuple[int, ...]], directory: Path | None = None) -> Place:
    """Takes the first free place and moves this process to its CPUs.

    Call before the model is loaded: threads inherit the CPUs of the one that starts them.
    `directory` is the service's runtime directory, where the locks lie. Raises PlacementError.
    """
    folder = directory or _runtime_directory()
    for index, cpus in enumerate(places):
        descriptor = os.open(_lock_path(folder, index), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        os.ftruncate(descriptor, 0)  # the worker that died here may have been ready
        try:
            # Every thread, not 0 (the calling one): importing the engine has started some already
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except OSError as error:
            raise PlacementError(
                f"worker {index}: want CPUs {sorted(cpus)}, have {error.strerror}"
            ) from None
        return Place(index=index, count=len(places), folder=folder, descriptor=descriptor)
    raise PlacementError(f"want a free place among {len(places)}, have none: too many workers")


def _lock_path(folder: Path, index: int) -> Path:
    return folder / f"worker-{index}.lock"


def _runtime_directory() -> Path:
    """systemd's RuntimeDirectory=; without one, the temporary directory."""
    return Path(os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or tempfile.gettempdir())
