"""The service: its account, the release it runs, and the way back to the one before."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Generator
from typing import Any

from pyinfra import host
from pyinfra import state as pyinfra_state
from pyinfra.api import QuoteString, StringCommand
from pyinfra.operations import server

from edgellm import drift, recorder
from edgellm.errors import EdgellmError
from edgellm.facts.account import AccountState, ServiceAccount
from edgellm.facts.effective import Effective
from edgellm.facts.installed import Installed
from edgellm.facts.paths import PathStates
from edgellm.facts.reading import read
from edgellm.facts.service import SLICE, SOCKET, UNIT, ReleaseUnits, Service
from edgellm.facts.upstream import UpstreamUnits
from edgellm.layout import (
    CURRENT,
    DROP_IN,
    INSTALL_DIR,
    PREVIOUS,
    REALTIME_CONFIRMED,
    REALTIME_TRIAL,
    STATE_DIR,
    UNIT_DIR,
    USER,
)
from edgellm.operations import upstream
from edgellm.operations.containment import host_operation
from edgellm.tuning import TuningPlan

# A roll-back has no smoke test after it: it waits for the release to be ready itself. The slowest
# card seen takes a third of this.
READY_WITHIN_S = 600
# Real time ends this long after the smoke test must have, for the rest of the run to confirm it:
# operations go in lockstep, and another host's roll-back may come between.
GUARD_SLACK_S = READY_WITHIN_S + 120
GUARD = "edgellm-realtime-guard"
# Its timer would restart the release that comes after it
TRIAL_OVER = StringCommand(
    f"rm -f {REALTIME_TRIAL}; systemctl stop {GUARD}.timer 2>/dev/null || true"
)
ACCOUNT = AccountState(
    home=STATE_DIR, shell=drift.ACCOUNT_SHELL, comment=drift.ACCOUNT_COMMENT, group=USER
)
HOME = ("directory", USER, USER)


@host_operation()
def account_present() -> Generator[Any]:
    """The system account that the server runs as; it owns nothing and cannot log in."""
    home = read(PathStates, paths=(STATE_DIR,))[STATE_DIR]
    if read(ServiceAccount) == ACCOUNT and (home.kind, home.owner, home.group) == HOME:
        host.noop(f"account {USER} already as planned")
        return
    # Not left to useradd: whether that makes a group of its own is for login.defs to say
    yield from server.group._inner(group=USER, system=True)
    yield from server.user._inner(
        user=USER,
        group=USER,
        system=True,
        home=ACCOUNT.home,
        create_home=False,
        shell=ACCOUNT.shell,
        comment=ACCOUNT.comment,
    )


@host_operation()
def running(
    release_id: str,
    plan: TuningPlan,
    upstream_unit: str | None = None,
    repaired: Callable[[], bool] | None = None,
    guard_s: int = READY_WITHIN_S,
    own_app: bool = False,
) -> Generator[StringCommand]:
    """`current` points to the release, and the enabled, active service runs it, on its socket.

    Running includes loading: a service that loads the right release is left to it, and whether it
    gets ready is for the smoke test to find out, which says why not.

    Whether it runs it is read from the process itself, so that a run that was cut between the
    flip and the restart is mended by the next one. `repaired`: whether this run has placed what
    the process reads at its start; it may run with what somebody had made of that, or without it.
    So is how it runs: what somebody has set on the running process, on its slice or by a drop-in
    goes. Where the plan has real time, a host that is not confirmed within `guard_s` goes back to
    normal scheduling by itself.
    """
    state, effective = read(Service), read(Effective)
    process = drift.process_states(plan, effective, own_app=own_app)
    drop_ins = drift.removable_drop_ins(effective)
    stale = False
    if drop_ins:
        yield upstream.removal(drop_ins)
    if state.needs_daemon_reload or drop_ins:
        stale = True
        yield StringCommand("systemctl", "daemon-reload")
    if state.current_release != release_id:
        stale = True
        if state.current_release is not None:
            yield point(PREVIOUS, state.current_release)
        yield point(CURRENT, release_id)
    if not (state.enabled and state.socket_enabled):
        stale = True
        yield StringCommand("systemctl", "enable", UNIT, SOCKET)
    runs_other_files = state.runs_replaced_files or (
        pyinfra_state.is_executing and repaired is not None and repaired()
    )
    with_socket = state.socket_stale or not state.socket_active
    runs_it = state.active and state.running_release == release_id and not runs_other_files
    trial = plan.use_chrt and plan.scheduling.is_realtime
    trial = trial and effective.realtime_confirmed != release_id
    if trial:
        yield guarded(release_id, guard_s)
    elif effective.realtime_trial is not None:
        yield TRIAL_OVER
    if with_socket or not runs_it or trial or drift.needs_restart(process):
        stale = True
        slice_off = state.active and drift.needs_slice_stopped(process)
        # It is in the slice
        beside = read(UpstreamUnits, unit=upstream_unit) if slice_off and upstream_unit else {}
        yield from restart(with_socket=with_socket, with_slice=slice_off)
        yield from upstream.started(beside)
    recorder.note_release(host, release_id)
    if not stale:
        host.noop(f"{UNIT} already runs release {release_id}")


def guarded(release_id: str, within_s: int) -> StringCommand:
    """Real time may be tried, by a host that ends the trial itself unless it is confirmed.

    In one line, and before the restart: there is no real time without the timer. At most one is
    pending, and it does nothing where the trial is over.
    """
    over = (
        f"test -e {REALTIME_TRIAL} || exit 0; rm -f {REALTIME_TRIAL}; "
        f"systemctl restart --no-block {UNIT}"
    )
    return StringCommand(
        f"rm -f {REALTIME_TRIAL}; systemctl stop {GUARD}.timer 2>/dev/null;",
        *("systemd-run", "--quiet", "--collect", f"--unit={GUARD}", f"--on-active={within_s}"),
        *("--timer-property=AccuracySec=1s", "/bin/sh", "-c", QuoteString(over)),
        f"&& echo {release_id} | install -m 0644 /dev/stdin {REALTIME_TRIAL}",
    )


def confirmation(release_id: str) -> StringCommand:
    """The release runs in real time from now on, also after a boot; nothing ends it.

    Fails where its trial is over by now: the host has gone back to normal scheduling.
    """
    new = f"{REALTIME_CONFIRMED}.new"
    return StringCommand(
        f'[ "$(cat {REALTIME_TRIAL} 2>/dev/null)" = {release_id} ] ||',
        "{ echo 'the trial of real time is over already: run again' >&2; exit 1; } &&",
        f"echo {release_id} | install -m 0644 /dev/stdin {new} && sync {new} &&",
        # The guard stays where the confirmation could not be written; a new name is not on the
        # disk before its folder is
        f"mv -f {new} {REALTIME_CONFIRMED} && sync {INSTALL_DIR} && rm -f {REALTIME_TRIAL} &&",
        f"{{ systemctl stop {GUARD}.timer 2>/dev/null || true; }}",
    )


@host_operation()
def stopped() -> Generator[StringCommand]:
    """Service and socket neither run nor start at boot."""
    state = read(Service)
    # The socket first: a connection would start the service again
    units = [SOCKET] if state.socket_active or state.socket_enabled else []
    units += [UNIT] if state.active or state.enabled else []
    if units:
        yield StringCommand("systemctl", "disable", "--now", *units)
        # systemd keeps an empty slice, with its cgroup, until it is told to stop it
        yield StringCommand("systemctl", "stop", SLICE)
        # A trial of real time that was under way when somebody gave up
        yield StringCommand("systemctl", "stop", f"{GUARD}.timer", "2>/dev/null", "||", "true")
    else:
        host.noop(f"{UNIT} and {SOCKET} are neither active nor enabled")


@host_operation()
def account_absent() -> Generator[Any]:
    """The system account is gone, and its group with it."""
    if not read(ServiceAccount).is_there:
        host.noop(f"account {USER} already absent")
        return
    yield from server.user._inner(user=USER, present=False)
    # userdel takes it with it only where login.defs has USERGROUPS_ENAB
    yield StringCommand(f"! getent group {USER} >/dev/null || groupdel {USER}")


@host_operation()
def rolled_back(required: bool) -> Generator[StringCommand]:
    """The previous release runs again, with its own units, and is ready.

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
    units = read(ReleaseUnits, release_id=previous)
    socket = posixpath.join(UNIT_DIR, SOCKET)
    has_socket = socket not in units.surplus  # releases of before socket activation have none
    if not has_socket:
        yield StringCommand("systemctl", "disable", SOCKET)
        yield StringCommand("systemctl", "stop", SOCKET, UNIT)
    for source, place in units.differing:
        yield StringCommand("install", "-D", "-m", "0644", QuoteString(source), QuoteString(place))
    drop_ins = [place for place in units.surplus if posixpath.basename(place) == DROP_IN]
    others = [place for place in units.surplus if place not in drop_ins]
    if drop_ins:
        yield upstream.removal(drop_ins)
    if others:
        yield StringCommand("rm", "-f", "--", *(QuoteString(place) for place in others))
    if read(Effective).realtime_trial is not None:
        yield TRIAL_OVER
    yield point(CURRENT, previous)
    yield StringCommand("systemctl", "daemon-reload")
    if has_socket and not state.socket_enabled:
        yield StringCommand("systemctl", "enable", SOCKET)
    yield from upstream.restarted(place for _, place in units.differing)
    yield from upstream.restarted(drop_ins)
    with_socket = has_socket and (
        not state.socket_active
        or state.socket_stale
        or any(place == socket for _, place in units.differing)
    )
    # Else the cgroup keeps the AllowedCPUs= that the previous release has not (systemd#43846)
    with_slice = any(posixpath.basename(place) == SLICE for _, place in units.differing)
    beside = read(UpstreamUnits, unit=None) if with_slice else {}
    yield from restart(
        with_socket=with_socket, with_slice=with_slice, ready_within_s=READY_WITHIN_S
    )
    yield from upstream.started(beside)
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


def restart(
    *, with_socket: bool, with_slice: bool = False, ready_within_s: int | None = None
) -> Generator[StringCommand]:
    """Also of a unit that had given up (StartLimitBurst), which would refuse it.

    Waits until the old process has ended its answers, so that nobody takes it for the new one; the
    socket keeps who connects meanwhile, unless it is restarted as well (`with_socket`). Waits for
    the new one to be ready only within `ready_within_s`, where that is given. `with_slice`: the
    slice's cgroup is made anew, which keeps what somebody wrote into it.
    """
    yield StringCommand("systemctl", "reset-failed", UNIT, SOCKET, "2>/dev/null", "||", "true")
    # In one line: a link that is lost after the stop does not keep the start from following.
    bits = ["systemctl", "stop", UNIT, ";"]
    if with_slice:
        bits += ["systemctl", "stop", SLICE, ";"]
    if with_socket:
        # A port that is taken is told by the smoke test, and undone by its roll-back.
        bits += ["systemctl", "restart", SOCKET, ";"]
    if ready_within_s is None:
        bits += ["systemctl", "start", "--no-block", UNIT]
    else:
        bits += ["timeout", str(ready_within_s), "systemctl", "start", UNIT]
    yield StringCommand(*bits)


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
