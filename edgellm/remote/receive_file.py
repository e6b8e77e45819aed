# argv[1]: JSON {path, sha256, size_bytes, action}. One file travels in one or more connections:
#   action "offset": prints how many bytes are here already
#   action "append": appends standard input
#   action "finish": checks size and digest, syncs, renames into place, writes the manifest
# The part file lies beside its place: same file system, so that the rename is atomic.
import fcntl
import json
import os
import select
import shutil
import sys
from typing import Any, NoReturn

from edgellm.remote.wholeness import digest_of, is_untouched, manifest_of, model_is_whole

STALL_S = 45
job = json.loads(sys.argv[1])
path, size_bytes = job["path"], job["size_bytes"]
directory = os.path.dirname(path)
part = os.path.join(directory, "." + os.path.basename(path) + ".part")


def fail(kind: str, **more: Any) -> NoReturn:
    print(json.dumps(dict(more, ok=False, kind=kind)))
    sys.exit(0)


def sync_directory() -> None:
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def has_the_size() -> bool:
    return os.path.isfile(path) and not os.path.islink(path) and os.stat(path).st_size == size_bytes


try:
    untouched = job["action"] != "append" and is_untouched(path, job["sha256"])
    if untouched and model_is_whole(path, job["sha256"]):
        print(json.dumps({"ok": True, "offset": size_bytes}))
        sys.exit(0)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    file = open(part, "a+b")  # noqa: SIM115 - its lock is held until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another run's finish may have renamed it since it was opened: that is no part any more
        if os.fstat(file.fileno()).st_ino != os.stat(part).st_ino:
            fail("locked")
    except OSError:
        fail("locked")
    here = file.seek(0, os.SEEK_END)
    if job["action"] == "offset":
        if here == 0 and has_the_size() and not untouched:
            # Touched, or open to others, since it was verified: verify it again before sending it.
            # One that has rotted untouched stays until the new one takes its place.
            os.rename(path, part)
            here = size_bytes
        if here > size_bytes:
            file.truncate(0)
            here = 0
        free = shutil.disk_usage(directory).free
        if free < size_bytes - here:
            fail("disk_full", free_bytes=free, needed_bytes=size_bytes - here)
        print(json.dumps({"ok": True, "offset": here}))
    elif job["action"] == "append":
        # A link that died without a word must not hold the lock for ever
        while select.select([0], [], [], STALL_S)[0] and (chunk := os.read(0, 1 << 20)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        print(json.dumps({"ok": True, "offset": file.tell()}))
    elif here != size_bytes:
        fail("short", offset=here)
    else:
        digest = digest_of(part)
        if digest != job["sha256"]:
            os.unlink(part)
            fail("digest", have=digest)
        os.fchmod(file.fileno(), 0o644)
        if os.geteuid() == 0:
            os.fchown(file.fileno(), 0, 0)
        os.fsync(file.fileno())
        os.rename(part, path)
        sync_directory()
        with open(part, "w") as text:
            json.dump(manifest_of(path, job["sha256"]), text)
            text.flush()
            os.fsync(text.fileno())
        os.rename(part, path + ".manifest.json")
        sync_directory()
        print(json.dumps({"ok": True, "offset": size_bytes}))
except OSError as error:
    fail("os", error=str(error))
