# stdin: JSON list of {path, content, mode, owner, group}. Each file is written beside its place,
# synced and renamed, so that a cut leaves the old file or the new one, never half of one.
import json
import os
import shutil
import subprocess
import sys
import tempfile


def write(path: str, content: str, mode: str, owner: str, group: str) -> None:
    directory = os.path.dirname(path)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".edgellm-", dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode())
            file.flush()
            shutil.chown(temporary, owner, group)
            os.chmod(temporary, int(mode, 8))
            os.fsync(file.fileno())
        if os.path.islink(path) or not os.path.isdir(path):
            os.replace(temporary, path)
        else:
            raise IsADirectoryError(path + " is a directory, a file belongs there")
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


files = json.load(sys.stdin)
try:
    for file in files:
        write(**file)
except (OSError, LookupError) as error:  # LookupError: no such owner or group here
    sys.exit(f"could not write {file['path']}: {error}")
# A file made under a temporary name may carry the wrong SELinux label: systemd says 203/EXEC.
if os.path.exists("/sys/fs/selinux/enforce") and shutil.which("restorecon"):
    subprocess.run(["restorecon", *(file["path"] for file in files)], check=False)
