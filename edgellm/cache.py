"""The control machine's cache of large files: locks, stamps, durable renames.

The stamp saves hashing 500 MB at each run; the rename makes a killed run leave no half file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.2
STALE_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A file's SHA-256 and the stat it was taken at: trusted while the stat stays the same."""

    sha256: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> Stamp:
        stat = path.stat()
        return cls(
            sha256=sha256,
            size_bytes=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            inode=stat.st_ino,
        )

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """The stamp kept beside `path`; None where there is none, or it does not read."""
        try:
            return cls(**json.loads(stamp_path(path).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        write_text(stamp_path(path), json.dumps(asdict(self), sort_keys=True) + "\n")


def stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".stamp.json")


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def stamped_sha256(path: Path) -> str | None:
    """The file's SHA-256: by its stamp where that still fits, else hashed anew. None: no file."""
    try:
        stamp = Stamp.read(path)
        if stamp is not None and stamp == Stamp.of(path, stamp.sha256):
            return stamp.sha256
        sha256 = sha256_of(path)
        Stamp.of(path, sha256).write(path)
    except FileNotFoundError:
        return None
    return sha256


def place(temporary: Path, final: Path, sha256: str) -> None:
    """Durably: contents, then name, then stamp. Both paths are in one file system."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    temporary.unlink(missing_ok=True)  # rename(2) keeps both names of one inode
    _sync_directory(final.parent)
    Stamp.of(final, sha256).write(final)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, also where two runs write at once."""
    temporary = temporary_beside(path)
    temporary.write_text(text)
    temporary.replace(path)


def temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def sweep(directory: Path) -> None:
    """Removes what killed runs left: temporary files that nothing has written to for a day."""
    for path in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One holder at a time, over processes and greenlets; the kernel frees a dead holder's lock.

    Polls: pyinfra runs greenlets in one thread, where a blocking flock would block its own holder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                time.sleep(LOCK_POLL_S)
            else:
                break
        yield


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
