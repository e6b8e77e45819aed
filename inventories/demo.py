"""The demo fleet of `make demo`: three hosts on this machine, each reached as another kind of user.

Read from .demo/demo/fleet.json, which `python -m demo.fleet up` writes.
"""

import json as _json
import platform as _platform
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

from demo.model import SMALL_MODEL as _SMALL_MODEL
from edgellm import recorder as _recorder

_STATE = _Path(__file__).parent.parent / ".demo" / "demo" / "fleet.json"
if not _STATE.exists():
    _sys.exit("inventories/demo.py: the demo fleet is not up; fix: make demo")
_fleet = _json.loads(_STATE.read_text())

# edge-1 is root; edge-2 uses sudo; edge-3 uses sudo with a password
_USERS = {user["name"]: user for user in _fleet["users"]}
_LOGINS = ("root", "ops", "opspw")


def _host_data(index: int, host: dict[str, _Any]) -> dict[str, _Any]:
    user = _USERS[_LOGINS[index % len(_LOGINS)]]
    data = {
        "ssh_hostname": host["address"],
        "ssh_port": host["ssh_port"],
        "ssh_user": user["name"],
        "ssh_key": user["key"],
        "ssh_known_hosts_file": _fleet["known_hosts"],
        "ssh_strict_host_key_checking": "yes",
        "ssh_connect_retries": 2,
        "site": "demo",
    }
    if user["name"] != "root":
        data["_sudo"] = True
    if "password_file" in user:
        data["_sudo_password"] = _Path(user["password_file"]).read_text().strip()
    return data


_DATA = {
    **_SMALL_MODEL,
    # vm.* of a demo host is its own copy and without effect: the plan would leave it alone
    "swappiness": 10,
    # Three hosts share the cores of this machine and are all tested at the same time
    "ttft_budget_ms": 10000,
    "ttft_regression_percent": None,
}
# Each host's own data: group_data of its architecture would beat the data of a group
_hosts = [
    (host["name"], _DATA | _host_data(index, host)) for index, host in enumerate(_fleet["hosts"])
]

demo = _hosts
if _platform.machine() == "aarch64":
    arm64 = _hosts
else:
    x86_64 = _hosts

_recorder.attach_before_connecting()
