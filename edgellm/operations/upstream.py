"""The operator's own server behind ours: tuned by a drop-in, and left as it was afterwards."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import asdict

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from edgellm import layout
from edgellm.errors import EdgellmError
from edgellm.facts.reading import read
from edgellm.facts.upstream import UpstreamUnits
from edgellm.observed import UpstreamState
from edgellm.operations.containment import host_operation
from edgellm.operations.paths import HostFile
from edgellm.remote import script_command


def require(unit: str) -> None:
    """Before anything is changed: raises EdgellmError where the host has no unit of this name."""
    if not read(UpstreamUnits, unit=unit)[unit].known:
        raise EdgellmError(
            host=host.name,
            what="upstream_unit",
            want=f"{unit}, the service of the server to forward to",
            have="no unit of that name",
            fix="install it on the host first, or correct upstream_unit",
        )


@host_operation()
def tuned(unit: str | None, drop_in: str | None) -> Generator[StringCommand]:
    """`unit` runs with our drop-in of this text, and no other unit has one. None: none has.

    Whether it runs with it is read from its process, so that a run that was cut before the restart
    is mended by the next one.
    """
    states = read(UpstreamUnits, unit=unit)
    others = tuple(name for name in states if name != unit)
    stale = bool(others)
    if others:
        yield removal(layout.drop_in_path(name) for name in others)
    restart = False
    if unit is not None and drop_in is not None:
        state = states[unit]
        if state.drop_in_sha256 != hashlib.sha256(drop_in.encode()).hexdigest():
            file = HostFile(path=layout.drop_in_path(unit), content=drop_in)
            yield script_command("write_files", stdin=[asdict(file)])
            stale = restart = True
        stale = stale or state.needs_daemon_reload
        # Without a main process of its own (a oneshot that starts containers) none can tell
        in_force = state.tuning is None or state.tuning == _fingerprint(drop_in)
        restart = restart or not (state.active and in_force)
        # Its own time to run is not now: a timer's job, or a server that nobody has asked yet
        restart = restart and not state.idle
    if stale:
        yield StringCommand("systemctl", "daemon-reload")
    for name in others:
        yield StringCommand("systemctl", "try-restart", "--no-block", QuoteString(name))
    if restart and unit is not None:
        yield StringCommand("systemctl", "restart", "--no-block", QuoteString(unit))
    if not stale and not restart:
        host.noop(
            "no server of the operator's is tuned here"
            if unit is None
            else f"{unit} already runs with the plan's tuning"
        )


def restarted(places: Iterable[str]) -> Generator[StringCommand]:
    """Those of `places` that are drop-ins: their units, where they run."""
    for place in places:
        if posixpath.basename(place) == layout.DROP_IN:
            unit = posixpath.basename(posixpath.dirname(place)).removesuffix(".d")
            yield StringCommand("systemctl", "try-restart", "--no-block", QuoteString(unit))


def started(before: Mapping[str, UpstreamState]) -> Generator[StringCommand]:
    """Those that ran `before`, once more: a slice takes what is in it with it when it stops."""
    for unit, state in before.items():
        if state.active:
            yield StringCommand("systemctl", "start", "--no-block", QuoteString(unit))


def removal(drop_ins: Iterable[str]) -> StringCommand:
    """Of these drop-ins, and of the folders that they lie in where nothing else does."""
    places = tuple(drop_ins)
    return StringCommand(
        "rm",
        "-f",
        "--",
        *(QuoteString(place) for place in places),
        "&&",
        "rmdir",
        "--ignore-fail-on-non-empty",
        "--",
        *map(QuoteString, dict.fromkeys(posixpath.dirname(place) for place in places)),
    )


def _fingerprint(drop_in: str) -> str | None:
    found = re.search(r"\bEDGELLM_TUNING=(\w+)", drop_in)
    return found[1] if found else None
