"""The service: its account, the release it runs, and the way back to the one before."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Generator
from typing import Any

from pyinfra import host
from pyinfra import state as pyinfra_state
from pyinfra.api import QuoteString, StringCommand
from pyinfra.operations import server

from edgellm import recorder
from edgellm.errors import EdgellmError
from edgellm.facts.installed import Installed
from edgellm.facts.reading import read
from edgellm.facts.service import SLICE, UNIT, Service
from edgellm.layout import CURRENT, PREVIOUS, RELEASES, STATE_DIR, UNIT_DIR, USER
from edgellm.operations.containment import host_operation


@host_operation()
def account_present() -> Generator[Any]:
    """The system account that the server runs as; it owns nothing and cannot log in."""
    yield from server.user._inner(
        user=USER,
        system=True,
        home=STATE_DIR,
        create_home=False,
        shell="/usr/sbin/nologin",
        comment="edgellm server",
    )


@host_operation()
def running(
    release_id: str, repaired: Callable[[], bool] | None = None
) -> Generator[StringCommand]:
    """`current` points to the release, and the enabled, active service runs it.

    Whether it runs it is read from the process itself, so that a run that was cut between the
    flip and the restart is mended by the next one. `repaired`: whether this run has placed what
    the process reads at its start; it may run with what somebody had made of that, or without it.
    """
    state = read(Service)
    stale = False
    if state.needs_daemon_reload:
        stale = True
        yield StringCommand("systemctl", "daemon-reload")
    if state.current_release != release_id:
        stale = True
        if state.current_release is not None:
            yield point(PREVIOUS, state.current_release)
        yield point(CURRENT, release_id)
    if not state.enabled:
        stale = True
        yield StringCommand("systemctl", "enable", UNIT)
    runs_other_files = state.runs_replaced_files or (
        pyinfra_state.is_executing and repaired is not None and repaired()
    )
    if not state.active or state.running_release != release_id or runs_other_files:
        stale = True
        yield from restart()
    recorder.note_release(host, release_id)
    if not stale:
        host.noop(f"{UNIT} already runs release {release_id}")


@host_operation()
def stopped() -> Generator[StringCommand]:
    """The service neither runs nor starts at boot."""
    state = read(Service)
    if state.active or state.enabled:
        yield StringCommand("systemctl", "disable", "--now", UNIT)
        # systemd keeps an empty slice, with its cgroup, until it is told to stop it
        yield StringCommand("systemctl", "stop", SLICE)
    else:
        host.noop(f"{UNIT} is neither active nor enabled")


@host_operation()
def account_absent() -> Generator[Any]:
    """The system account is gone, and its group with it."""
    commands = list(server.user._inner(user=USER, present=False))
    if not commands:
        host.noop(f"account {USER} already absent")
    yield from commands


@host_operation()
def rolled_back(required: bool) -> Generator[StringCommand]:
    """The previous release runs again, with its own units.

    Without one: `required` fails the host, else it stays as it is.
    """
    state = read(Service)
    previous = state.previous_release
    if previous is None or previous == state.current_release:
        if not required:
            host.noop("no previous release to go back to")
            return
        raise EdgellmError(
            host=host.name,
            what="roll-back",
            want="a previous release",
            have="none beside the current one",
            fix="roll a release out with deploys/qwen.py instead",
        )
    release = posixpath.join(RELEASES, previous)
    units = [posixpath.join(release, unit) for unit in (UNIT, SLICE)]
    yield StringCommand(
        "install", "-m", "0644", *(QuoteString(unit) for unit in units), QuoteString(UNIT_DIR)
    )
    yield point(CURRENT, previous)
    yield StringCommand("systemctl", "daemon-reload")
    yield from restart()
    recorder.note_release(host, previous)


@host_operation()
def releases_pruned(keep: int) -> Generator[StringCommand]:
    """At most `keep` releases, the current and the previous one always, and nothing they need not.

    Models and runtimes that no kept release links to go with the releases, and what cut transfers
    have left: this run's are complete by now.
    """
    installed = read(Installed)
    gone = installed.prunable(keep)
    if gone:
        yield StringCommand("rm", "-rf", "--", *(QuoteString(path) for path in gone))
    else:
        host.noop(f"{len(installed.releases)} releases, none to prune")


def restart() -> Generator[StringCommand]:
    """Also of a unit that had given up (StartLimitBurst), which would refuse it."""
    yield StringCommand("systemctl", "reset-failed", UNIT, "2>/dev/null", "||", "true")
    yield StringCommand("systemctl", "restart", UNIT)


def point(link: str, release_id: str) -> StringCommand:
    """Swings a link in one step: a new link under another name, renamed over the old one."""
    target = posixpath.join("releases", release_id)
    return StringCommand(
        "ln",
        "-sfn",
        QuoteString(target),
        QuoteString(f"{link}.new"),
        "&&",
        "mv",
        "-Tf",
        QuoteString(f"{link}.new"),
        QuoteString(link),
    )
