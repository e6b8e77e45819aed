"""Every thread and process of the service, and its slice, as the kernel has them."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.drift.verdict import (
    KnobState,
    Verdict,
    counted,
    in_order,
    left_alone,
    limited,
    off,
    state_of,
    text,
    unknown,
)
from edgellm.observed import EffectiveState, ProcessState, ResourceLimit, SliceState, ThreadState
from edgellm.tuning import TuningPlan

OUR_SLICE = "edgellm.slice"
SERVICE_UNIT = f"{layout.UNIT_DIR}/edgellm.service"
SLICE_UNIT = f"{layout.UNIT_DIR}/{OUR_SLICE}"
ENTRYPOINT = f"{layout.CURRENT}/entrypoint.sh"
# Pages that a binding decides about may lie elsewhere where they were there before it: libraries
# that other programs had mapped. More than that is not a binding.
NUMA_SHARE = 0.95
PAGE_MIB = 256  # pages of 4 KiB in one MiB
# Directories that belong to packages: what lies there comes back with their next update.
PACKAGE_DIRS = ("/usr/", "/lib/")
# Knobs of the slice's cgroup, and all of the running process: a restart, with the slice stopped
# between where it is the slice's, takes them from the files again.
SLICE_KNOBS = frozenset({"drop_ins", "allowed_cpus", "cpu_weight"})
PROCESS_KNOBS = SLICE_KNOBS | frozenset(
    {"scheduling", "cpus", "numa", "nofile", "memlock", "mlock", "program", "user"}
)
NO_CPUS = CpuSet(cpus=())
NO_PROCESS = "the service has no process, or it cannot be read"


def process_states(
    plan: TuningPlan,
    effective: EffectiveState,
    release_id: str | None = None,
    *,
    own_app: bool = False,
) -> tuple[KnobState, ...]:
    """Knobs of every thread and process of the service, and of its slice.

    `release_id`: the one that should run, where it matters whether its real time is confirmed.
    `own_app`: the operator's own app runs in the place of ours (server_app), and need not place
    its workers or lock its model as ours does.
    """
    drop_ins = _drop_ins(effective)
    if not effective.processes:
        return (drop_ins, *(unknown(knob, NO_PROCESS) for knob in _knobs_of_a_process()))
    own = effective.slice(OUR_SLICE)
    processes = effective.processes
    nofile = {p.pid: p.nofile for p in processes}
    memlock = {p.pid: p.memlock for p in processes}
    limits = plan.limits
    memlock_state = _limit("memlock", limits.memlock_bytes, memlock, effective.memlock_of_systemd)
    of_process = (
        _scheduling(plan, effective, release_id),
        _cpus(plan, effective, own_app),
        _numa(plan, effective),
        _limit("nofile", limits.nofile, nofile, effective.nofile_of_systemd),
        memlock_state,
        _mlock(plan, effective, memlock_state, own_app),
        _program(processes),
        *_user(processes, effective),
    )
    if effective.service_state != "active":
        of_process = tuple(map(_not_yet_told, of_process))
    return (
        drop_ins,
        *of_process,
        _allowed_cpus(plan, own, effective),
        _cpu_weight(plan, own),
        _throttled(plan, effective),
    )


def _allowed_cpus(plan: TuningPlan, own: SliceState | None, effective: EffectiveState) -> KnobState:
    if plan.allowed_cpus is not None:
        return slice_cpus("allowed_cpus", own, plan.allowed_cpus, SLICE_UNIT, effective)
    have = None if own is None else text(own.effective_cpus)
    if own is not None and own.own_cpus:
        # systemd leaves it there when AllowedCPUs= go (systemd#43846); so do people
        why = f"the cgroup of {own.name} still has {own.own_cpus}, which no plan wants"
        return off("allowed_cpus", "none", have, why, configured=text(own.allowed_cpus))
    return left_alone(plan, "allowed_cpus", have)


def _not_yet_told(state: KnobState) -> KnobState:
    """Before the entrypoint has set it, systemd's own value is there."""
    if state.verdict is not Verdict.DRIFTED:
        return state
    return unknown(state.knob, f"{state.reason}, while it starts", state.desired, state.effective)


