"""Paths of ours and the two artifacts: what is wrong with each, by its own name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgellm import layout
from edgellm.drift import Verdict, needs_restart, needs_slice_stopped, path_fault
from edgellm.observed import PathState
from tests.rolled_out import ABSENT, Case, RolledOut, rolled_out

OTHER = "ab" * 32
SERVICE = f"{layout.UNIT_DIR}/edgellm.service"
SLICE = f"{layout.UNIT_DIR}/edgellm.slice"
SOCKET = f"{layout.UNIT_DIR}/edgellm.socket"


@pytest.fixture
def host() -> RolledOut:
    return rolled_out(Case(api_keys=True))


def in_release(host: RolledOut, name: str) -> str:
    return f"{host.desired.release_directory}/{name}"


def all_paths() -> tuple[str, ...]:
    host = rolled_out(Case(api_keys=True))
    groups = (host.desired.keys, host.desired.release, host.desired.units)
    return tuple(path for group in groups for path in group.paths)


@pytest.mark.parametrize("path", all_paths())
def test_every_path_that_is_given_away_or_gone_is_named_alone(host: RolledOut, path: str) -> None:
    there = host.observed.paths[path]
    if there.kind == "link":
        state = host.lying(path, target="/tmp").drift
        assert (state.knob, state.reason) == (path, "leads to /tmp")
    else:
        state = host.lying(path, owner="nobody", mode="0777").drift
        assert state.knob == path
        assert state.reason == f"owner nobody, not root; mode 0777, not {there.mode}"
    if path == host.desired.release_directory:
        return  # told by the release itself
    state = host.lying(path, ABSENT).drift
    assert (state.knob, state.reason, state.configured_by) == (path, "not there", path)


@pytest.mark.parametrize(
    ("path", "restart", "slice_stopped"),
    [
        ("/opt/edgellm/models", False, False),
        (layout.API_KEYS, False, False),
        (SERVICE, True, False),
        (SOCKET, True, False),
        (SLICE, True, True),
        ("server.env", True, False),
        ("entrypoint.sh", True, False),
    ],
)
def test_what_the_process_read_at_its_start_needs_a_restart(
    host: RolledOut, path: str, restart: bool, slice_stopped: bool
) -> None:
    path = path if path.startswith("/") else in_release(host, path)
    states = host.lying(path, owner="edgellm").states.values()
    assert needs_restart(states) is restart
    assert needs_slice_stopped(states) is slice_stopped


def test_a_unit_that_was_edited_and_reloaded_tells_the_limits_that_follow(host: RolledOut) -> None:
    limit = replace(host.effective.processes[0].nofile, soft=2000, hard=2000)  # type: ignore[type-var]
    state = host.lying(SERVICE, sha256=OTHER).running(nofile=limit).drift
    assert (state.knob, state.reason) == (SERVICE, "other content; hence nofile 2000")


def test_a_unit_that_was_edited_and_not_reloaded_is_told_once(host: RolledOut) -> None:
    for unit in (SERVICE, SLICE):
        changed = host.lying(unit, sha256=OTHER).served(needs_daemon_reload=True)
        assert changed.drift.knob == unit
    changed = host.lying(SOCKET, sha256=OTHER).served(needs_daemon_reload=True, socket_stale=True)
    assert changed.drift.knob == SOCKET


def test_an_entrypoint_that_was_edited_tells_the_policy_that_follows(host: RolledOut) -> None:
    path = in_release(host, "entrypoint.sh")
    state = host.lying(path, sha256=OTHER).threaded(policy="other").drift
    assert (state.knob, state.reason) == (path, "other content; hence scheduling other")


def test_a_release_whose_socket_unit_was_edited_is_told_once(host: RolledOut) -> None:
    path = in_release(host, "edgellm.socket")
    assert host.lying(path, sha256=OTHER).served(socket_stale=True).drift.knob == path


def test_a_slice_whose_file_is_gone_tells_the_share_that_follows(host: RolledOut) -> None:
    # systemd leaves the cores as they were, and puts the weight back
    changed = host.lying(SLICE, ABSENT).served(needs_daemon_reload=False)
    state = changed.sliced(allowed_cpus=None, cpu_weight_set=None, cpu_weight=100).drift
    assert (state.knob, state.reason) == (SLICE, "not there; hence cpu_weight 100")
    assert changed.states["allowed_cpus"].verdict is Verdict.IN_ORDER


def test_a_slice_whose_file_was_edited_tells_the_cores_that_follow(host: RolledOut) -> None:
    every = host.observed.profile.cpus_online
    changed = host.lying(SLICE, sha256=OTHER).threaded(cpus=every)
    state = changed.sliced(allowed_cpus=every, effective_cpus=every).drift
    assert (state.knob, state.reason) == (SLICE, "other content; hence cpus 0-7, allowed_cpus 0-7")


def test_limits_of_login_users_are_named_as_such(host: RolledOut) -> None:
    state = host.lying(layout.LIMITS_CONF, sha256=OTHER).drift
    assert (state.knob, state.reason) == ("login_limits", "other content")
    assert state.configured_by == layout.LIMITS_CONF
    assert not needs_restart(host.lying(layout.LIMITS_CONF, sha256=OTHER).states.values())


@pytest.mark.parametrize("knob", ["model", "runtime"])
def test_rotten_bytes_are_told_by_the_artifact_and_not_by_the_process_that_maps_them(
    host: RolledOut, knob: str
) -> None:
    path = host.desired.model_path if knob == "model" else host.desired.runtime_directory
    assert path is not None
    rotten = host.found(whole={**host.observed.whole, path: False})
    assert rotten.drift.knob == knob
    assert rotten.served(runs_replaced_files=True).drift.knob == knob
    assert (rotten.drift.desired, rotten.drift.effective) == (path, "not whole")
    assert needs_restart(rotten.states.values())
    assert not needs_slice_stopped(rotten.states.values())


def test_a_path_or_an_artifact_that_was_not_read_is_unknown(host: RolledOut) -> None:
    states = host.found(whole={}).states
    assert states["model"].verdict is Verdict.UNKNOWN
    assert states["runtime"].verdict is Verdict.UNKNOWN
    for path in all_paths():
        paths = {place: state for place, state in host.observed.paths.items() if place != path}
        state = host.found(paths=paths).states[path]
        assert (state.verdict, state.reason) == (Verdict.UNKNOWN, f"{path} was not read")


def test_a_file_of_secrets_is_told_without_its_digest() -> None:
    settings = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}
    keyed = rolled_out(Case(settings={**settings, "upstream_key_env": "UPSTREAM_KEY"}))
    path = f"{layout.CONFIG_DIR}/upstream.key"
    other = replace(keyed.observed.paths[path], sha256=OTHER)
    changed = keyed.found(paths={**keyed.observed.paths, path: other})
    state = changed.drift
    assert (state.knob, state.reason) == (path, "other content")
    assert state.desired == state.effective == "file 0640 root:edgellm"
    unit = f"{layout.UNIT_DIR}/edgellm.service"
    assert str(keyed.states[unit].desired).startswith("file 0644 root:root ")


def test_the_model_of_another_server_is_none_of_our_knobs() -> None:
    settings = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}
    assert "model" not in rolled_out(Case(settings=settings)).states


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (None, "not read"),
        (ABSENT, "not there"),
        (PathState(kind="directory", mode="0755"), "a directory, not a file"),
        (PathState(kind="link", target="/dev/null"), "a link to /dev/null, not a file"),
        (PathState(kind="other"), "no file, not a file"),
        (
            PathState(kind="file", mode="0600", owner="me", group="root", sha256=OTHER),
            "owner me, not root; mode 0600, not 0644; other content",
        ),
        (PathState(kind="file", mode="0644", owner="root", group="root", sha256="cd"), None),
    ],
)
def test_faults_of_a_file_name_what_is_there(found: PathState | None, fault: str | None) -> None:
    wanted = PathState(kind="file", mode="0644", owner="root", group="root", sha256="cd")
    assert path_fault(found, wanted) == fault
