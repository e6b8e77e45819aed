# argv[1]: JSON {archive, directory, id}. Unpacks beside its place, runs it once, renames it into
# place: a runtime that cannot run on this host never gets its final name. Without an archive (null)
# it runs the one that is there once more, as after an update of the host's Python, if that has the
# right bytes: else {"ok": false, "kind": "bytes"}.
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from typing import Any, NoReturn

from edgellm.remote.wholeness import completion, has_right_bytes

job = json.loads(sys.argv[1])
directory = job["directory"]
staging = os.path.join(os.path.dirname(directory), "." + job["id"] + ".unpacking")


def fail(kind: str, **more: Any) -> NoReturn:
    shutil.rmtree(staging, ignore_errors=True)
    print(json.dumps(dict(more, ok=False, kind=kind)))
    sys.exit(0)


def unpack() -> None:
    shutil.rmtree(staging, ignore_errors=True)
    os.mkdir(staging, 0o755)
    with tarfile.open(job["archive"]) as archive:
        for member in archive:
            # Pythons before 3.11.4 have no extraction filters: refuse what could leave it
            parts = member.name.split("/")
            if not (member.isfile() or member.isdir()) or member.name[:1] == "/" or ".." in parts:
                fail("archive", error="unexpected member " + member.name)
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            archive.extract(member, staging)


def run_once(place: str) -> dict[str, Any]:
    """What the self check says."""
    check = subprocess.run(
        # -B: its bytecode would be root's, under the name of this Python alone
        [sys.executable, "-B", "-s", "-m", "edgellm_server.selfcheck"],
        cwd=place,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPATH": place},
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        said = json.loads(check.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = {}
    if not isinstance(said, dict):
        said = {}
    if check.returncode < 0:
        fail("signal", signal=-check.returncode)
    if check.returncode != 0 or said.get("ok") is not True:
        lines = (said.get("error") or check.stderr.strip() or "no output").splitlines()
        fail("selfcheck", error=lines[-1][:400])
    return said


def write_completion(place: str) -> None:
    partial = os.path.join(place, ".complete.new")
    text = completion(place, job["id"])
    with open(partial, "w") as file:
        file.write(text)
    os.rename(partial, os.path.join(place, ".complete"))
    os.sync()


try:
    if job["archive"] is None:
        if not has_right_bytes(directory, job["id"]):
            fail("bytes")
        said = run_once(directory)
        write_completion(directory)
    else:
        unpack()
        said = run_once(staging)
        write_completion(staging)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(staging, directory)
        for name in (job["archive"], job["archive"] + ".manifest.json"):
            os.unlink(name)
        os.sync()
    print(json.dumps({"ok": True, "selfcheck": said}))
except subprocess.TimeoutExpired:
    fail("selfcheck", error="did not end within 300 s")
except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
    fail("os", error=str(error))