def _knobs_of_a_process() -> tuple[str, ...]:
    return (
        *("scheduling", "cpus", "numa", "nofile", "memlock", "mlock", "program"),
        *("allowed_cpus", "cpu_weight"),
    )


def _drop_ins(effective: EffectiveState) -> KnobState:
    found = effective.foreign_drop_ins
    removable = removable_drop_ins(effective)
    have = ", ".join(found) or "none"
    if removable:
        why = f"{', '.join(removable)} changes what our units say"
        return off("drop_ins", "none", have, why, configured=have, by=removable[0])
    if found:
        return limited("drop_ins", "none", have, f"{have}: a package's own")
    return in_order("drop_ins", "none", have)


def removable_drop_ins(effective: EffectiveState) -> tuple[str, ...]:
    """Of our own units, and put there by somebody on the host."""
    return tuple(p for p in effective.foreign_drop_ins if not p.startswith(PACKAGE_DIRS))


def _scheduling(plan: TuningPlan, effective: EffectiveState, release_id: str | None) -> KnobState:
    wanted = policy_text(plan.scheduling.policy, plan.scheduling.priority)
    threads = [thread for process in effective.processes for thread in process.threads]
    have = counted(policy_text(thread.policy, thread.priority) for thread in threads)
    if not threads:
        return unknown("scheduling", "no thread could be read", wanted)
    if not plan.use_chrt:
        return left_alone(plan, "scheduling", have)
    stray = [thread for thread in threads if policy_text(thread.policy, thread.priority) != wanted]
    realtime = plan.scheduling.is_realtime
    if not stray:
        if not realtime or release_id in (None, effective.realtime_confirmed):
            return in_order("scheduling", wanted, have, by=ENTRYPOINT)
        if release_id == effective.realtime_trial:
            note = "on trial: it ends by itself unless the roll-out confirms it"
            return in_order("scheduling", wanted, have, note, by=ENTRYPOINT)
        why = "real time is not confirmed for this release: it ends with the next start"
        return off("scheduling", wanted, have, why, by=ENTRYPOINT)
    if realtime and len(stray) == len(threads):
        why = (
            f"{have}: real time was not confirmed by a verified roll-out, so the server runs "
            "without it"
        )
    else:
        first = stray[0]
        why = (
            f"{_some(stray, threads)} run as {policy_text(first.policy, first.priority)}, "
            f"not {wanted}"
        )
    return off("scheduling", wanted, have, why, by=ENTRYPOINT)


def _some(stray: list[ThreadState], threads: list[ThreadState]) -> str:
    first = stray[0]
    return f"{len(stray)} of {len(threads)} threads, such as {first.comm} ({first.tid}),"


def policy_text(policy: str, priority: int) -> str:
    return f"{policy} {priority}" if priority else policy


def _cpus(plan: TuningPlan, effective: EffectiveState, own_app: bool) -> KnobState:
    """Each thread on the plan's CPUs, or on those of one worker, and on no fewer."""
    online = effective.cpus_online
    wanted = str(plan.cpus)
    placed = [
        (thread, thread.cpus if online is None else thread.cpus & online)
        for process in effective.processes
        for thread in process.threads
        if thread.cpus is not None
    ]
    if not placed:
        return unknown("cpus", "Cpus_allowed_list of no thread could be read", wanted)
    have = counted(str(cpus) for _, cpus in placed)
    # The operator's own app may pin its threads, to CPUs of the plan
    stray = [
        (thread, cpus)
        for thread, cpus in placed
        if (cpus - plan.cpus if own_app else cpus not in (plan.cpus, *plan.worker_cpus))
    ]
    if not stray and own_app:
        return in_order("cpus", wanted, have)
    if not stray:
        return _each_worker_placed(plan, effective, {cpus for _, cpus in placed}, have)
    if online is None:
        return unknown("cpus", "which CPUs are on line was not read", wanted, have)
    own = effective.slice(OUR_SLICE)
    if own is not None and own.allowed_cpus == plan.allowed_cpus and not _written_by_hand(own):
        bound = own.effective_cpus
        if bound is not None and not bound - plan.cpus and all(cpus == bound for _, cpus in stray):
            why = f"{own.name} has {bound} only: a cgroup above it bounds it"
            return limited("cpus", wanted, have, why)
    cpus = stray[0][1]
    some = _some([thread for thread, _ in stray], [thread for thread, _ in placed])
    return off("cpus", wanted, have, f"{some} may run on {cpus}, not {wanted}")


