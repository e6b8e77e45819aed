"""A board of tests/hardware as it is right after a verified roll-out: what is wanted of it, and
what is found on it, exactly in order. Tests of drift change one thing of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from edgellm import layout, render
from edgellm.cpuset import CpuSet
from edgellm.desired import DesiredState, desired_state
from edgellm.drift import KnobState, Verdict, compare
from edgellm.drift.files import wanted_paths
from edgellm.drift.host import ACCOUNT_COMMENT, ACCOUNT_SHELL
from edgellm.hardware import HostProfile, RecordedHost, Swap, ZramDevice
from edgellm.observed import (
    Account,
    EffectiveState,
    NodePages,
    ObservedState,
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
from edgellm.parse import parse_profile
from edgellm.release import Release
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, ZramPlan, plan_tuning, visible_cpus

HARDWARE = Path(__file__).with_name("hardware")
BOARDS = tuple(sorted(path.parent.name for path in HARDWARE.glob("*/probe.txt")))
MODEL_SHA256 = "0" * 64
MODEL_SIZE_BYTES = 428_730_208
RUNTIME_ID = "1" * 16
UID, MAIN_PID = 997, 812
MIB = 1 << 20
ABSENT = PathState(kind="absent")
UNLIMITED = ResourceLimit(soft=None, hard=None)
OTHER_SYSCTL = "/usr/lib/sysctl.d/10-vendor.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A board, what of it and its tools is otherwise, and settings beside the defaults."""

    board: str = "rk3588"
    profile: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    api_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Both sides of `compare`, and what the desired side was made from."""

    case: Case
    desired: DesiredState
    observed: ObservedState

    @property
    def plan(self) -> TuningPlan:
        return self.desired.plan

    @property
    def effective(self) -> EffectiveState:
        assert self.observed.effective is not None
        return self.observed.effective

    @property
    def service(self) -> ServiceState:
        assert self.observed.service is not None
        return self.observed.service

    def found(self, **changes: Any) -> RolledOut:
        """With this in ObservedState."""
        return replace(self, observed=replace(self.observed, **changes))

    def in_force(self, **changes: Any) -> RolledOut:
        """With this in EffectiveState."""
        return self.found(effective=replace(self.effective, **changes))

    def served(self, **changes: Any) -> RolledOut:
        """With this in ServiceState."""
        return self.found(service=replace(self.service, **changes))

    def lying(self, path: str, state: PathState | None = None, **changes: Any) -> RolledOut:
        """With this at a path; `changes`: of what is there."""
        there = state or replace(self.observed.paths[path], **changes)
        return self.found(paths={**self.observed.paths, path: there})

    def running(self, number: int = 0, **changes: Any) -> RolledOut:
        """With this in one process."""
        processes = list(self.effective.processes)
        processes[number] = replace(processes[number], **changes)
        return self.in_force(processes=tuple(processes))

    def threaded(self, *numbers: int, **changes: Any) -> RolledOut:
        """With this in some threads of the first process; without numbers, in all threads of all"""
        if numbers:
            threads = list(self.effective.processes[0].threads)
            for number in numbers:
                threads[number] = replace(threads[number], **changes)
            return self.running(threads=tuple(threads))
        return self.in_force(
            processes=tuple(
                replace(p, threads=tuple(replace(t, **changes) for t in p.threads))
                for p in self.effective.processes
            )
        )

    def sliced(self, name: str = "edgellm.slice", **changes: Any) -> RolledOut:
        """With this in one slice."""
        return self.in_force(
            slices=tuple(
                replace(found, **changes) if found.name == name else found
                for found in self.effective.slices
            )
        )

    def become(self, profile: HostProfile) -> RolledOut:
        """The host has changed, as after an update, and the plan with it."""
        there = {
            path: self.observed.paths.get(path, ABSENT)
            for path in (*self.planned_for(profile).paths, layout.STATE_DIR)
        }
        return replace(
            self,
            desired=self.planned_for(profile),
            observed=replace(self.observed, profile=profile, paths=there),
        )

    @property
    def states(self) -> dict[str, KnobState]:
        states = compare(self.desired, self.observed)
        assert len({state.knob for state in states}) == len(states)
        return {state.knob: state for state in states}

    @property
    def drift(self) -> KnobState:
        """The one knob that has drifted; none is unknown."""
        bad = [s for s in self.states.values() if s.verdict in (Verdict.DRIFTED, Verdict.UNKNOWN)]
        assert len(bad) == 1, [(s.knob, s.verdict.value, s.reason) for s in bad]
        assert bad[0].verdict is Verdict.DRIFTED, bad[0]
        return bad[0]

    def planned_for(self, profile: HostProfile) -> DesiredState:
        """What is wanted of the same host once it has become this one."""
        return wanted_of(profile, self.desired.settings, api_keys=self.case.api_keys)


@cache
def board(name: str) -> HostProfile:
    text = (HARDWARE / name / "probe.txt").read_text(encoding="ascii")
    return parse_profile(text, control_time_s=None)


def settings_of(**data: Any) -> Settings:
    required = {
        "model_name": "qwen2.5-0.5b-instruct",
        "model_source": "file:/model.gguf",
        "model_sha256": MODEL_SHA256,
        "model_size_bytes": MODEL_SIZE_BYTES,
    }
    return Settings.from_host_data({**required, **data}, host="edge-01")


def rolled_out(case: Case) -> RolledOut:
    """The board after its first roll-out, which the second one must find as it is."""
    settings = settings_of(**case.settings)
    found = board(case.board)
    found = replace(found, tools=replace(found.tools, **case.tools), **case.profile)
    profile = afterwards(found, plan_tuning(found, settings))
    desired = wanted_of(profile, settings, api_keys=case.api_keys)
    return RolledOut(case=case, desired=desired, observed=in_order(desired, profile))


def afterwards(found: HostProfile, plan: TuningPlan) -> HostProfile:
    """The host as a probe sees it once this plan has been carried out on it."""
    tools = found.tools
    for package, names in PACKAGE_GIVES.items():
        if package in plan.packages:
            tools = replace(tools, **dict.fromkeys(names, True))
    if plan.zram.manager in ("own-unit", "zram-generator"):
        tools = replace(tools, zram_manager="edgellm")
    swaps = tuple(
        Swap(
            path=f"/dev/{swap.device}",
            kind="partition",
            size_bytes=swap.size_bytes or 0,
            used_bytes=0,
            priority=swap.priority or 0,
        )
        for swap in zram_swaps(plan.zram, found)
    )
    devices = tuple(
        ZramDevice(
            name=swap.path.rpartition("/")[2],
            disksize_bytes=swap.size_bytes,
            algorithm="lzo-rle",
            is_swap=True,
            mountpoint=None,
        )
        for swap in swaps
    )
    found = replace(
        found,
        tools=tools,
        service_user_exists=True,
        swaps=(*found.swaps, *(swap for swap in swaps if swap not in found.swaps)),
        zram_devices=(*found.zram_devices, *devices),
    )
    return replace(found, recorded=RecordedHost.of(found))


PACKAGE_GIVES = {
    "numactl": ("numactl", "numactl_works"),
    "libgomp": ("libgomp",),
    "libgomp1": ("libgomp",),
    "libstdc++": ("libstdcxx",),
    "libstdc++6": ("libstdcxx",),
    "util-linux": ("chrt",),
}


def wanted_of(profile: HostProfile, settings: Settings, *, api_keys: bool) -> DesiredState:
    plan = plan_tuning(profile, settings)
    hashes = (hashlib.sha256(b"a key").hexdigest(),) if api_keys else ()
    has_key = settings.upstream_key_env is not None
    release = Release.of(
        model_sha256=MODEL_SHA256 if settings.holds_model else None,
        runtime_id=RUNTIME_ID,
        files=render.release_files(
            plan, settings, hashes, upstream_key_hash="cd" * 32 if has_key else None
        ),
    )
    return desired_state(
        settings=settings,
        plan=plan,
        release=release,
        text=render.text,
        api_keys_text=render.api_keys_file(hashes) if api_keys else None,
        probe_key="a probe key" if api_keys else None,
        upstream_key="an upstream key" if has_key else None,
        upstream_drop_in=None if settings.upstream_unit is None else render.upstream_drop_in(plan),
    )


def in_order(desired: DesiredState, profile: HostProfile) -> ObservedState:
    """What is found where all is as it is wanted."""
    whole = {desired.runtime_directory: True}
    if desired.model_path is not None:
        whole[desired.model_path] = True
    return ObservedState(
        profile=profile,
        paths=paths_in_order(desired),
        whole=whole,
        service=ServiceState(
            active=True,
            enabled=True,
            socket_active=True,
            socket_enabled=True,
            socket_stale=False,
            needs_daemon_reload=False,
            running_release=desired.release_id,
            current_release=desired.release_id,
            previous_release=None,
        ),
        effective=effective_in_order(desired, profile),
        upstream=upstream_in_order(desired),
    )


def paths_in_order(desired: DesiredState) -> dict[str, PathState]:
    home = PathState(kind="directory", mode="0755", owner=layout.USER, group=layout.USER)
    found = {layout.STATE_DIR: home}
    for group in desired.groups:
        found |= wanted_paths(group)
    return found


def upstream_in_order(desired: DesiredState) -> UpstreamState | None:
    drop_in = desired.upstream_drop_in
    if drop_in is None:
        return None
    return UpstreamState(
        known=True,
        active=True,
        needs_daemon_reload=False,
        drop_in_sha256=hashlib.sha256(drop_in.encode()).hexdigest(),
        tuning=drop_in.partition("EDGELLM_TUNING=")[2].split()[0],
    )


def effective_in_order(desired: DesiredState, profile: HostProfile) -> EffectiveState:
    plan = desired.plan
    visible = visible_cpus(profile)
    return EffectiveState(
        account=Account(
            uid=UID,
            group=layout.USER,
            comment=ACCOUNT_COMMENT,
            home=layout.STATE_DIR,
            shell=ACCOUNT_SHELL,
        ),
        service_state="active",
        n_restarts=0,
        main_pid=MAIN_PID,
        processes=processes_in_order(plan),
        foreign_drop_ins=(),
        cgroup_version=profile.cgroup.version,
        slices=(
            slice_in_order("edgellm.slice", plan.allowed_cpus, plan.cpu_weight, visible, profile),
            *(
                slice_in_order(name, plan.reserved_cpus, None, visible, profile)
                for name in layout.RESERVED_SLICES
            ),
        ),
        nr_throttled=0 if "cpu" in profile.cgroup.controllers else None,
        node_pages=pages_in_order(plan, profile),
        cpus_online=profile.cpus_online,
        swappiness=60 if plan.swappiness is None else plan.swappiness,
        swappiness_of_kernel=True,
        swappiness_lines=sysctl_in_order(plan),
        zram_swaps=zram_swaps(plan.zram, profile),
        zram_device="zram1" if plan.zram.manager == "own-unit" else None,
        zram_unit_enabled=plan.zram.manager == "own-unit",
        governors=(plan.cpu_governor,)
        if plan.cpu_governor
        else ()
        if profile.cpufreq is None
        else profile.cpufreq.governors,
        nofile_of_systemd=ResourceLimit(soft=1 << 20, hard=1 << 20),
        memlock_of_systemd=UNLIMITED,
        realtime_confirmed=desired.release_id if plan.scheduling.is_realtime else None,
        realtime_trial=None,
    )


def processes_in_order(plan: TuningPlan) -> tuple[ProcessState, ...]:
    """One process, or a supervisor and the workers, each with some threads."""
    nofile, memlock = plan.limits.nofile, plan.limits.memlock_bytes
    places = [plan.cpus] if plan.workers == 1 else [plan.cpus, *plan.worker_cpus]
    return tuple(
        ProcessState(
            pid=MAIN_PID + 10 * number,
            uid=UID,
            program="/usr/bin/python3.11",
            threads=tuple(
                ThreadState(
                    tid=MAIN_PID + 10 * number + thread,
                    comm="python3" if thread == 0 else f"engine-{thread}",
                    policy=plan.scheduling.policy,
                    priority=plan.scheduling.priority,
                    cpus=cpus,
                )
                for thread in range(3)
            ),
            vm_locked_bytes=MODEL_SIZE_BYTES
            if plan.engine.mlock and (plan.workers == 1 or number > 0)
            else 0,
            nofile=ResourceLimit(soft=nofile, hard=nofile),
            memlock=ResourceLimit(soft=memlock, hard=memlock),
        )
        for number, cpus in enumerate(places)
    )


def slice_in_order(
    name: str, allowed: CpuSet | None, weight: int | None, visible: CpuSet, profile: HostProfile
) -> SliceState:
    has_cpuset = profile.cgroup.version == 2 and "cpuset" in profile.cgroup.controllers
    has_cpu = "cpu" in profile.cgroup.controllers
    return SliceState(
        name=name,
        allowed_cpus=allowed,
        effective_cpus=(allowed or visible) if has_cpuset else None,
        own_cpus=(allowed or CpuSet(cpus=())) if has_cpuset else None,
        cpu_weight_set=weight,
        cpu_weight=(weight or 100) if has_cpu else None,
    )


def pages_in_order(plan: TuningPlan, profile: HostProfile) -> tuple[NodePages, ...]:
    if len(profile.numa_nodes) < 2:
        return ()
    nodes = [n.node for n in profile.numa_nodes] if plan.numa is None else plan.numa.nodes
    # The page cache keeps what others have read, on whatever node
    others = [n.node for n in profile.numa_nodes if n.node not in nodes]
    return (
        *(NodePages(node=node, anonymous=100_000, file=5_000) for node in nodes),
        *(NodePages(node=node, anonymous=200, file=90_000) for node in others),
    )


def sysctl_in_order(plan: TuningPlan) -> tuple[SysctlLine, ...]:
    other = SysctlLine(path=OTHER_SYSCTL, value=60)
    if plan.swappiness is None:
        return (other,)
    own = SysctlLine(path=f"{layout.SYSCTL_DIR}/{plan.sysctl_name}", value=plan.swappiness)
    return (other, own)


def zram_swaps(plan: ZramPlan, profile: HostProfile) -> tuple[ZramSwap, ...]:
    """Ours where the plan has one, and those of others that are on already."""
    own = {"own-unit": "zram1", "zram-generator": "zram0"}.get(plan.manager)
    others = tuple(
        ZramSwap(
            device=swap.path.rpartition("/")[2],
            algorithm="lz4",
            size_bytes=swap.size_bytes,
            priority=swap.priority,
        )
        for swap in profile.swaps
        if swap.is_zram and swap.path != f"/dev/{own}"
    )
    if own is None:
        return others
    ours = ZramSwap(
        device=own,
        algorithm=plan.algorithm or "lzo-rle",
        size_bytes=plan.size_bytes,
        priority=plan.priority,
    )
    return (*others, ours)
