# argv[1]: JSON {"models": {path: sha256}, "runtimes": {directory: id}}. Tells which of them are
# whole without reading them: by the manifest that was written when the digest had been checked, or
# the runtime had run. What was touched, or opened to others, since then is not whole.
import hashlib
import json
import os
import stat
import sys
from typing import Any


def model_is_whole(path: str, sha256: str) -> bool:
    try:
        with open(path + ".manifest.json") as file:
            manifest = json.load(file)
        found = os.stat(path)
    except (OSError, ValueError):
        return False
    whole: bool = manifest == {
        "sha256": sha256,
        "size_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "mode": stat.S_IMODE(found.st_mode),
        "uid": found.st_uid,
        "gid": found.st_gid,
    }
    return whole


def fingerprint(directory: str) -> str:
    """Of names, sizes, times, modes and owners; unpack_runtime has the same."""
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


def runtime_is_whole(directory: str, runtime_id: str) -> bool:
    try:
        with open(os.path.join(directory, ".complete")) as file:
            return file.read().split() == [runtime_id, fingerprint(directory)]
    except OSError:
        return False


wanted = json.loads(sys.argv[1])
states = {path: model_is_whole(path, sha256) for path, sha256 in wanted["models"].items()}
states.update({path: runtime_is_whole(path, rid) for path, rid in wanted["runtimes"].items()})
print(json.dumps(states))
