"""swappiness, zram, the clock's governor and the cores kept for the server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.drift import Verdict, needs_restart
from edgellm.observed import SysctlLine, ZramSwap
from tests.rolled_out import ABSENT, MIB, Case, RolledOut, board, rolled_out

LATER = "/etc/sysctl.d/99-vendor.conf"
OTHER = "ab" * 32
RESERVED = layout.drop_in_path("system.slice")


@pytest.fixture
def host() -> RolledOut:
    return rolled_out(Case())


@pytest.fixture
def zram() -> RolledOut:
    return rolled_out(Case(board="raspberry-pi-4"))


@pytest.fixture
def reserved() -> RolledOut:
    return rolled_out(Case(settings={"reserve_cpus": True}))


def with_line(host: RolledOut, path: str, value: int | None) -> RolledOut:
    """As a file that sets it too is read: the last line wins."""
    lines = [line for line in host.effective.swappiness_lines if line.path != path]
    lines.append(SysctlLine(path=path, value=value))
    lines.sort(key=lambda line: line.path.rpartition("/")[2])
    return host.in_force(swappiness_lines=tuple(lines))


# swappiness


def test_a_swappiness_that_was_reverted_is_named(host: RolledOut) -> None:
    changed = host.in_force(swappiness=60)
    state = changed.drift
    assert (state.knob, state.desired, state.configured, state.effective) == (
        "swappiness",
        "100",
        "100",
        "60",
    )
    assert (state.configured_by, state.reason) == (layout.SYSCTL_CONF, "60 now")
    assert not needs_restart(changed.states.values())


@pytest.mark.parametrize("now", [100, 60])
def test_a_new_file_that_wins_over_ours_is_named(host: RolledOut, now: int) -> None:
    # The plan answers with a file of a later name
    profile = replace(host.observed.profile, swappiness_files=(LATER,))
    changed = with_line(host.become(profile), LATER, 60).in_force(swappiness=now)
    state = changed.drift
    assert (state.knob, state.configured, state.configured_by) == ("swappiness", "60", LATER)
    assert state.reason is not None
    assert state.reason.startswith(f"{LATER} wins with 60; {layout.SYSCTL_CONF_LAST}: not there; ")
    assert state.reason.endswith("60 now") is (now == 60)


def test_a_file_that_no_name_of_ours_can_follow_is_no_drift(host: RolledOut) -> None:
    path = "/etc/sysctl.d/zzz-local.conf"
    profile = replace(host.observed.profile, swappiness_files=(path,))
    changed = with_line(host.become(profile), path, 60)
    state = changed.states["swappiness"]
    assert (state.verdict, state.configured_by) == (Verdict.LIMITED, path)
    assert state.reason == f"{path} sets 60 again at boot, after ours: remove it"
    assert with_line(changed, path, 100).states["swappiness"].verdict is Verdict.IN_ORDER
    left_out = with_line(changed, path, None).states["swappiness"]
    assert left_out.reason == f"{path} sets nothing again at boot, after ours: remove it"


def test_a_sysctl_file_of_ours_that_was_edited_or_removed_is_named(host: RolledOut) -> None:
    edited = with_line(host.lying(layout.SYSCTL_CONF, sha256=OTHER), layout.SYSCTL_CONF, 30).drift
    assert (edited.knob, edited.configured) == ("swappiness", "30")
    assert edited.reason == f"{layout.SYSCTL_CONF}: other content"
    lines = tuple(x for x in host.effective.swappiness_lines if x.path != layout.SYSCTL_CONF)
    gone = host.lying(layout.SYSCTL_CONF, ABSENT).in_force(swappiness_lines=lines).drift
    assert gone.reason is not None
    assert gone.reason.endswith(f"{layout.SYSCTL_CONF}: not there")


def test_a_copy_of_proc_sys_is_no_drift(host: RolledOut) -> None:
    state = host.in_force(swappiness_of_kernel=False).states["swappiness"]
    assert state.verdict is Verdict.LIMITED
    assert state.reason is not None
    assert "a copy" in state.reason


def test_swappiness_in_a_container_is_left_alone() -> None:
    host = rolled_out(Case(board="podman-container"))
    state = host.in_force(swappiness=None).states["swappiness"]
    assert state.verdict is Verdict.LEFT_ALONE
    conf = host.lying(
        layout.SYSCTL_CONF, rolled_out(Case()).observed.paths[layout.SYSCTL_CONF]
    ).drift
    assert (conf.knob, conf.reason) == (
        "swappiness",
        f"{layout.SYSCTL_CONF}: of an earlier plan, not wanted by this one",
    )


# zram


def other(host: RolledOut, **changes: Any) -> tuple[ZramSwap, ...]:
    return tuple(
        replace(swap, **changes) if swap.device == host.effective.zram_device else swap
        for swap in host.effective.zram_swaps
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"priority": -2}, "priority -2, not 100"),
        ({"size_bytes": 512 * MIB}, "512 MiB, not 925 MiB"),
        ({"size_bytes": None}, "? MiB, not 925 MiB"),
    ],
)
def test_a_zram_swap_that_is_another_is_named(
    zram: RolledOut, changes: dict[str, Any], reason: str
) -> None:
    state = zram.in_force(zram_swaps=other(zram, **changes)).drift
    assert (state.knob, state.reason) == ("zram", reason)


def test_a_compressor_is_compared_where_one_is_planned(zram: RolledOut) -> None:
    plan = replace(zram.plan, zram=replace(zram.plan.zram, algorithm="zstd"))
    planned = replace(zram, desired=replace(zram.desired, plan=plan))
    assert planned.drift.reason == "lzo-rle, not zstd"
    assert zram.states["zram"].desired == "925 MiB any priority 100"


def test_a_zram_swap_that_is_off_is_named(zram: RolledOut) -> None:
    state = zram.in_force(zram_swaps=()).drift
    assert (state.knob, state.effective, state.reason) == ("zram", "none", "not on")
    state = zram.in_force(zram_swaps=(), zram_device=None).drift
    assert (state.knob, state.reason) == ("zram", "not on")
    state = zram.in_force(zram_device=None).drift
    assert state.reason == "it has noted no device, so none of these is known as ours"


def test_a_zram_unit_that_is_disabled_edited_or_gone_is_named(zram: RolledOut) -> None:
    disabled = zram.in_force(zram_unit_enabled=False)
    assert disabled.drift.reason == "its unit is not enabled"
    edited = zram.lying(layout.ZRAM_UNIT, sha256=OTHER).drift
    assert (edited.knob, edited.reason) == ("zram", f"{layout.ZRAM_UNIT}: other content")
    gone = zram.lying(layout.ZRAM_UNIT, ABSENT).in_force(zram_unit_enabled=False).drift
    assert (gone.knob, gone.configured_by) == ("zram", layout.ZRAM_UNIT)


def test_a_zram_swap_of_the_generator_is_zram0() -> None:
    host = rolled_out(
        Case(
            board="raspberry-pi-4",
            profile={"zram_devices": ()},
            tools={"zram_generator": True},
        )
    )
    assert host.states["zram"].configured_by == layout.ZRAM_GENERATOR_CONF
    swaps = tuple(replace(swap, device="zram3") for swap in host.effective.zram_swaps)
    assert host.in_force(zram_swaps=swaps).drift.reason == "not on"


def test_zram_of_another_manager_is_left_alone_whatever_it_does() -> None:
    host = rolled_out(Case(board="raspberry-pi-5-trixie"))
    for swaps in (host.effective.zram_swaps, ()):
        state = host.in_force(zram_swaps=swaps).states["zram"]
        assert state.verdict is Verdict.LEFT_ALONE


# The clock's governor


def test_another_governor_is_named() -> None:
    host = rolled_out(Case(settings={"cpu_governor": "performance"}))
    state = host.in_force(governors=("ondemand", "performance")).drift
    assert (state.knob, state.desired, state.reason) == (
        "cpu_governor",
        "performance",
        "ondemand, performance now",
    )
    gone = host.lying(layout.GOVERNOR_CONF, ABSENT).drift
    assert (gone.knob, gone.reason) == ("cpu_governor", f"{layout.GOVERNOR_CONF}: not there")
    mute = host.in_force(governors=()).states["cpu_governor"]
    assert (mute.verdict, mute.reason) == (Verdict.UNKNOWN, "no governor could be read")


def test_a_governor_that_nobody_asked_for_is_left_alone(host: RolledOut) -> None:
    for governors in (("powersave",), ()):
        state = host.in_force(governors=governors).states["cpu_governor"]
        assert state.verdict is Verdict.LEFT_ALONE


# Cores kept for the server


def test_a_reservation_whose_file_is_gone_is_named(reserved: RolledOut) -> None:
    every = reserved.observed.profile.cpus_online
    undone = reserved.lying(RESERVED, ABSENT).sliced(
        "system.slice", allowed_cpus=None, effective_cpus=every
    )
    state = undone.drift
    assert (state.knob, state.desired, state.effective, state.reason) == (
        "reserved_cpus of system.slice",
        "0-3",
        "0-7",
        f"{RESERVED}: not there",
    )
    assert not needs_restart(undone.states.values())


def test_a_reservation_that_was_undone_in_the_kernel_is_named(reserved: RolledOut) -> None:
    every = reserved.observed.profile.cpus_online
    state = reserved.sliced("user.slice", effective_cpus=every).drift
    assert (state.knob, state.reason) == (
        "reserved_cpus of user.slice",
        "0-7 in the kernel, 0-3 set in systemd",
    )
    state = reserved.sliced("user.slice", effective_cpus=every, allowed_cpus=every).drift
    assert state.reason == "0-7 in the kernel, 0-7 set in systemd"


def test_a_reservation_that_systemd_does_not_know_is_named(reserved: RolledOut) -> None:
    state = reserved.sliced("system.slice", allowed_cpus=None).drift
    assert state.reason == "systemd has not read its drop-in"
    others = reserved.sliced("system.slice", allowed_cpus=CpuSet.parse("0-7"))
    state = others.states["reserved_cpus of system.slice"]
    assert (state.verdict, state.configured) == (Verdict.LIMITED, "0-7")


def test_a_slice_that_is_not_active_cannot_have_its_cores_now(reserved: RolledOut) -> None:
    state = reserved.sliced("user.slice", effective_cpus=None).states["reserved_cpus of user.slice"]
    assert (state.verdict, state.configured) == (Verdict.LIMITED, "0-3")


def test_a_reservation_of_an_earlier_plan_is_named(host: RolledOut, reserved: RolledOut) -> None:
    state = host.lying(RESERVED, reserved.observed.paths[RESERVED]).drift
    assert (state.knob, state.desired, state.reason) == (
        "reserved_cpus of system.slice",
        None,
        f"{RESERVED}: of an earlier plan, not wanted by this one",
    )


@pytest.mark.parametrize(
    ("path", "knob", "case"),
    [
        (layout.SYSCTL_CONF, "swappiness", Case()),
        (layout.ZRAM_UNIT, "zram", Case(board="raspberry-pi-4")),
        (layout.ZRAM_UNIT, "zram", Case()),
        (layout.GOVERNOR_CONF, "cpu_governor", Case(settings={"cpu_governor": "performance"})),
        (RESERVED, "reserved_cpus of system.slice", Case(settings={"reserve_cpus": True})),
        (RESERVED, "reserved_cpus of system.slice", Case()),
        (layout.STATE_DIR, "account", Case()),
        (layout.LIMITS_CONF, "login_limits", Case()),
    ],
)
def test_a_file_that_was_not_read_makes_its_knob_unknown(path: str, knob: str, case: Case) -> None:
    host = rolled_out(case)
    paths = {place: state for place, state in host.observed.paths.items() if place != path}
    state = host.found(paths=paths).states[knob]
    assert state.verdict is Verdict.UNKNOWN
    assert state.reason is not None
    assert state.reason.startswith(f"{path} was not read")


def test_boards_of_these_tests_are_what_they_seem() -> None:
    assert board("raspberry-pi-4").mem_total_bytes < 2 << 30
