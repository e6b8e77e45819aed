# What tells that a model or a runtime is still what it was when it had been verified: the stat that
# its manifest vouches for, and its bytes, which rot on worn cards under an unchanged stat. Not a
# script of its own: remote.script() puts it where a script imports it.
import contextlib
import hashlib
import json
import os
import stat
import sys
from typing import Any


def step_back() -> None:
    """Runs only when nobody else wants the CPU: a server may be answering on this host."""
    with contextlib.suppress(OSError):  # a container's seccomp filter
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def python_version() -> str:
    """'3.11': packages that ran under one minor version need not under the next."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def add_bytes(digest: Any, path: str) -> None:
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)


def digest_of(path: str) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    add_bytes(digest, path)
    return digest.hexdigest()


def manifest_of(path: str, sha256: str) -> dict[str, Any]:
    """Of a model: its digest, and the stat that vouches for it."""
    found = os.stat(path)
    return {
        "sha256": sha256,
        "size_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
    }


def is_untouched(path: str, sha256: str) -> bool:
    """Of a model: nobody has written, replaced or opened it up since its digest was checked."""
    try:
        with open(path + ".manifest.json") as file:
            untouched: bool = json.load(file) == manifest_of(path, sha256)
    except (OSError, ValueError):
        return False
    return untouched


def model_is_whole(path: str, sha256: str) -> bool:
    """It is as it was when its manifest was written, to the last byte."""
    try:
        return is_untouched(path, sha256) and digest_of(path) == sha256
    except OSError:  # a card's unreadable block
        return False


def names_in(directory: str) -> list[tuple[str, str]]:
    """(folder, name) of all in a runtime; the name is '' for the folder itself."""
    found = []
    for folder, _, names in os.walk(directory):
        if os.path.basename(folder) != "__pycache__":
            found += [(folder, name) for name in ["", *names] if name != ".complete"]
    return sorted(found)


def fingerprint(directory: str) -> str:
    """Of a runtime: names, sizes, times, modes and owners of all in it."""
    lines: list[list[Any]] = []
    for folder, name in names_in(directory):
        found = os.lstat(os.path.join(folder, name))
        line: list[Any] = [os.path.relpath(folder, directory), name]
        line += [found.st_mode, found.st_uid, found.st_gid]
        if name:
            line += [found.st_size, found.st_mtime_ns]
        lines.append(line)
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def content_digest(directory: str) -> str:
    """Of a runtime: the bytes of all its files; `fingerprint` tells where each ends."""
    digest = hashlib.sha256()
    for folder, name in names_in(directory):
        path = os.path.join(folder, name)
        if name and os.path.isfile(path):
            add_bytes(digest, path)
    return digest.hexdigest()


def has_right_bytes(directory: str, runtime_id: str) -> bool:
    """The runtime is as it was when it had run, by whatever Python that was."""
    try:
        with open(os.path.join(directory, ".complete")) as file:
            said = file.read().split()
        if len(said) != 4 or said[:2] != [runtime_id, fingerprint(directory)]:
            return False
        return said[2] == content_digest(directory)
    except OSError:
        return False


def runtime_is_whole(directory: str, runtime_id: str) -> bool:
    """It has the right bytes, and has run under the Python that this host has now."""
    try:
        with open(os.path.join(directory, ".complete")) as file:
            ran_under = file.read().split()[-1:]
    except OSError:
        return False
    return ran_under == [python_version()] and has_right_bytes(directory, runtime_id)


def completion(directory: str, runtime_id: str) -> str:
    """The text of .complete of a runtime that has just run."""
    said = [runtime_id, fingerprint(directory), content_digest(directory), python_version()]
    return " ".join(said) + "\n"
