# argv[1]: JSON {releases, models, runtimes, current, previous}: the paths to look at. Prints what
# lies there: {"releases": {id: {"mtime_ns", "links"}}, "models": [...], "runtimes": [...],
# "current": id, "previous": id, "leftovers": [paths of cut transfers and unpackings]}.
import json
import os
import sys
from typing import Any

paths = json.loads(sys.argv[1])


def entries(directory: str, hidden: bool = False) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if (name[:1] == ".") is hidden)
    except OSError:
        return []


def release_of(link: str) -> str | None:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def describe(release: str) -> dict[str, Any]:
    directory = os.path.join(paths["releases"], release)
    links = [os.path.join(directory, name) for name in entries(directory)]
    return {
        "mtime_ns": os.lstat(directory).st_mtime_ns,
        "links": [os.path.basename(os.readlink(link)) for link in links if os.path.islink(link)],
    }


print(
    json.dumps(
        {
            "releases": {name: describe(name) for name in entries(paths["releases"])},
            "models": entries(paths["models"]),
            "runtimes": entries(paths["runtimes"]),
            "leftovers": [
                os.path.join(paths[kind], name)
                for kind in ("models", "runtimes")
                for name in entries(paths[kind], hidden=True)
            ],
            "current": release_of(paths["current"]),
            "previous": release_of(paths["previous"]),
        }
    )
)
