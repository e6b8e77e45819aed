"""The running process, its threads and its slice against the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgellm.cpuset import CpuSet
from edgellm.drift import (
    Verdict,
    needs_restart,
    needs_slice_stopped,
    process_states,
    removable_drop_ins,
)
from edgellm.observed import NodePages, ResourceLimit
from tests.rolled_out import Case, RolledOut, board, rolled_out

REALTIME = {"scheduling": "fifo", "scheduling_priority": 10, "allow_realtime": True}
BY_HAND = "/run/systemd/system.control/edgellm.slice.d/50-AllowedCPUs.conf"
UNIT_DROP_IN = "/etc/systemd/system/edgellm.service.d/override.conf"
ALL = CpuSet.parse("0-7")


@pytest.fixture
def host() -> RolledOut:
    return rolled_out(Case())


@pytest.fixture
def two_nodes() -> RolledOut:
    return rolled_out(Case(board="kunpeng-920"))


def without_controllers() -> RolledOut:
    cgroup = replace(board("rk3588").cgroup, controllers=())
    return rolled_out(Case(profile={"cgroup": cgroup}))


def a_restart_mends(host: RolledOut) -> bool:
    """By a restart alone: the slice may keep running."""
    states = host.states.values()
    assert needs_restart(states)
    # What the operation asks, which has the states of the process alone
    assert needs_restart(process_states(host.plan, host.effective))
    return not needs_slice_stopped(states)


# Threads


def test_one_thread_with_another_policy_is_named(host: RolledOut) -> None:
    changed = host.threaded(1, policy="fifo", priority=1)
    state = changed.drift
    assert (state.knob, state.desired, state.effective) == (
        "scheduling",
        "batch",
        "batch x 2, fifo 1 x 1",
    )
    assert state.reason == "1 of 3 threads, such as engine-1 (813), run as fifo 1, not batch"
    assert a_restart_mends(changed)


def test_one_thread_on_other_cpus_is_named(host: RolledOut) -> None:
    changed = host.threaded(2, cpus=CpuSet.of([4]))
    state = changed.drift
    assert (state.knob, state.effective) == ("cpus", "4-7 x 2, 4 x 1")
    assert state.reason == "1 of 3 threads, such as engine-2 (814), may run on 4, not 4-7"
    assert a_restart_mends(changed)


def test_a_server_without_a_cpuset_that_somebody_has_let_off_its_cpus_is_named() -> None:
    host = without_controllers()
    assert host.plan.affinity is not None
    changed = host.threaded(cpus=ALL)
    assert changed.drift.knob == "cpus"
    assert a_restart_mends(changed)


def test_cpus_that_are_not_there_count_for_nothing_in_a_mask() -> None:
    host = rolled_out(Case(board="nuc-i3-5010u"))
    online = host.observed.profile.cpus_online
    assert (host.plan.cpus, host.plan.allowed_cpus) == (online, None)
    wide = host.threaded(cpus=online | CpuSet.parse("64-127"))
    assert wide.states["cpus"].verdict is Verdict.IN_ORDER
    state = wide.in_force(cpus_online=None).states["cpus"]
    assert (state.verdict, state.reason) == (Verdict.UNKNOWN, "which CPUs are on line was not read")


def test_cpus_that_a_cgroup_above_withholds_are_no_drift(host: RolledOut) -> None:
    some = CpuSet.parse("4-5")
    bound = host.threaded(cpus=some).sliced(effective_cpus=some)
    for knob in ("cpus", "allowed_cpus"):
        state = bound.states[knob]
        assert state.verdict is Verdict.LIMITED
        assert state.reason is not None
        assert "a cgroup above it" in state.reason
    assert not needs_restart(bound.states.values())


def test_a_worker_that_is_not_in_its_place_is_named(two_nodes: RolledOut) -> None:
    assert [str(part) for part in two_nodes.plan.worker_cpus] == ["1-23", "24-47"]
    first, second, third = two_nodes.effective.processes
    moved = tuple(replace(t, cpus=two_nodes.plan.cpus) for t in third.threads)
    changed = two_nodes.in_force(processes=(first, second, replace(third, threads=moved)))
    state = changed.drift
    assert (state.knob, state.reason) == ("cpus", "no worker is on 24-47")
    starting = changed.in_force(service_state="activating").states["cpus"]
    assert starting.verdict is Verdict.UNKNOWN


def test_real_time_that_was_not_confirmed_is_said() -> None:
    host = rolled_out(Case(board="i5-8250u", settings=REALTIME))
    batch = host.threaded(policy="batch", priority=0).in_force(realtime_confirmed=None)
    state = batch.drift
    assert (state.knob, state.desired, state.effective) == ("scheduling", "fifo 10", "batch")
    assert state.reason == (
        "batch: real time was not confirmed by a verified roll-out, so the server runs without it"
    )
    assert a_restart_mends(batch)


def test_real_time_that_would_end_with_the_next_start_is_said() -> None:
    host = rolled_out(Case(board="i5-8250u", settings=REALTIME))
    for confirmed in (None, "another"):
        state = host.in_force(realtime_confirmed=confirmed).drift
        assert state.knob == "scheduling"
        assert state.reason == (
            "real time is not confirmed for this release: it ends with the next start"
        )
    release = host.desired.release_id
    trial = host.in_force(realtime_confirmed=None, realtime_trial=release).states["scheduling"]
    assert trial.verdict is Verdict.IN_ORDER  # the roll-out's own proof is looked at in a trial
    assert trial.reason == "on trial: it ends by itself unless the roll-out confirms it"


# Limits


@pytest.mark.parametrize("knob", ["nofile", "memlock"])
def test_a_limit_that_prlimit_has_lowered_is_named(host: RolledOut, knob: str) -> None:
    changed = host.running(**{knob: ResourceLimit(soft=4096, hard=8192)})
    state = changed.drift
    assert (state.knob, state.effective) == (knob, "4096")
    assert state.reason == f"process 812 has 4096 (at most 8192), not {state.desired}"
    assert a_restart_mends(changed)


def test_a_limit_that_systemd_cannot_give_is_no_drift(host: RolledOut) -> None:
    cap = ResourceLimit(soft=20_000, hard=20_000)
    capped = host.running(nofile=cap).in_force(nofile_of_systemd=cap)
    state = capped.states["nofile"]
    assert (state.verdict, state.configured, state.effective) == (
        Verdict.LIMITED,
        "65536",
        "20000",
    )
    assert state.reason == "capped at 20000: systemd has no more to give on this host"
    lowered = capped.running(nofile=ResourceLimit(soft=4096, hard=20_000))
    assert lowered.drift.knob == "nofile"


def test_a_model_that_a_capped_limit_keeps_from_being_locked_is_no_drift(host: RolledOut) -> None:
    cap = ResourceLimit(soft=8 << 20, hard=8 << 20)
    capped = host.running(memlock=cap, vm_locked_bytes=0).in_force(memlock_of_systemd=cap)
    assert capped.states["memlock"].verdict is Verdict.LIMITED
    assert capped.states["mlock"].verdict is Verdict.LIMITED
    assert not needs_restart(capped.states.values())


def test_a_model_that_is_not_locked_is_named(host: RolledOut) -> None:
    changed = host.running(vm_locked_bytes=0)
    state = changed.drift
    assert (state.knob, state.effective) == ("mlock", "0 MiB locked")
    assert state.reason == "VmLck is 0: the engine could not lock the model"
    assert a_restart_mends(changed)
    loading = changed.in_force(service_state="activating").states["mlock"]
    assert loading.verdict is Verdict.UNKNOWN


def test_a_worker_that_has_not_locked_its_model_is_named(two_nodes: RolledOut) -> None:
    state = two_nodes.running(2, vm_locked_bytes=0).drift
    assert (state.knob, state.reason) == ("mlock", "VmLck is 0 in all but 1 of 2 workers")


def test_an_app_of_the_operators_own_need_not_lock_or_place_anything() -> None:
    settings = {"server_app": "main:app", "server_app_dir": "app"}
    host = rolled_out(Case(board="kunpeng-920", settings=settings))
    host = host.threaded(cpus=host.plan.cpus)
    for number in range(3):
        host = host.running(number, vm_locked_bytes=0)
    assert host.states["cpus"].verdict is Verdict.IN_ORDER
    pinned = host.threaded(1, cpus=CpuSet.of([host.plan.cpus.cpus[0]]))
    assert pinned.states["cpus"].verdict is Verdict.IN_ORDER
    assert host.threaded(1, cpus=CpuSet.of([0])).drift.knob == "cpus"
    assert host.states["mlock"].verdict is Verdict.LEFT_ALONE
    assert "server_app" in str(host.states["mlock"].reason)
    assert not needs_restart(process_states(host.plan, host.effective, own_app=True))
    assert needs_restart(process_states(host.plan, host.effective))


# Program, user, memory


def test_a_program_that_was_replaced_is_named(host: RolledOut) -> None:
    changed = host.running(program="/usr/bin/python3.11 (deleted)")
    state = changed.drift
    assert (state.knob, state.effective) == ("program", "/usr/bin/python3.11 (deleted)")
    assert state.reason == "it was replaced since it started"
    assert a_restart_mends(changed)


def test_memory_on_another_node_is_named() -> None:
    host = rolled_out(Case(board="epyc-7313-2-nodes", settings={"workers": 1}))
    assert host.plan.numa is not None
    (own,) = host.plan.numa.nodes
    pages = (
        NodePages(node=own, anonymous=60_000, file=0),
        NodePages(node=1 - own, anonymous=40_000, file=90_000),
    )
    changed = host.in_force(node_pages=pages)
    state = changed.drift
    assert (state.knob, state.reason) == ("numa", "40 % of its memory lies on other nodes")
    assert a_restart_mends(changed)
    files = tuple(
        replace(found, anonymous=found.anonymous * (found.node == own)) for found in pages
    )
    assert host.in_force(node_pages=files).states["numa"].verdict is Verdict.IN_ORDER


# The slice


def test_a_slice_that_set_property_has_opened_is_told_by_the_drop_in(host: RolledOut) -> None:
    opened = host.in_force(foreign_drop_ins=(BY_HAND,)).threaded(cpus=ALL)
    opened = opened.sliced(allowed_cpus=ALL, effective_cpus=ALL)
    state = opened.drift
    assert (state.knob, state.configured_by) == ("drop_ins", BY_HAND)
    assert state.reason == (
        f"{BY_HAND} changes what our units say; hence cpus 0-7, allowed_cpus 0-7"
    )
    assert needs_restart(opened.states.values())
    assert needs_slice_stopped(opened.states.values())


def test_a_share_that_set_property_has_changed_is_told_by_the_drop_in(host: RolledOut) -> None:
    path = BY_HAND.replace("AllowedCPUs", "CPUWeight")
    changed = host.in_force(foreign_drop_ins=(path,)).sliced(cpu_weight=10, cpu_weight_set=10)
    assert changed.drift.reason == f"{path} changes what our units say; hence cpu_weight 10"


def test_a_drop_in_of_the_service_is_told_with_what_it_changes(host: RolledOut) -> None:
    changed = host.in_force(foreign_drop_ins=(UNIT_DROP_IN,))
    changed = changed.running(nofile=ResourceLimit(soft=100, hard=100))
    assert changed.drift.reason == f"{UNIT_DROP_IN} changes what our units say; hence nofile 100"
    unread = host.in_force(foreign_drop_ins=(UNIT_DROP_IN,)).served(needs_daemon_reload=True)
    assert unread.drift.knob == "drop_ins"


def test_a_drift_that_a_drop_in_does_not_explain_has_its_own_line(host: RolledOut) -> None:
    changed = host.in_force(foreign_drop_ins=(BY_HAND,)).threaded(policy="other")
    names = {s.knob for s in changed.states.values() if s.verdict is Verdict.DRIFTED}
    assert names == {"drop_ins", "scheduling"}


def test_a_drop_in_of_a_package_stays(host: RolledOut) -> None:
    path = "/usr/lib/systemd/system/edgellm.service.d/10-vendor.conf"
    changed = host.in_force(foreign_drop_ins=(path,))
    assert changed.states["drop_ins"].verdict is Verdict.LIMITED
    assert removable_drop_ins(changed.effective) == ()
    both = changed.in_force(foreign_drop_ins=(UNIT_DROP_IN, path))
    assert removable_drop_ins(both.effective) == (UNIT_DROP_IN,)
    assert both.drift.effective == f"{UNIT_DROP_IN}, {path}"


def test_a_weight_that_was_written_into_the_cgroup_is_named(host: RolledOut) -> None:
    changed = host.sliced(cpu_weight=50)
    state = changed.drift
    assert (state.knob, state.configured, state.effective) == ("cpu_weight", "1000", "50")
    assert state.reason == "50 in the kernel, 1000 set in systemd"
    assert needs_slice_stopped(changed.states.values())


def test_cores_that_were_written_into_the_cgroup_are_named(host: RolledOut) -> None:
    changed = host.sliced(effective_cpus=CpuSet.parse("2-7"))
    state = changed.drift
    assert (state.knob, state.configured, state.effective) == ("allowed_cpus", "4-7", "2-7")
    assert needs_slice_stopped(changed.states.values())


def test_fewer_cores_that_were_written_into_the_cgroup_are_no_bound_from_above(
    host: RolledOut,
) -> None:
    some = CpuSet.parse("4-5")
    changed = host.threaded(cpus=some).sliced(effective_cpus=some, own_cpus=some)
    for knob in ("cpus", "allowed_cpus"):
        assert changed.states[knob].verdict is Verdict.DRIFTED
    assert needs_slice_stopped(changed.states.values())


def test_cores_left_in_the_cgroup_by_an_earlier_plan_are_named() -> None:
    host = rolled_out(Case(board="nuc-i3-5010u"))
    assert host.plan.allowed_cpus is None
    # systemd#43846: an AllowedCPUs= that is gone stays in the cgroup
    some = CpuSet.parse("0-1")
    left = host.sliced(effective_cpus=some, own_cpus=some)
    state = left.drift
    assert (state.knob, state.effective) == ("allowed_cpus", "0-1")
    assert state.reason == "the cgroup of edgellm.slice still has 0-1, which no plan wants"
    assert needs_slice_stopped(left.states.values())
    both = left.threaded(cpus=some).states["cpus"]
    assert both.verdict is Verdict.DRIFTED
    unset = host.sliced(effective_cpus=some).threaded(cpus=some)
    assert unset.states["allowed_cpus"].verdict is Verdict.LEFT_ALONE
    assert unset.states["cpus"].verdict is Verdict.LIMITED  # by a cgroup above it


def test_a_slice_without_its_controllers_is_no_drift(host: RolledOut) -> None:
    bare = host.sliced(effective_cpus=None, cpu_weight=None)
    for knob in ("allowed_cpus", "cpu_weight"):
        state = bare.states[knob]
        assert (state.verdict, state.effective) == (Verdict.LIMITED, None)
    assert "not active" in str(bare.states["allowed_cpus"].reason)
    v1 = bare.in_force(cgroup_version=1).states["allowed_cpus"]
    assert v1.reason == "systemd has taken it, but ignores AllowedCPUs= on cgroup v1, and beside it"


def test_a_quota_that_stops_the_server_is_said(host: RolledOut) -> None:
    state = host.in_force(nr_throttled=7).states["cpu_quota"]
    assert (state.verdict, state.effective) == (Verdict.LIMITED, "7")
    assert state.reason == "throttled 7 times: a CFS quota stops all threads at once"
    assert host.states["cpu_quota"].effective == "never throttled"
