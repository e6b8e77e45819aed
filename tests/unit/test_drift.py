"""compare: a host in order is in order on every board, and one cause is one knob."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.drift import (
    Verdict,
    changes_of,
    compare,
    drifted,
    drifted_before,
    faults_of_proof,
    is_first_installation,
    needs_restart,
    needs_slice_stopped,
)
from edgellm.hardware import HostProfile
from edgellm.observed import ObservedState, PathState
from tests.rolled_out import ABSENT, BOARDS, Case, RolledOut, board, rolled_out

FORWARD = {
    "engine": "forward",
    "upstream_url": "http://[::1]:8080/v1",
    "upstream_unit": "llama-server.service",
    "upstream_key_env": "UPSTREAM_KEY",
}
REALTIME = {"scheduling": "fifo", "scheduling_priority": 10, "allow_realtime": True}
NO_CONTROLLERS = {"version": 2, "controllers": ()}


def with_cgroup(name: str, **changes: Any) -> dict[str, Any]:
    return {"cgroup": replace(board(name).cgroup, **changes)}


VARIANTS = {
    **{name: Case(board=name) for name in BOARDS},
    **{
        f"{name}, {what}": Case(board=name, settings=settings)
        for name in BOARDS
        for what, settings in (
            ("reserved", {"reserve_cpus": True}),
            ("forwarding", FORWARD),
            ("realtime", REALTIME),
            ("no zram, no numa", {"zram": "off", "numa": "off", "swappiness": 0}),
            ("two workers", {"workers": 2, "cpu_governor": "performance", "mlock": False}),
        )
    },
    **{f"{name}, keys": Case(board=name, api_keys=True) for name in BOARDS},
    "governor": Case(board="rk3588", settings={"cpu_governor": "performance"}),
    "a later sysctl file": Case(
        board="n100", profile={"swappiness_files": ("/etc/sysctl.d/99-local.conf",)}
    ),
    "zram by our own unit": Case(board="raspberry-pi-4"),
    "zram by zram-generator": Case(
        board="raspberry-pi-4", profile={"zram_devices": ()}, tools={"zram_generator": True}
    ),
    "zram of another manager": Case(board="raspberry-pi-5-trixie"),
    "nothing installed, no chrt": Case(
        board="raspberry-pi-4",
        tools={"chrt": False, "package_manager": None},
        settings={"install_packages": False},
    ),
    "packages installed": Case(
        board="epyc-7313-2-nodes",
        tools={"numactl": False, "numactl_works": False, "libgomp": False, "libstdcxx": False},
    ),
    "cgroup v1": Case(
        board="i5-8250u", profile=with_cgroup("i5-8250u", version=1, controllers=("cpu", "memory"))
    ),
    "no controllers": Case(board="rk3588", profile=with_cgroup("rk3588", controllers=())),
    "container": Case(board="podman-container"),
    "one core": Case(board="rk3588", settings={"cpus": "4", "threads": 1}),
}


def bad(states: tuple[Any, ...]) -> list[tuple[str, str | None]]:
    return [(s.knob, s.reason) for s in states if s.verdict in (Verdict.DRIFTED, Verdict.UNKNOWN)]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_host_in_order_has_no_knob_that_needs_somebody(name: str) -> None:
    host = rolled_out(VARIANTS[name])
    states = compare(host.desired, host.observed)
    assert bad(states) == []
    assert len({state.knob for state in states}) == len(states)
    assert all(s.reason for s in states if s.verdict is not Verdict.IN_ORDER)
    assert all(s.reason is None for s in states if s.verdict is Verdict.IN_ORDER)
    assert (needs_restart(states), needs_slice_stopped(states)) == (False, False)
    assert faults_of_proof(states) == ()
    assert drifted_before(host.desired, host.observed) == ()


def test_the_variants_have_what_they_are_for() -> None:
    def plan(name: str) -> Any:
        return rolled_out(VARIANTS[name]).plan

    assert plan("rk3588, reserved").reserved_cpus is not None
    assert plan("i5-8250u, realtime").scheduling.is_realtime
    assert plan("governor").cpu_governor == "performance"
    assert plan("a later sysctl file").sysctl_name == "zz-edgellm.conf"
    assert plan("zram by our own unit").zram.manager == "own-unit"
    assert plan("zram by zram-generator").zram.manager == "zram-generator"
    assert plan("zram of another manager").zram.manager == "adopted"
    assert plan("container").swappiness is None
    assert plan("kunpeng-920").workers == 2
    assert plan("cgroup v1").affinity is not None
    assert not plan("nothing installed, no chrt").use_chrt


# The whole host, as an OS update leaves it


def updated(host: RolledOut, **changes: Any) -> HostProfile:
    """What an update makes of the profile; the record of the last roll-out stays."""
    return replace(host.observed.profile, **changes)


def with_kernel(host: RolledOut, release: str, **changes: Any) -> HostProfile:
    profile = host.observed.profile
    return updated(host, kernel=replace(profile.kernel, release=release, **changes))


def with_tools(host: RolledOut, **changes: Any) -> HostProfile:
    return updated(host, tools=replace(host.observed.profile.tools, **changes))


def test_another_kernel_alone_is_a_note() -> None:
    host = rolled_out(Case())
    host = host.become(with_kernel(host, "6.12.3"))
    assert drifted(host.states.values()) == ()
    state = host.states["host"]
    assert state.verdict is Verdict.IN_ORDER
    assert state.reason is not None
    assert state.reason.endswith("-> 6.12.3")
    assert state.reason.startswith("kernel ")
    assert state.configured_by == layout.RECORDED
    assert changes_of(host.observed.profile) == (state.reason,)


def test_a_lost_record_is_a_note() -> None:
    host = rolled_out(Case())
    host = host.become(updated(host, recorded=None))
    assert drifted(host.states.values()) == ()
    assert host.states["host"].reason == "no record of a verified roll-out: the next one leaves it"


def test_another_minor_python_is_told_by_the_runtime_alone() -> None:
    host = rolled_out(Case())
    profile = with_tools(host, python_version=(3, 13, 5))
    host = host.become(profile)
    whole = {**host.observed.whole, host.desired.runtime_directory: False}
    host = host.found(whole=whole).running(program="/usr/bin/python3.11 (deleted)")
    state = host.drift
    assert state.knob == "runtime"
    assert state.reason == (
        "Python 3.11 -> 3.13: it has not run under this one yet; "
        "hence program /usr/bin/python3.11 (deleted)"
    )
    assert host.states["host"].reason == "Python 3.11.2 -> 3.13.5"
    assert drifted_before(host.desired, host.observed) == ("runtime",)
    assert needs_restart(host.states.values())


def test_a_python_of_the_same_minor_that_was_replaced_is_told_by_the_process() -> None:
    host = rolled_out(Case())
    host = host.become(with_tools(host, python_version=(3, 11, 9)))
    host = host.running(program="/usr/bin/python3.11 (deleted)")
    assert host.drift.knob == "program"
    assert needs_restart(host.states.values())
    assert not needs_slice_stopped(host.states.values())


def test_a_kernel_without_zram_is_told_by_zram_and_swappiness_goes_with_it() -> None:
    host = rolled_out(Case(board="raspberry-pi-4", profile={"swaps": ()}))
    assert host.plan.swappiness == 100
    profile = with_kernel(host, "6.12.3", zram_module=False)
    host = host.become(replace(profile, swaps=(), zram_devices=()))
    host = host.in_force(zram_swaps=(), zram_device=None)
    assert host.plan.zram.manager == "none"
    assert host.plan.swappiness == 10
    state = host.drift
    assert state.knob == "zram"
    assert state.reason is not None
    assert "of an earlier plan, not wanted by this one" in state.reason
    assert "kernel 6.12.3 has no zram module" in state.reason
    assert state.reason.endswith("hence swappiness 100")
    assert not needs_restart(host.states.values())


def test_a_kernel_that_has_zram_again_is_told_by_zram_as_well() -> None:
    kernel = replace(board("raspberry-pi-4").kernel, zram_module=False)
    host = rolled_out(Case(board="raspberry-pi-4", profile={"swaps": (), "kernel": kernel}))
    assert host.plan.swappiness == 10
    host = host.become(with_kernel(host, "6.12.3", zram_module=True))
    state = host.drift
    assert state.knob == "zram"
    assert state.reason is not None
    assert "edgellm-zram.service: not there" in state.reason
    assert state.reason.endswith("hence swappiness 10")


def test_cgroup_v2_after_v1_is_another_release() -> None:
    host = rolled_out(VARIANTS["cgroup v1"])
    before = host.desired.release_id
    cgroup = replace(board("i5-8250u").cgroup, version=2, controllers=("cpu", "cpuset", "memory"))
    host = host.become(updated(host, cgroup=cgroup))
    assert host.desired.release_id != before
    state = host.drift
    assert state.knob == "release"
    assert state.reason is not None
    assert state.reason.startswith("another release is due: cgroup v1 -> v2; hence ")
    assert "/etc/systemd/system/edgellm.slice" in state.reason
    assert drifted_before(host.desired, host.observed) == ("release",)


@pytest.mark.parametrize("reserve", [False, True])
def test_a_core_that_is_off_line_is_another_release(reserve: bool) -> None:
    host = rolled_out(Case(settings={"reserve_cpus": reserve}))
    profile = host.observed.profile
    gone = CpuSet.of([host.plan.cpus.cpus[-1]])
    online = profile.cpus_online - gone
    clusters = tuple(replace(c, cpus=c.cpus & online) for c in profile.clusters)
    nodes = tuple(replace(n, cpus=n.cpus & online) for n in profile.numa_nodes)
    cgroup = replace(profile.cgroup, effective_cpus=online)
    host = host.become(
        updated(host, cpus_online=online, clusters=clusters, numa_nodes=nodes, cgroup=cgroup)
    )
    host = host.in_force(cpus_online=online).sliced(effective_cpus=host.plan.cpus)
    state = host.drift
    assert state.knob == "release"
    assert state.reason is not None
    assert state.reason.startswith(f"another release is due: CPUs 0-7 -> {online}; hence ")
    assert ("reserved_cpus of system.slice" in state.reason) is False


def test_a_package_that_was_removed_is_told_by_its_name() -> None:
    host = rolled_out(Case(board="kunpeng-920"))
    for tools, name in (
        ({"libgomp": False}, "libgomp"),
        ({"numactl": False, "numactl_works": False}, "numactl"),
    ):
        state = host.become(with_tools(host, **tools)).drift
        assert state.knob == "packages"
        assert state.reason is not None
        assert state.reason.startswith(f"{name} missing: ")
        assert state.reason.endswith(" to install")


def test_a_package_that_cannot_be_installed_is_left_alone_with_the_reason() -> None:
    host = rolled_out(Case(settings={"install_packages": False}))
    state = host.become(with_tools(host, libgomp=False)).states["packages"]
    assert state.verdict is Verdict.LEFT_ALONE
    assert state.reason == "libgomp missing, not installed: install_packages is off"


# The account


def test_an_account_that_is_gone_is_told_once_with_the_files_it_leaves_to_nobody() -> None:
    host = rolled_out(Case(api_keys=True)).in_force(account=None)
    host = host.lying(layout.API_KEYS, group="995").lying(layout.STATE_DIR, owner="997")
    state = host.drift
    assert (state.knob, state.effective) == ("account", "none")
    assert state.reason == f"no account edgellm; hence {layout.API_KEYS}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shell": "/bin/bash"}, "shell /bin/bash, not /usr/sbin/nologin"),
        ({"home": "/home/edgellm"}, "home /home/edgellm, not /var/lib/edgellm"),
        ({"group": "users"}, "group users, not edgellm"),
        ({"comment": "me"}, "comment me, not edgellm server"),
    ],
)
def test_an_account_that_was_changed_is_told_by_what_it_is_now(
    change: dict[str, str], reason: str
) -> None:
    host = rolled_out(Case())
    account = host.effective.account
    assert account is not None
    state = host.in_force(account=replace(account, **change)).drift
    assert (state.knob, state.reason) == ("account", reason)


@pytest.mark.parametrize(
    ("home", "reason"),
    [
        (PathState(kind="directory", mode="0755", owner="root", group="root"), "is of root:root"),
        (
            PathState(kind="directory", mode="0755", owner="edgellm", group="root"),
            "is of edgellm:root",
        ),
        (PathState(kind="link", target="/tmp"), "is no directory"),
        (ABSENT, "is not there"),
    ],
)
def test_a_home_of_somebody_else_is_the_accounts(home: PathState, reason: str) -> None:
    state = rolled_out(Case()).lying(layout.STATE_DIR, home).drift
    assert (state.knob, state.reason) == ("account", f"{layout.STATE_DIR} {reason}")


def test_an_account_made_anew_is_told_by_the_process_that_has_the_old_one() -> None:
    host = rolled_out(Case(api_keys=True))
    account = host.effective.account
    assert account is not None
    host = host.in_force(account=replace(account, uid=1001))
    host = host.lying(layout.STATE_DIR, owner="997", group="995")
    host = host.lying(layout.API_KEYS, group="995")
    state = host.drift
    assert (state.knob, state.desired, state.effective) == ("user", "1001", "997")
    assert state.reason == (
        "it runs as 997: the account edgellm is 1001, made anew since it started; "
        f"hence account, {layout.API_KEYS}"
    )
    assert needs_restart(host.states.values())


# First installations, new releases, and what is said of a run


def nothing_there(host: RolledOut) -> ObservedState:
    return replace(
        host.observed,
        profile=replace(host.observed.profile, recorded=None),
        paths=dict.fromkeys(host.observed.paths, ABSENT),
        whole=dict.fromkeys(host.observed.whole, False),
        service=replace(
            host.service,
            active=False,
            enabled=False,
            socket_active=False,
            socket_enabled=False,
            running_release=None,
            current_release=None,
        ),
        effective=replace(host.effective, account=None, main_pid=None, processes=()),
    )


def test_what_a_first_installation_finds_has_not_drifted() -> None:
    host = rolled_out(Case(api_keys=True))
    observed = nothing_there(host)
    assert is_first_installation(observed)
    assert drifted_before(host.desired, observed) == ()
    names = drifted(compare(host.desired, observed))
    assert "release" in names
    assert "service" not in names  # hence from the release
    assert not is_first_installation(host.observed)


def test_a_host_that_lost_its_link_and_its_record_is_no_first_installation() -> None:
    host = rolled_out(Case())
    lost = replace(host.observed, profile=replace(host.observed.profile, recorded=None))
    for change in ({"current_release": None}, {"running_release": None}):
        assert not is_first_installation(replace(lost, service=replace(host.service, **change)))


def test_a_knob_in_order_names_what_configures_it() -> None:
    states = rolled_out(Case(board="raspberry-pi-4")).states
    for knob, configured, by in (
        ("nofile", "65536", f"{layout.UNIT_DIR}/edgellm.service"),
        ("cpu_weight", "1000", f"{layout.UNIT_DIR}/edgellm.slice"),
        ("allowed_cpus", "1-3", f"{layout.UNIT_DIR}/edgellm.slice"),
        ("scheduling", "batch", f"{layout.CURRENT}/entrypoint.sh"),
        ("zram", "925 MiB any priority 100", layout.ZRAM_UNIT),
    ):
        assert (states[knob].configured, states[knob].configured_by) == (configured, by)
    assert states["zram"].effective == "zram1 925 MiB lzo-rle priority 100"
    assert (states["packages"].configured, states["numa"].effective) == (None, None)


def test_a_record_without_a_python_tells_no_update() -> None:
    host = rolled_out(Case())
    recorded = host.observed.profile.recorded
    assert recorded is not None
    host = host.become(updated(host, recorded=replace(recorded, python="")))
    host = host.found(whole={**host.observed.whole, host.desired.runtime_directory: False})
    assert host.drift.reason == "not the files, bytes, modes or owners that were verified"


def test_a_release_that_the_operator_has_changed_has_not_drifted() -> None:
    host = rolled_out(Case(api_keys=True))
    other = rolled_out(Case(api_keys=True, settings={"threads": 2, "nofile": 4096}))
    observed = replace(other.observed, paths={**host.observed.paths, **other.observed.paths})
    for path in host.desired.release.paths:
        if path.startswith(host.desired.release_directory):
            observed = replace(observed, paths={**observed.paths, path: ABSENT})
    assert "release" in drifted(compare(host.desired, observed))
    assert drifted_before(host.desired, observed) == ("login_limits",)
    moved = replace(observed, effective=replace(host.effective, swappiness=60))
    assert drifted_before(host.desired, moved) == ("swappiness", "login_limits")


def test_drifts_before_a_run_are_those_of_the_comparison() -> None:
    host = rolled_out(Case()).lying(layout.LIMITS_CONF, sha256="ab" * 32)
    assert drifted_before(host.desired, host.observed) == ("login_limits",)


def test_a_server_that_is_not_placed_as_planned_is_no_proof() -> None:
    host = rolled_out(Case())
    (fault,) = faults_of_proof(host.threaded(policy="other").states.values())
    assert fault.startswith("scheduling: 3 of 3 threads, such as python3 (812), run as other")
    (fault,) = faults_of_proof(host.threaded(0, cpus=CpuSet.of([0])).states.values())
    assert fault.startswith("cpus: 1 of 3 threads, such as python3 (812), may run on 0, not 4-7")
    assert faults_of_proof(host.in_force(swappiness=60).states.values()) == ()


def test_without_the_effective_state_that_is_said_once() -> None:
    host = rolled_out(Case()).found(effective=None)
    states = [s for s in host.states.values() if s.verdict is not Verdict.IN_ORDER]
    assert [(s.knob, s.verdict) for s in states] == [("effective state", Verdict.UNKNOWN)]
