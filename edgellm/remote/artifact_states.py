# argv[1]: JSON {"models": {path: sha256}, "runtimes": {directory: id}}. Tells which of them are
# whole without reading them: by the manifest that was written when the digest had been checked.
import json
import os
import sys


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
    }
    return whole


def runtime_is_whole(directory: str, runtime_id: str) -> bool:
    try:
        with open(os.path.join(directory, ".complete")) as file:
            return file.read().strip() == runtime_id
    except OSError:
        return False


wanted = json.loads(sys.argv[1])
states = {path: model_is_whole(path, sha256) for path, sha256 in wanted["models"].items()}
states.update({path: runtime_is_whole(path, rid) for path, rid in wanted["runtimes"].items()})
print(json.dumps(states))
