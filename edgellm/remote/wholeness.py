# What tells that a model or a runtime is still what it was when it had been verified, without
# reading it. Not a script of its own: remote.script() puts it where a script imports it.
import hashlib
import json
import os
import stat
from typing import Any


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


def model_is_whole(path: str, sha256: str) -> bool:
    """It is as it was when its manifest was written: its digest had been checked then."""
    try:
        with open(path + ".manifest.json") as file:
            whole: bool = json.load(file) == manifest_of(path, sha256)
    except (OSError, ValueError):
        return False
    return whole


def fingerprint(directory: str) -> str:
    """Of a runtime: names, sizes, times, modes and owners of all in it."""
    lines: list[list[Any]] = []
    for folder, _, names in os.walk(directory):
        if os.path.basename(folder) == "__pycache__":
            continue
        for name in ["", *names]:
            found = os.lstat(os.path.join(folder, name))
            line: list[Any] = [os.path.relpath(folder, directory), name]
            line += [found.st_mode, found.st_uid, found.st_gid]
            if name:
                line += [found.st_size, found.st_mtime_ns]
            if name != ".complete":
                lines.append(line)
    return hashlib.sha256(json.dumps(sorted(lines)).encode()).hexdigest()
