"""Kernel settings in force now; the files under /etc carry them over a boot.

What was there before our first change is recorded once, and put back by uninstall.py, or as soon
as the plan leaves the setting alone again.
"""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from edgellm import layout
from edgellm.facts.kernel import GOVERNOR_FILES, Governors, Swappiness
from edgellm.facts.paths import PathStates
from edgellm.facts.reading import read
from edgellm.operations.containment import host_operation

SWAPPINESS = "/proc/sys/vm/swappiness"
SWAPPINESS_BEFORE = f"{layout.BEFORE}/vm.swappiness"
GOVERNORS_BEFORE = f"{layout.BEFORE}/scaling_governor"  # lines "FILE GOVERNOR"


@host_operation()
def swappiness_in_force(swappiness: int | None) -> Generator[StringCommand]:
    """vm.swappiness has this value now. None: the one from before our first change."""
    if swappiness is None:
        if not _is_recorded(SWAPPINESS_BEFORE):
            host.noop("vm.swappiness left alone")
            return
        yield _and(f"cat {SWAPPINESS_BEFORE} > {SWAPPINESS}", f"rm {SWAPPINESS_BEFORE}")
        return
    if read(Swappiness) == swappiness:
        host.noop(f"vm.swappiness is {swappiness}")
        return
    yield recorded(SWAPPINESS_BEFORE, f"cat {SWAPPINESS}")
    yield StringCommand("sysctl", QuoteString(f"vm.swappiness={swappiness}"))


@host_operation()
def governor_in_force(governor: str | None) -> Generator[StringCommand]:
    """All cores' clocks are governed like this now. None: as before our first change."""
    if governor is None:
        if not _is_recorded(GOVERNORS_BEFORE):
            host.noop("the clock's governor left alone")
            return
        # A core may be off line since, or its driver another one
        put_back = 'while read -r file governor; do [ ! -e "$file" ] || echo "$governor" >"$file"'
        yield _and(f"{put_back}; done <{GOVERNORS_BEFORE}", f"rm {GOVERNORS_BEFORE}")
        return
    governors = read(Governors)
    if all(now == governor for now in governors.values()):
        host.noop(f"clocks governed by {governor}")
        return
    yield recorded(GOVERNORS_BEFORE, f"grep -H '' {GOVERNOR_FILES} | tr : ' '")
    yield StringCommand("systemd-tmpfiles", "--create", QuoteString(layout.GOVERNOR_CONF))


def recorded(record: str, reading: str) -> StringCommand:
    """What the command `reading` prints is kept in the file `record`, if nothing is yet."""
    return StringCommand(
        f"mkdir -p {layout.BEFORE} &&",
        # In one step: half a record would be put back as it is
        f"{{ test -e {record} || {{ {reading} > {record}.new && mv {record}.new {record} ; }} ; }}",
    )


def _is_recorded(record: str) -> bool:
    return read(PathStates, paths=(record,))[record].kind != "absent"


def _and(*commands: str) -> StringCommand:
    return StringCommand(" && ".join(commands))
