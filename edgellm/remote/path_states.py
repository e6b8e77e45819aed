# argv[1]: JSON list of paths. Prints {path: state}; what is not there has kind "absent".
import grp
import hashlib
import json
import os
import pwd
import stat
import sys
from collections.abc import Callable
from typing import Any


def name_of(lookup: Callable[[int], Any], number: int) -> str:
    try:
        return str(lookup(number)[0])
    except KeyError:
        return str(number)


def state_of(path: str) -> dict[str, str]:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "absent"}
    state = {
        "mode": format(stat.S_IMODE(found.st_mode), "04o"),
        "owner": name_of(pwd.getpwuid, found.st_uid),
        "group": name_of(grp.getgrgid, found.st_gid),
    }
    if stat.S_ISLNK(found.st_mode):
        state.update(kind="link", target=os.readlink(path))
    elif stat.S_ISDIR(found.st_mode):
        state.update(kind="directory")
    elif stat.S_ISREG(found.st_mode):
        with open(path, "rb") as file:
            state.update(kind="file", sha256=hashlib.sha256(file.read()).hexdigest())
    else:
        state.update(kind="other")
    return state


print(json.dumps({path: state_of(path) for path in json.loads(sys.argv[1])}))
