"""What holds of every comparison, whatever was found on a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run_with
from hypothesis import strategies as st

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.drift import (
    Verdict,
    compare,
    drifted,
    drifted_before,
    faults_of_proof,
    needs_restart,
    needs_slice_stopped,
)
from edgellm.observed import (
    Account,
    EffectiveState,
    NodePages,
    PathState,
    ProcessState,
    ResourceLimit,
    ServiceState,
    SliceState,
    SysctlLine,
    ThreadState,
    UpstreamState,
    ZramSwap,
)
from tests.rolled_out import BOARDS, Case, RolledOut, rolled_out

REALTIME = {"scheduling": "fifo", "scheduling_priority": 10, "allow_realtime": True}
FORWARD = {
    "engine": "forward",
    "upstream_url": "http://127.0.0.1:8080/v1",
    "upstream_unit": "ollama.service",
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"reserve_cpus": True},
    {"cpu_governor": "performance"},
    {"workers": 2},
    {"zram": "off", "numa": "off", "mlock": False},
    REALTIME,
    FORWARD,
)

cpu_sets = st.sampled_from(["0", "0-3", "4-7", "1-3", "1-47", "8-9", ""]).map(CpuSet.parse)
numbers = st.integers(min_value=-(2**40), max_value=2**40)
counts = st.integers(min_value=0, max_value=2**40)
names = st.sampled_from(["edgellm", "root", "997", "nobody", ""])
releases = st.sampled_from(["3abadcf8e3b5c3fa", "19c0ffee19c0ffee"])
limits = st.builds(ResourceLimit, soft=st.none() | counts, hard=st.none() | counts)
threads = st.builds(
    ThreadState,
    tid=counts,
    comm=names,
    policy=st.sampled_from(["other", "batch", "fifo", "rr", "idle", "7"]),
    priority=st.integers(min_value=0, max_value=99),
    cpus=st.none() | cpu_sets,
)
processes = st.builds(
    ProcessState,
    pid=counts,
    uid=st.none() | st.sampled_from([0, 997]),
    program=st.none() | st.sampled_from(["/usr/bin/python3", "/usr/bin/python3 (deleted)"]),
    threads=st.lists(threads, max_size=3).map(tuple),
    vm_locked_bytes=st.none() | counts,
    nofile=st.none() | limits,
    memlock=st.none() | limits,
)
slices = st.builds(
    SliceState,
    name=st.sampled_from(["edgellm.slice", *layout.RESERVED_SLICES]),
    allowed_cpus=st.none() | cpu_sets,
    effective_cpus=st.none() | cpu_sets,
    cpu_weight_set=st.none() | counts,
    cpu_weight=st.none() | counts,
)
path_states = st.builds(
    PathState,
    kind=st.sampled_from(["file", "directory", "link", "other", "absent"]),
    mode=st.none() | st.sampled_from(["0644", "0777"]),
    owner=st.none() | names,
    group=st.none() | names,
    sha256=st.none() | st.just("ab" * 32),
    target=st.none() | st.just("/tmp"),
)
services = st.builds(
    ServiceState,
    active=st.booleans(),
    enabled=st.booleans(),
    socket_active=st.booleans(),
    socket_enabled=st.booleans(),
    socket_stale=st.booleans(),
    needs_daemon_reload=st.booleans(),
    running_release=st.none() | releases,
    current_release=st.none() | releases,
    previous_release=st.none() | releases,
    runs_replaced_files=st.booleans(),
)
upstreams = st.builds(
    UpstreamState,
    known=st.booleans(),
    active=st.booleans(),
    needs_daemon_reload=st.booleans(),
    drop_in_sha256=st.none() | st.just("ab" * 32),
    tuning=st.none() | st.sampled_from(["", "deadbeef"]),
)
# A field of EffectiveState -> what may be found in it
FOUND: dict[str, st.SearchStrategy[Any]] = {
    "account": st.none()
    | st.builds(
        Account, uid=counts, group=st.none() | names, comment=names, home=names, shell=names
    ),
    "n_restarts": st.none() | st.integers(0, 9),
    "service_state": st.none() | st.sampled_from(["active", "activating", "failed"]),
    "main_pid": st.none() | counts,
    "processes": st.lists(processes, max_size=3).map(tuple),
    "foreign_drop_ins": st.lists(
        st.sampled_from(
            [
                "/etc/systemd/system/edgellm.service.d/override.conf",
                "/run/systemd/system.control/edgellm.slice.d/50-CPUWeight.conf",
                "/usr/lib/systemd/system/edgellm.socket.d/vendor.conf",
            ]
        )
    ).map(tuple),
    "cgroup_version": st.sampled_from([None, 1, 2]),
    "slices": st.lists(slices, max_size=3, unique_by=lambda s: s.name).map(tuple),
    "nr_throttled": st.none() | counts,
    "node_pages": st.lists(
        st.builds(
            NodePages, node=st.integers(min_value=0, max_value=3), anonymous=counts, file=counts
        ),
        max_size=3,
    ).map(tuple),
    "cpus_online": st.none() | cpu_sets,
    "swappiness": st.none() | numbers,
    "swappiness_of_kernel": st.sampled_from([None, True, False]),
    "swappiness_lines": st.lists(
        st.builds(
            SysctlLine,
            path=st.sampled_from([layout.SYSCTL_CONF, "/etc/sysctl.d/99-sysctl.conf"]),
            value=st.none() | numbers,
        ),
        max_size=3,
    ).map(tuple),
    "zram_swaps": st.lists(
        st.builds(
            ZramSwap,
            device=st.sampled_from(["zram0", "zram1"]),
            algorithm=st.none() | st.just("lz4"),
            size_bytes=st.none() | counts,
            priority=st.none() | numbers,
        ),
        max_size=2,
    ).map(tuple),
    "zram_device": st.none() | st.sampled_from(["zram0", "zram1"]),
    "zram_unit_enabled": st.sampled_from([None, True, False]),
    "governors": st.lists(st.sampled_from(["performance", "ondemand"]), max_size=2).map(tuple),
    "nofile_of_systemd": st.none() | limits,
    "memlock_of_systemd": st.none() | limits,
    "realtime_confirmed": st.none() | releases,
    "realtime_trial": st.none() | releases,
}


@st.composite
def hosts(draw: st.DrawFn) -> RolledOut:
    """A host in order, of which some is otherwise."""
    host = rolled_out(
        Case(
            board=draw(st.sampled_from(BOARDS)),
            settings=draw(st.sampled_from(SETTINGS)),
            api_keys=draw(st.booleans()),
        )
    )
    chosen = draw(st.sets(st.sampled_from(sorted(FOUND))))
    host = host.in_force(**{name: draw(FOUND[name]) for name in sorted(chosen)})
    paths = dict(host.observed.paths)
    for path in draw(st.sets(st.sampled_from(sorted(paths)), max_size=4)):
        found = draw(st.none() | path_states)
        if found is None:
            del paths[path]
        else:
            paths[path] = found
    profile = host.observed.profile
    if draw(st.booleans()):
        profile = replace(profile, recorded=None)
    return host.found(
        paths=paths,
        profile=profile,
        whole={path: draw(st.booleans()) for path in host.observed.whole if draw(st.booleans())},
        service=draw(st.sampled_from([host.service, None]) | services),
        effective=draw(st.sampled_from([host.effective, host.effective, None])),
        upstream=draw(st.sampled_from([host.observed.upstream, None]) | upstreams),
    )


@run_with(max_examples=300, deadline=None)
@given(hosts())
def test_a_comparison_never_fails_and_gives_a_reason_for_all_that_is_not_in_order(
    host: RolledOut,
) -> None:
    states = compare(host.desired, host.observed)
    assert len({state.knob for state in states}) == len(states)
    for state in states:
        assert state.knob
        assert state.verdict is Verdict.IN_ORDER or state.reason, state
    names = drifted(states)
    assert set(drifted_before(host.desired, host.observed)) <= set(names)
    assert not needs_slice_stopped(states) or needs_restart(states)
    assert len(faults_of_proof(states)) <= len(names)
    assert compare(host.desired, host.observed) == states


def test_every_field_is_found_otherwise_somewhere() -> None:
    assert FOUND.keys() == {f.name for f in fields(EffectiveState)}


# What was not read never passes for in order

PLAIN = Case()
ZRAM = Case(board="raspberry-pi-4")
NODES = Case(board="epyc-7313-2-nodes", settings={"workers": 1})
GOVERNED = Case(settings={"cpu_governor": "performance"})
RESERVED = Case(settings={"reserve_cpus": True})
CONFIRMED = Case(board="i5-8250u", settings=REALTIME)
CAP = ResourceLimit(soft=20_000, hard=20_000)


def unlocked(host: RolledOut) -> RolledOut:
    return host.running(vm_locked_bytes=0)


def capped(host: RolledOut) -> RolledOut:
    return host.running(nofile=CAP, memlock=CAP)


def wide(host: RolledOut) -> RolledOut:
    return host.threaded(cpus=host.plan.cpus | CpuSet.parse("64"))


def as_it_is(host: RolledOut) -> RolledOut:
    return host


# (field, the host, how it is beside that, knobs that depend on it, the verdict of them)
MISSING: tuple[
    tuple[str, Case, Callable[[RolledOut], RolledOut], tuple[str, ...], Verdict], ...
] = (
    ("account", PLAIN, as_it_is, ("account",), Verdict.DRIFTED),  # None is "there is none"
    ("service_state", PLAIN, unlocked, ("mlock",), Verdict.UNKNOWN),
    ("processes", PLAIN, as_it_is, ("scheduling", "cpus", "nofile", "mlock"), Verdict.UNKNOWN),
    ("slices", PLAIN, as_it_is, ("allowed_cpus", "cpu_weight"), Verdict.UNKNOWN),
    (
        "slices",
        RESERVED,
        as_it_is,
        tuple(f"reserved_cpus of {name}" for name in layout.RESERVED_SLICES),
        Verdict.UNKNOWN,
    ),
    ("nr_throttled", PLAIN, as_it_is, ("cpu_quota",), Verdict.LEFT_ALONE),
    ("node_pages", NODES, as_it_is, ("numa",), Verdict.UNKNOWN),
    ("cpus_online", PLAIN, wide, ("cpus",), Verdict.UNKNOWN),
    ("swappiness", PLAIN, as_it_is, ("swappiness",), Verdict.UNKNOWN),
    ("swappiness_of_kernel", PLAIN, as_it_is, ("swappiness",), Verdict.UNKNOWN),
    ("swappiness_lines", PLAIN, as_it_is, ("swappiness",), Verdict.UNKNOWN),
    ("zram_swaps", ZRAM, as_it_is, ("zram",), Verdict.DRIFTED),
    ("zram_device", ZRAM, as_it_is, ("zram",), Verdict.DRIFTED),
    ("zram_unit_enabled", ZRAM, as_it_is, ("zram",), Verdict.UNKNOWN),
    ("governors", GOVERNED, as_it_is, ("cpu_governor",), Verdict.UNKNOWN),
    ("nofile_of_systemd", PLAIN, capped, ("nofile",), Verdict.UNKNOWN),
    ("memlock_of_systemd", PLAIN, capped, ("memlock",), Verdict.UNKNOWN),
    ("realtime_confirmed", CONFIRMED, as_it_is, ("scheduling",), Verdict.DRIFTED),
)
NOTHING_DEPENDS_ON = {
    *("main_pid", "cgroup_version", "foreign_drop_ins", "realtime_trial"),
    "n_restarts",  # beside service_state, which has its own row
}


@pytest.mark.parametrize(("field", "case", "beside", "knobs", "verdict"), MISSING)
def test_a_knob_whose_value_was_not_read_is_not_in_order(
    field: str,
    case: Case,
    beside: Callable[[RolledOut], RolledOut],
    knobs: tuple[str, ...],
    verdict: Verdict,
) -> None:
    host = beside(rolled_out(case))
    nothing = () if isinstance(getattr(host.effective, field), tuple) else None
    states = host.in_force(**{field: nothing}).states
    for knob in knobs:
        assert (states[knob].verdict, bool(states[knob].reason)) == (verdict, True), states[knob]


def test_every_field_that_a_knob_depends_on_is_among_them() -> None:
    covered = {field for field, *_ in MISSING}
    assert covered | NOTHING_DEPENDS_ON == {f.name for f in fields(EffectiveState)}


@pytest.mark.parametrize(
    ("changes", "knobs"),
    [
        ({"uid": None}, ("user",)),
        ({"program": None}, ("program",)),
        ({"threads": ()}, ("scheduling", "cpus")),
        ({"vm_locked_bytes": None}, ("mlock",)),
        ({"nofile": None}, ("nofile",)),
        ({"memlock": None}, ("memlock",)),
    ],
)
def test_what_a_process_does_not_tell_is_unknown(
    changes: dict[str, Any], knobs: tuple[str, ...]
) -> None:
    states = rolled_out(PLAIN).running(**changes).states
    unknown = {s.knob: s for s in states.values() if s.verdict is Verdict.UNKNOWN}
    assert tuple(unknown) == knobs
    assert all(state.reason for state in unknown.values())
    masks = rolled_out(PLAIN).threaded(cpus=None).states["cpus"]
    assert masks.verdict is Verdict.UNKNOWN
