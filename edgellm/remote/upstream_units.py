# argv[1]: JSON {unit_dir, drop_in, mark, unit: name | null}. Prints, for `unit` and for every unit
# that has our drop-in, {unit: {"known", "active", "needs_daemon_reload", "drop_in_sha256",
# "tuning", "idle"}}. "tuning": EDGELLM_TUNING in its main process; null: no process, "": not set
# there.
import glob
import hashlib
import json
import os
import subprocess
import sys
from typing import Any

asked = json.loads(sys.argv[1])


def drop_in_sha256(unit: str) -> str | None:
    try:
        with open(os.path.join(asked["unit_dir"], unit + ".d", asked["drop_in"]), "rb") as file:
            text = file.read()
    except OSError:
        return None
    return hashlib.sha256(text).hexdigest() if text.startswith(asked["mark"].encode()) else None


def tuning(pid: str) -> str | None:
    if pid in ("", "0"):
        return None
    try:
        with open("/proc/" + pid + "/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return None
    found = [v.partition(b"=")[2] for v in variables if v.startswith(b"EDGELLM_TUNING=")]
    return found[0].decode(errors="replace") if found else ""


def unit_state(unit: str) -> dict[str, Any]:
    names = "LoadState,ActiveState,NeedDaemonReload,MainPID,Type,TriggeredBy"
    said = subprocess.run(
        ["systemctl", "show", "--property=" + names, "--", unit],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    ).stdout
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return {
        "known": values.get("LoadState") == "loaded",
        "active": values.get("ActiveState") in ("active", "activating", "reloading"),
        "needs_daemon_reload": values.get("NeedDaemonReload") == "yes",
        "drop_in_sha256": drop_in_sha256(unit),
        "tuning": tuning(values.get("MainPID", "")),
        "idle": values.get("ActiveState") == "inactive"
        and (values.get("Type") == "oneshot" or bool(values.get("TriggeredBy"))),
    }


places = glob.glob(os.path.join(glob.escape(asked["unit_dir"]), "*.service.d", asked["drop_in"]))
units = {os.path.basename(os.path.dirname(place))[: -len(".d")] for place in places}
tuned = {unit for unit in units if drop_in_sha256(unit) is not None}
print(json.dumps({unit: unit_state(unit) for unit in sorted(tuned | {asked["unit"]} - {None})}))
