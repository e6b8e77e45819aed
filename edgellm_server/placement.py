"""Several workers, each on its own CPUs: uvicorn starts them all alike and tells none its number.

Memory follows: the kernel gives a page from the node of the CPU that first touches it, so a worker
that is placed before it loads the model has its weights beside its threads.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Held open for as long as the process lives: the kernel frees a dead worker's place, and the
# worker that uvicorn starts in its stead finds it free.
_held: list[int] = []


class PlacementError(Exception):
    """There are more workers than places, or the CPUs of a place cannot be used here."""


def take_a_place(places: Sequence[tuple[int, ...]], directory: Path | None = None) -> int:
    """Takes the first free place and moves this process to its CPUs. Returns its index.

    Call before the model is loaded: threads inherit the CPUs of the one that starts them.
    `directory` is the service's runtime directory, where the locks lie. Raises PlacementError.
    """
    folder = directory or _runtime_directory()
    for index, cpus in enumerate(places):
        descriptor = os.open(folder / f"worker-{index}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        _held.append(descriptor)
        try:
            # Every thread, not 0 (the calling one): importing the engine has started some already
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cpus)
        except OSError as error:
            raise PlacementError(
                f"worker {index}: want CPUs {sorted(cpus)}, have {error.strerror}"
            ) from None
        return index
    raise PlacementError(f"want a free place among {len(places)}, have none: too many workers")


def _runtime_directory() -> Path:
    """systemd's RuntimeDirectory=; without one, the temporary directory."""
    return Path(os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0] or tempfile.gettempdir())
