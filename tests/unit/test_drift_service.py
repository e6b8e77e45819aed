"""The release, the service and its socket, and the operator's own server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgellm import layout
from edgellm.drift import Verdict, drifted, needs_restart
from edgellm.observed import UpstreamState
from tests.rolled_out import ABSENT, Case, RolledOut, rolled_out

OTHER = "3abadcf8e3b5c3fa"
UPSTREAM = "llama-server.service"
STOPPED = {"main_pid": None, "processes": (), "service_state": "inactive", "nr_throttled": None}


@pytest.fixture
def host() -> RolledOut:
    return rolled_out(Case())


@pytest.fixture
def forwarding() -> RolledOut:
    settings = {"engine": "forward", "upstream_url": "http://[::1]:8080/v1"}
    return rolled_out(Case(settings={**settings, "upstream_unit": UPSTREAM}))


def stopped(host: RolledOut, **service: Any) -> RolledOut:
    return host.served(active=False, running_release=None, **service).in_force(**STOPPED)


@pytest.mark.parametrize(
    ("what", "service", "knob", "reason"),
    [
        ("stop edgellm", {}, "service", "not active"),
        (
            "disable --now edgellm",
            {"enabled": False, "socket_enabled": False},
            "service",
            "not active; not enabled; its socket likewise not enabled",
        ),
        (
            "stop edgellm.socket",
            {"socket_active": False},
            "socket",
            "not active; and the service with it",
        ),
        (
            "disable --now edgellm.socket",
            {"socket_active": False, "socket_enabled": False},
            "socket",
            "not active; not enabled; and the service with it",
        ),
        (
            "disable --now edgellm.service edgellm.socket",
            {
                "enabled": False,
                "socket_enabled": False,
                "socket_active": False,
            },
            "service",
            "not active; not enabled; its socket likewise not active and not enabled",
        ),
    ],
)
def test_what_systemctl_has_stopped_or_disabled_is_one_knob(
    host: RolledOut, what: str, service: dict[str, bool], knob: str, reason: str
) -> None:
    changed = stopped(host, **service)
    state = changed.drift
    assert (state.knob, state.reason) == (knob, reason), what
    assert not needs_restart(changed.states.values())
    assert "scheduling" not in changed.states  # there is nothing to be told of


def test_a_service_that_is_only_disabled_is_one_knob(host: RolledOut) -> None:
    changed = host.served(enabled=False, socket_enabled=False)
    assert changed.drift.reason == "not enabled; its socket likewise not enabled"
    assert host.served(socket_enabled=False).drift.knob == "socket"


def test_a_service_that_failed_says_so(host: RolledOut) -> None:
    state = stopped(host).in_force(service_state="failed").drift
    assert state.effective == "not active (failed), enabled, runs nothing"


def test_a_service_whose_processes_cannot_be_read_is_unknown(host: RolledOut) -> None:
    states = host.in_force(processes=()).states
    unknown = {s.knob for s in states.values() if s.verdict is Verdict.UNKNOWN}
    assert {"scheduling", "cpus", "nofile", "memlock", "mlock", "program"} <= unknown
    assert drifted(states.values()) == ()


def test_a_link_that_leads_elsewhere_is_the_releases(host: RolledOut) -> None:
    for current, reason in (
        (None, "leads to no release of ours"),
        (OTHER, "leads to another release"),
    ):
        state = host.served(current_release=current).drift
        assert (state.knob, state.effective) == ("release", current)
        assert state.reason == f"{layout.CURRENT} {reason}"
        assert (state.configured, state.configured_by) == (current or "none", layout.CURRENT)


def test_a_release_that_was_removed_is_told_once(host: RolledOut) -> None:
    root = host.desired.release_directory
    paths = {
        path: ABSENT if path.startswith(root) else state
        for path, state in host.observed.paths.items()
    }
    state = host.found(paths=paths).served(current_release=None, socket_stale=True).drift
    assert (state.knob, state.reason) == ("release", "it is not on the host")


def test_an_installation_that_was_removed_as_a_whole_is_told_once(host: RolledOut) -> None:
    paths = {
        path: ABSENT if path.startswith(layout.INSTALL_DIR) else state
        for path, state in host.observed.paths.items()
    }
    whole = dict.fromkeys(host.observed.whole, False)
    gone = stopped(host.found(paths=paths, whole=whole), current_release=None)
    state = gone.drift
    assert state.knob == "release"
    assert state.reason == (
        "it is not on the host; hence model, runtime, /opt/edgellm, /opt/edgellm/models, "
        "/opt/edgellm/runtimes, /opt/edgellm/releases, service"
    )


def test_a_host_that_went_back_to_the_release_before_is_told_once(host: RolledOut) -> None:
    units = f"{layout.UNIT_DIR}/edgellm.slice"
    back = host.served(current_release=OTHER, running_release=OTHER, socket_stale=True)
    back = back.lying(units, sha256="ab" * 32).threaded(policy="other")
    state = back.drift
    assert state.knob == "release"
    assert state.reason == (
        f"{layout.CURRENT} leads to another release; hence {units}, scheduling other"
    )


def test_a_process_of_before_the_switch_is_the_services(host: RolledOut) -> None:
    state = host.served(running_release=OTHER).threaded(policy="other").drift
    assert (state.knob, state.reason) == ("service", f"runs {OTHER}; hence scheduling other")
    assert host.served(running_release=None).drift.reason == "runs something else"


def test_files_replaced_under_the_process_are_the_services(host: RolledOut) -> None:
    state = host.served(runs_replaced_files=True).drift
    assert (state.knob, state.reason) == (
        "service",
        "maps files that were replaced since it started",
    )


def test_a_reload_that_is_due_is_the_services_or_the_sockets(host: RolledOut) -> None:
    state = host.served(needs_daemon_reload=True).drift
    assert (state.knob, state.reason) == ("service", "systemd has not read its unit files again")
    state = host.served(needs_daemon_reload=True, socket_stale=True).drift
    assert (state.knob, state.reason) == ("socket", "not the one of its unit file")


def test_without_an_answer_of_systemd_the_service_is_unknown(host: RolledOut) -> None:
    states = host.found(service=None).states
    for knob in ("service", "socket", "release"):
        assert states[knob].verdict is Verdict.UNKNOWN


# The operator's own server


def with_upstream(host: RolledOut, **changes: Any) -> RolledOut:
    state = host.observed.upstream
    assert isinstance(state, UpstreamState)
    return host.found(upstream=replace(state, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drop_in_sha256": None, "tuning": ""}, "its drop-in is another or none"),
        ({"needs_daemon_reload": True}, "systemd has not read its drop-in"),
        ({"active": False, "tuning": None}, "not active"),
        ({"tuning": ""}, "its process was started without the drop-in"),
        (
            {"known": False, "active": False, "drop_in_sha256": None, "tuning": None},
            "no unit of that name; its drop-in is another or none; not active",
        ),
    ],
)
def test_an_upstream_that_is_not_tuned_is_named(
    forwarding: RolledOut, changes: dict[str, Any], reason: str
) -> None:
    changed = with_upstream(forwarding, **changes)
    state = changed.drift
    assert (state.knob, state.reason) == ("upstream", reason)
    assert state.configured_by == layout.drop_in_path(UPSTREAM)
    assert not needs_restart(changed.states.values())  # of ours


def test_an_upstream_without_a_process_of_its_own_cannot_tell_its_tuning(
    forwarding: RolledOut,
) -> None:
    state = with_upstream(forwarding, tuning=None).states["upstream"]
    assert state.verdict is Verdict.IN_ORDER


def test_an_upstream_that_runs_only_when_it_is_asked_for_is_in_order(
    forwarding: RolledOut,
) -> None:
    asleep = with_upstream(forwarding, active=False, tuning=None, idle=True)
    state = asleep.states["upstream"]
    assert (state.verdict, state.reason) == (
        Verdict.IN_ORDER,
        f"{UPSTREAM} does not run now, and need not: its next start is tuned",
    )
    other = with_upstream(asleep, drop_in_sha256=None)
    assert other.drift.reason == "its drop-in is another or none"


def test_an_upstream_that_was_not_asked_is_unknown(forwarding: RolledOut) -> None:
    assert forwarding.found(upstream=None).states["upstream"].verdict is Verdict.UNKNOWN


def test_a_host_without_an_upstream_has_no_such_knob(host: RolledOut) -> None:
    assert "upstream" not in host.states


def test_a_server_that_ends_again_and_again_is_the_one_fault(host: RolledOut) -> None:
    between = host.in_force(service_state="activating", n_restarts=7)
    early = between.threaded(policy="other").running(uid=0, vm_locked_bytes=0)
    assert early.drift.knob == "service"
    assert early.drift.reason == "not ready: it has ended and was started again, 7 times"


def test_a_server_that_loads_for_the_first_time_is_not_known_to_be_wrong(host: RolledOut) -> None:
    loading = host.in_force(service_state="activating").threaded(policy="other").states
    assert loading["service"].verdict is Verdict.IN_ORDER
    assert loading["scheduling"].verdict is Verdict.UNKNOWN


def test_another_release_that_is_there_already_is_due_where_the_host_has_changed(
    host: RolledOut,
) -> None:
    other = host.served(current_release="f" * 16, running_release="f" * 16)
    assert other.states["release"].reason == "/opt/edgellm/current leads to another release"
    kernel = replace(host.observed.profile.kernel, release="6.12.3")
    profile = replace(host.observed.profile, kernel=kernel)
    why = other.found(profile=profile).states["release"].reason
    assert why is not None
    assert why.startswith("another release is due: kernel ")


@pytest.mark.parametrize("unit", ["edgellm.service", "edgellm.socket"])
def test_a_unit_file_that_is_gone_is_told_once(host: RolledOut, unit: str) -> None:
    enabled = {"edgellm.service": "enabled", "edgellm.socket": "socket_enabled"}[unit]
    path = f"{layout.UNIT_DIR}/{unit}"
    gone = host.lying(path, ABSENT).served(**{enabled: False, "needs_daemon_reload": True})
    assert gone.drift.knob == path
