"""Kernel settings in force now; the files under /etc carry them over a boot."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand
from pyinfra.facts.server import Sysctl
from pyinfra.operations import server

from edgellm import layout
from edgellm.facts.paths import PathStates
from edgellm.facts.reading import read
from edgellm.operations.containment import host_operation

SWAPPINESS_BEFORE = f"{layout.BEFORE}/vm.swappiness"


@host_operation()
def swappiness_in_force(swappiness: int | None) -> Generator[Any]:
    """vm.swappiness has this value now. None: the plan leaves it alone."""
    if swappiness is None:
        host.noop("vm.swappiness left alone")
        return
    if read(Sysctl, keys=["vm.swappiness"]).get("vm.swappiness") != swappiness:
        yield StringCommand(
            "mkdir",
            "-p",
            QuoteString(layout.BEFORE),
            "&&",
            "{",
            "test",
            "-e",
            QuoteString(SWAPPINESS_BEFORE),
            "||",
            "cat",
            "/proc/sys/vm/swappiness",
            ">",
            QuoteString(SWAPPINESS_BEFORE),
            ";",
            "}",
        )
    # persist=False: pyinfra's own persistence edits lines of /etc/sysctl.conf by prefix, and
    # Debian 13 does not read that file; ours is a whole file under /etc/sysctl.d
    yield from server.sysctl._inner(key="vm.swappiness", value=swappiness, persist=False)


@host_operation()
def swappiness_put_back() -> Generator[StringCommand]:
    """vm.swappiness is what it was before our first change. Without a record, left as it is."""
    states = read(PathStates, paths=(SWAPPINESS_BEFORE,))
    if states[SWAPPINESS_BEFORE].kind == "absent":
        host.noop("vm.swappiness was never changed by us")
        return
    yield StringCommand(
        "cat",
        QuoteString(SWAPPINESS_BEFORE),
        ">",
        "/proc/sys/vm/swappiness",
        "&&",
        "rm",
        QuoteString(SWAPPINESS_BEFORE),
    )
