"""What the host is, its packages and the service's account."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm import layout
from edgellm.desired import DesiredState
from edgellm.drift.verdict import KnobState, Verdict, in_order, left_alone, off, state_of, unknown
from edgellm.hardware import HostProfile, RecordedHost
from edgellm.observed import EffectiveState, PathState
from edgellm.tuning import missing_tools

ACCOUNT_SHELL = "/usr/sbin/nologin"
ACCOUNT_COMMENT = "edgellm server"


def recorded_state(profile: HostProfile) -> KnobState:
    """What has changed since the last verified roll-out: a note, as the plan follows it."""
    if profile.recorded is None:
        note = "no record of a verified roll-out: the next one leaves it"
    else:
        note = "; ".join(changes_of(profile))
    return state_of(
        "host",
        None,
        _summary(RecordedHost.of(profile)),
        Verdict.IN_ORDER,
        note or None,
        configured=None if profile.recorded is None else _summary(profile.recorded),
        by=None if profile.recorded is None else layout.RECORDED,
    )


def _summary(recorded: RecordedHost) -> str:
    return (
        f"{recorded.distribution}, kernel {recorded.kernel}, Python {recorded.python}, "
        f"CPUs {recorded.cpus_online}, cgroup {_hierarchy(recorded.cgroup_version)}"
    )


def _hierarchy(version: int | None) -> str:
    return "none" if version is None else f"v{version}"


def changes_of(profile: HostProfile) -> tuple[str, ...]:
    """('kernel 6.1.0 -> 6.12.3', …) since the last verified roll-out; () without a record."""
    before = profile.recorded
    if before is None:
        return ()
    now = RecordedHost.of(profile)
    pairs = (
        ("distribution", before.distribution, now.distribution),
        ("kernel", before.kernel, now.kernel),
        ("Python", before.python, now.python),
        ("CPUs", before.cpus_online, now.cpus_online),
        ("cgroup", _hierarchy(before.cgroup_version), _hierarchy(now.cgroup_version)),
    )
    return tuple(f"{name} {then} -> {today}" for name, then, today in pairs if then != today)


def python_update(profile: HostProfile) -> str | None:
    """'3.11 -> 3.13'; None where it is the same, or not known."""
    before = profile.recorded
    if before is None:
        return None
    then = ".".join(before.python.split(".")[:2])
    now = ".".join(str(part) for part in (profile.tools.python_version or ())[:2])
    return f"{then} -> {now}" if then and now and then != now else None


def package_state(desired: DesiredState, profile: HostProfile) -> KnobState:
    missing = missing_tools(profile, desired.settings)
    wanted = "numactl where there are nodes, chrt, libgomp, libstdc++"
    if not missing:
        return in_order("packages", wanted, "all there")
    have = f"{', '.join(missing)} missing"
    if desired.plan.packages:
        names = ", ".join(desired.plan.packages)
        return off("packages", wanted, have, f"{have}: {names} to install")
    return left_alone(desired.plan, "packages", have)


def account_state(paths: Mapping[str, PathState], effective: EffectiveState) -> KnobState:
    wanted = _account(layout.USER, layout.STATE_DIR, ACCOUNT_SHELL, ACCOUNT_COMMENT)
    account = effective.account
    if account is None:
        return off("account", wanted, "none", f"no account {layout.USER}")
    have = _account(account.group, account.home, account.shell, account.comment)
    if have != wanted:
        pairs = (
            ("group", account.group, layout.USER),
            ("home", account.home, layout.STATE_DIR),
            ("shell", account.shell, ACCOUNT_SHELL),
            ("comment", account.comment, ACCOUNT_COMMENT),
        )
        faults = [f"{name} {found}, not {want}" for name, found, want in pairs if found != want]
        return off("account", wanted, have, "; ".join(faults))
    home = paths.get(layout.STATE_DIR)
    if home is None:
        return unknown("account", f"{layout.STATE_DIR} was not read", wanted, have)
    if home.kind != "directory":
        found = "not there" if home.kind == "absent" else "no directory"
        return off("account", wanted, have, f"{layout.STATE_DIR} is {found}")
    if (home.owner, home.group) != (layout.USER, layout.USER):
        why = f"{layout.STATE_DIR} is of {home.owner}:{home.group}"
        return off("account", wanted, have, why)
    return in_order("account", wanted, have)


def _account(group: str | None, home: str, shell: str, comment: str) -> str:
    return f"{layout.USER}:{group}, home {home}, shell {shell}, {comment!r}"
