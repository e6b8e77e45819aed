# argv[1]: JSON {archive, directory, id}. Unpacks beside its place, runs it once, renames it into
# place: a runtime that cannot run on this host never gets its final name.
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from typing import Any, NoReturn

from edgellm.remote.wholeness import fingerprint

job = json.loads(sys.argv[1])
directory = job["directory"]
staging = os.path.join(os.path.dirname(directory), "." + job["id"] + ".unpacking")


def fail(kind: str, **more: Any) -> NoReturn:
    shutil.rmtree(staging, ignore_errors=True)
    print(json.dumps(dict(more, ok=False, kind=kind)))
    sys.exit(0)


try:
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
    check = subprocess.run(
        [sys.executable, "-s", "-m", "edgellm_server.selfcheck"],
        cwd=staging,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPATH": staging},
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
    for cached in [path for path, _, _ in os.walk(staging) if path.endswith("__pycache__")]:
        shutil.rmtree(cached)
    with open(os.path.join(staging, ".complete"), "w") as file:
        file.write(job["id"] + " " + fingerprint(staging) + "\n")
    os.sync()
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