def _each_worker_placed(
    plan: TuningPlan, effective: EffectiveState, found: set[CpuSet], have: str
) -> KnobState:
    """Several workers have places of their own; the processes beside them have all of the CPUs."""
    wanted = str(plan.cpus)
    free = [str(part) for part in plan.worker_cpus if part not in found]
    if plan.workers == 1 or not free:
        return in_order("cpus", wanted, have)
    return off("cpus", wanted, have, f"no worker is on {' or '.join(free)}")


def _limit(
    knob: str,
    wanted: int | None,
    found: Mapping[int, ResourceLimit | None],
    of_systemd: ResourceLimit | None,
) -> KnobState:
    """`wanted` None: unlimited. systemd gives no more than it has itself, and does not say so."""
    want, by = _amount(wanted), SERVICE_UNIT
    limits = {pid: limit for pid, limit in found.items() if limit is not None}
    if not limits:
        return unknown(knob, "the limits of no process could be read", want)
    have = counted(_amount(limit.soft) for limit in limits.values())
    stray = {pid: x for pid, x in limits.items() if (x.soft, x.hard) != (wanted, wanted)}
    if not stray:
        return in_order(knob, want, have, by=by)
    if of_systemd is None:
        return unknown(knob, "what systemd itself may give was not read", want, have)
    cap = of_systemd.hard
    if cap is not None and (wanted is None or cap < wanted):
        stray = {pid: x for pid, x in stray.items() if (x.soft, x.hard) != (cap, cap)}
        if not stray:
            why = f"capped at {_amount(cap)}: systemd has no more to give on this host"
            return limited(knob, want, have, why, configured=want, by=by)
    pid, limit = next(iter(stray.items()))
    why = f"process {pid} has {_amount(limit.soft)} (at most {_amount(limit.hard)}), not {want}"
    return off(knob, want, have, why, by=by)


def _amount(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _mlock(
    plan: TuningPlan, effective: EffectiveState, memlock: KnobState, own_app: bool
) -> KnobState:
    locked = [p.vm_locked_bytes for p in effective.processes if p.vm_locked_bytes is not None]
    have = f"{sum(locked) >> 20} MiB locked" if locked else None
    if not plan.engine.mlock:
        return left_alone(plan, "mlock", have)
    wanted = "the model locked"
    if not locked:
        return unknown("mlock", "VmLck of no process could be read", wanted)
    workers = sum(size > 0 for size in locked)
    if workers >= plan.workers:
        return in_order("mlock", wanted, have)
    if own_app:
        why = "whether it locks its model is for the operator's own app to say (server_app)"
        return state_of("mlock", wanted, have, Verdict.LEFT_ALONE, why)
    if memlock.verdict is Verdict.LIMITED:
        why = "LimitMEMLOCK is capped here, so that the kernel refused"
        return limited("mlock", wanted, have, why)
    why = "VmLck is 0: the engine could not lock the model"
    if workers:
        why = f"VmLck is 0 in all but {workers} of {plan.workers} workers"
    return off("mlock", wanted, have, why)


def _program(processes: tuple[ProcessState, ...]) -> KnobState:
    programs = [process.program for process in processes if process.program is not None]
    if not programs:
        return unknown("program", "/proc/<pid>/exe of no process could be read")
    have = counted(programs)
    if any(program.endswith(" (deleted)") for program in programs):
        return off("program", "python3 as it is now", have, "it was replaced since it started")
    return in_order("program", "python3 as it is now", have)


def _user(processes: tuple[ProcessState, ...], effective: EffectiveState) -> tuple[KnobState, ...]:
    account = effective.account
    if account is None:
        return ()  # told by the account's own knob
    wanted = str(account.uid)
    uids = [process.uid for process in processes if process.uid is not None]
    if not uids:
        return (unknown("user", "the user of no process could be read", wanted),)
    have = counted(map(str, uids))
    if any(uid != account.uid for uid in uids):
        why = (
            f"it runs as {have}: the account {layout.USER} is {wanted}, made anew since it started"
        )
        return (off("user", wanted, have, why),)
    return (in_order("user", wanted, have),)


def slice_cpus(
    knob: str, found: SliceState | None, wanted: CpuSet, by: str, effective: EffectiveState
) -> KnobState:
    """AllowedCPUs= of one slice, as the kernel has them."""
    want = str(wanted)
    if found is None:
        return unknown(knob, "its slice was not read", want)
    have, configured = text(found.effective_cpus), text(found.allowed_cpus)
    online = effective.cpus_online
    reachable = wanted if online is None else wanted & online
    if found.effective_cpus == reachable:
        return state_of(knob, want, have, Verdict.IN_ORDER, None, configured=configured, by=by)
    if found.allowed_cpus == wanted and not _written_by_hand(found):
        if found.effective_cpus is None:
            why = _why_no_cpuset(effective)
            return limited(knob, want, None, why, configured=configured, by=by)
        if online is None:
            return unknown(knob, "which CPUs are on line was not read", want, have)
        if not found.effective_cpus - wanted:
            why = f"a cgroup above it leaves it {have}"
            return limited(knob, want, have, why, configured=configured, by=by)
    why = f"{have or 'no cpuset'} in the kernel, {configured or 'nothing'} set in systemd"
    return off(knob, want, have, why, configured=configured, by=by)


def _written_by_hand(found: SliceState) -> bool:
    """The slice's own cpuset is not the one that systemd has set, or left unset."""
    return found.own_cpus is not None and found.own_cpus != (found.allowed_cpus or NO_CPUS)


def _why_no_cpuset(effective: EffectiveState) -> str:
    if effective.cgroup_version == 2:
        return (
            "systemd has taken it, but the slice has no cpuset now: it is not active, or the "
            "controller is not there for it"
        )
    return "systemd has taken it, but ignores AllowedCPUs= on cgroup v1, and beside it"


def _cpu_weight(plan: TuningPlan, found: SliceState | None) -> KnobState:
    have = None if found is None or found.cpu_weight is None else str(found.cpu_weight)
    if plan.cpu_weight is None:
        return left_alone(plan, "cpu_weight", have)
    wanted, by = str(plan.cpu_weight), SLICE_UNIT
    if found is None:
        return unknown("cpu_weight", "its slice was not read", wanted)
    configured = None if found.cpu_weight_set is None else str(found.cpu_weight_set)
    if have == wanted:
        return state_of(
            "cpu_weight", wanted, have, Verdict.IN_ORDER, None, configured=configured, by=by
        )
    if have is None and configured == wanted:
        why = "systemd has taken it, but the kernel has no cpu controller for this slice"
        return limited("cpu_weight", wanted, None, why, configured=configured, by=by)
    why = f"{have or 'none'} in the kernel, {configured or 'none'} set in systemd"
    return off("cpu_weight", wanted, have, why, configured=configured, by=by)


def _numa(plan: TuningPlan, effective: EffectiveState) -> KnobState:
    pages = {found.node: found for found in effective.node_pages}
    have = "; ".join(
        f"node {node}: {found.anonymous // PAGE_MIB} MiB, and {found.file // PAGE_MIB} MiB of files"
        for node, found in pages.items()
    )
    if plan.numa is None:
        return left_alone(plan, "numa", have or None)
    wanted = f"memory on nodes {','.join(map(str, plan.numa.nodes))}"
    total = sum(found.anonymous for found in pages.values())
    if not total:
        return unknown("numa", "numa_maps could not be read", wanted)
    on_nodes = sum(found.anonymous for node, found in pages.items() if node in plan.numa.nodes)
    if on_nodes >= NUMA_SHARE * total:
        return in_order("numa", wanted, have)
    why = f"{100 * (total - on_nodes) // total} % of its memory lies on other nodes"
    return off("numa", wanted, have, why)


def _throttled(plan: TuningPlan, effective: EffectiveState) -> KnobState:
    times = effective.nr_throttled
    if not times:
        return left_alone(plan, "cpu_quota", None if times is None else "never throttled")
    why = f"throttled {times} times: a CFS quota stops all threads at once"
    return limited("cpu_quota", None, str(times), why)
