"""HostProfile + Settings -> TuningPlan: every rule of docs/tuning.md, each with its reason."""

from __future__ import annotations

import math
import posixpath
import re
from dataclasses import dataclass

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError
from edgellm.hardware import OWN_ZRAM_MANAGER, CpuCluster, CpuFreq, HostProfile, NumaNode
from edgellm.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a knob is as it is. `knob` is the plan's field or the field's name for it."""

    knob: str  # "threads"
    text: str  # "4 of 8 cores: the big cluster (Cortex-A76) only"
    left_alone: bool = False  # the knob is deliberately not touched
    warning: bool = False  # the operator should act: "cgroup_disable=memory on the kernel ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaBinding:
    """numactl arguments of the server: by cpulist, so that it stays within the cgroup's mask."""

    cpus: CpuSet
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What chrt sets at exec. policy: other, batch, idle, rr, fifo; priority 0 but for rr, fifo."""

    policy: str
    priority: int

    @property
    def chrt_flag(self) -> str:
        """'batch' -> '--batch', as chrt(1) spells it."""
        return f"--{self.policy}"

    @property
    def is_realtime(self) -> bool:
        return self.policy in ("rr", "fifo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """systemd's LimitNOFILE and LimitMEMLOCK; None: unlimited."""

    nofile: int
    memlock_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZramPlan:
    """Who sets zram up and how. `manager`: the package that does it on this host.

    "zram-generator": our drop-in for systemd-zram-generator; "own-unit": our own systemd unit;
    "adopted": another manager holds it and is left in charge; "none": left alone (see reasons).
    """

    manager: str
    adopted_manager: str | None
    size_bytes: int | None  # None unless we set it up
    algorithm: str | None
    priority: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """llama.cpp's own words."""

    n_threads: int
    n_threads_batch: int
    n_ctx: int  # of one slot
    n_parallel: int
    n_batch: int
    cache_ram_mib: int
    mlock: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """All that is decided for one host. Steps and templates only carry it out."""

    engine: EnginePlan
    workers: int
    cpus: CpuSet  # where the service runs
    allowed_cpus: CpuSet | None  # AllowedCPUs= of edgellm.slice; None: controller not there, or all
    numa: NumaBinding | None
    use_chrt: bool  # False where chrt is not there
    scheduling: Scheduling
    cpu_weight: int | None  # CPUWeight= of edgellm.slice; None: controller not there
    limits: Limits
    swappiness: int | None  # None: left alone
    zram: ZramPlan
    omp_wait_policy: str | None  # "PASSIVE" | None
    packages: tuple[str, ...]  # missing on the host, by the names of its package manager
    memory_needed_bytes: int  # model + KV cache + runtime, all workers
    kv_cache_bytes: int
    reasons: tuple[Reason, ...]
    # One entry a worker: its share of `cpus`, a node's CPUs where workers are spread over nodes.
    worker_cpus: tuple[CpuSet, ...] = ()
    # Set by taskset at exec; None: allowed_cpus or numa holds the server already, or it has all.
    affinity: CpuSet | None = None
    # AllowedCPUs= of system.slice and user.slice; None: they keep all (reserve_cpus is off, or no)
    reserved_cpus: CpuSet | None = None
    cpu_governor: str | None = None  # None: left alone
    # In layout.SYSCTL_DIR; that of SYSCTL_CONF_LAST to come last
    sysctl_name: str = posixpath.basename(layout.SYSCTL_CONF)


MIB = 1 << 20
GIB = 1 << 30

# --- CPUs -----------------------------------------------------------------------------------------
# llama.cpp gives every thread the same share of a matrix and waits for the last one: a core far
# slower than the others slows all of them (llama.cpp#7176: half the speed with small cores in).
# Prime and big cores of one chip lie above 0.8 of the fastest, small cores (0.3 to 0.55) below.
BIG_CORE_FRACTION = 0.8
# What intel_pstate and amd_pstate offer in active mode: there, powersave scales with the load
# (kernel docs, admin-guide/pm/intel_pstate).
PSTATE_GOVERNORS = frozenset({"performance", "powersave"})
# One prime core beside slightly slower ones (1+3+4 phones): never decode on a single core there.
MIN_BIG_CORES = 2
# From here on a core less costs little, and ssh, journald and interrupts keep a place to run.
HOUSEKEEPING_FROM_CORES = 4
# Rows of an 896-wide model split further than this are shorter than the barrier between them. A
# judgement, not a measurement of ours: `threads` overrides it.
MAX_DECODE_THREADS = 16

# kernel.sched_rt_period_us, its default: a budget as long as it is no budget.
RT_PERIOD_US = 1_000_000

# --- Memory ---------------------------------------------------------------------------------------
# 24 blocks x (K and V) x 2 KV heads x 64 values x 2 bytes: the shape of Qwen2.5-0.5B.
KV_BYTES_PER_TOKEN = 24 * 2 * 2 * 64 * 2
# Python, uvicorn, llama.cpp's compute buffers: resident size less model copies, as measured.
RUNTIME_BYTES = 150 * 1000 * 1000
# The file as mapped, and its copy repacked for the CPU's dot products (Q4_0: about as large).
MODEL_COPIES = 2
# Left to the rest of the host: a tenth, and at least what sshd, journald and apt need together.
HEADROOM_FRACTION = 0.1
MIN_HEADROOM_BYTES = 256 * MIB
# Tried in this order until one fits. Of five clients on 4 slots one waits for a whole answer.
PARALLEL_SLOTS = (8, 4, 2, 1)
SLOTS_PER_CORE = 4  # a judgement: with two cores for a worker, memory alone decides
# llama.cpp's own default is 8192 MiB, more than most of these boards have.
CACHE_RAM_MIB = 256  # about 21,000 tokens of parked prompts
CACHE_RAM_FROM_BYTES = 3 * GIB
MEMLOCK_SLACK_BYTES = 256 * MIB
DEFAULT_MEMLOCK_BYTES = 8 * MIB  # the kernel's and systemd's own default
# membind is strict: a node must hold its worker twice over, or binding ends in the OOM killer.
NODE_MEMORY_FACTOR = 2

# --- Swap -----------------------------------------------------------------------------------------
SWAPPINESS_DISK = 10  # swapping weights to flash costs seconds: only when there is no other way
# kernel docs, vm.swappiness: swap in memory is about as cheap as the file cache, so 100 and above.
SWAPPINESS_ZRAM = 100
SWAPPINESS_OVER_100_SINCE = (5, 8)  # older kernels refuse more than 100
ZRAM_UP_TO_RAM_BYTES = 4 * GIB  # "4 GB" boards and below; larger ones hold the model many times
ZRAM_RAM_FRACTION = 0.5  # zram-generator's own default
ZRAM_PRIORITY = 100  # zram-generator's own default: before any disk swap, whose default is negative
# The second only where it has to win
SYSCTL_NAMES = tuple(map(posixpath.basename, (layout.SYSCTL_CONF, layout.SYSCTL_CONF_LAST)))


# `systemd-detect-virt --container` says one of these; kernel-wide knobs belong to their host.
CONTAINERS = frozenset(
    {"openvz", "lxc", "lxc-libvirt", "systemd-nspawn", "docker", "podman", "rkt", "wsl"}
    | {"proot", "pouch", "container-other"}
)
# Missing thing -> package, by package manager.
PACKAGES = {
    "apt": {
        "libgomp": "libgomp1",
        "libstdcxx": "libstdc++6",
        "numactl": "numactl",
        "chrt": "util-linux",
    },
    "dnf": {
        "libgomp": "libgomp",
        "libstdcxx": "libstdc++",
        "numactl": "numactl",
        "chrt": "util-linux",
    },
}
# vcgencmd get_throttled; bits 16 to 19 say the same of the time since boot.
THROTTLE_BITS = {
    0: "under-voltage",
    1: "frequency capped",
    2: "throttled",
    3: "soft temperature limit",
}
HOT_C = 80.0  # a Raspberry Pi begins to throttle here
CLOCK_SKEW_WARNING_S = 60.0

Reasons = tuple[Reason, ...]


def plan_tuning(profile: HostProfile, settings: Settings) -> TuningPlan:
    """Every knob for one host. Never raises: what cannot be is clamped, with its reason.

    What makes a host unfit for the roll-out altogether is check_host's business.
    """
    packages, why_packages = plan_packages(profile, settings)
    usable, why_cpus = plan_cpus(profile, settings)
    nodes, bindable, why_nodes = plan_nodes(profile, settings, usable, packages)
    cache_ram_mib, why_cache = plan_cache(profile, settings)
    room = worker_bytes(settings, settings.n_parallel or PARALLEL_SLOTS[0], cache_ram_mib)
    workers, why_workers = plan_workers(
        profile, settings, usable, nodes if bindable else (), room, cache_ram_mib
    )
    cpus, numa, worker_cpus, why_numa = plan_numa(
        profile, settings, usable, nodes, bindable, workers, room
    )
    n_threads, n_threads_batch, why_threads = plan_threads(profile, settings, cpus, worker_cpus)
    n_parallel, why_parallel = plan_slots(profile, settings, cpus, workers, cache_ram_mib)
    kv_cache_bytes = workers * kv_bytes(settings, n_parallel)
    needed_bytes = workers * worker_bytes(settings, n_parallel, cache_ram_mib)
    mlock, limits, why_limits = plan_limits(profile, settings, workers, needed_bytes)
    use_chrt, scheduling, why_scheduling = plan_scheduling(profile, settings, cpus, packages)
    cpu_weight, why_weight = plan_cpu_weight(profile, settings)
    allowed_cpus, why_allowed = plan_allowed_cpus(profile, cpus)
    reserved_cpus, why_reserved = plan_reserved_cpus(profile, settings, cpus, allowed_cpus)
    affinity, why_affinity = plan_affinity(profile, cpus, allowed_cpus, numa, use_chrt)
    zram, why_zram = plan_zram(profile, settings)
    swappiness, why_swappiness = plan_swappiness(profile, settings, zram)
    sysctl_name, why_sysctl_name = plan_sysctl_name(profile, swappiness)
    cpu_governor, why_governor = plan_cpu_governor(profile, settings)
    omp_wait_policy, why_omp = plan_omp_wait_policy(profile, scheduling, cpu_weight)
    engine = EnginePlan(
        n_threads=n_threads,
        n_threads_batch=n_threads_batch,
        n_ctx=settings.n_ctx,
        n_parallel=n_parallel,
        n_batch=settings.n_batch,
        cache_ram_mib=cache_ram_mib,
        mlock=mlock,
    )
    return TuningPlan(
        engine=engine,
        workers=workers,
        cpus=cpus,
        worker_cpus=worker_cpus,
        allowed_cpus=allowed_cpus,
        reserved_cpus=reserved_cpus,
        affinity=affinity,
        numa=numa,
        use_chrt=use_chrt,
        scheduling=scheduling,
        cpu_weight=cpu_weight,
        limits=limits,
        cpu_governor=cpu_governor,
        swappiness=swappiness,
        sysctl_name=sysctl_name,
        zram=zram,
        omp_wait_policy=omp_wait_policy,
        packages=packages,
        memory_needed_bytes=needed_bytes,
        kv_cache_bytes=kv_cache_bytes,
        reasons=(
            *why_cpus,
            *why_threads,
            *why_workers,
            *why_allowed,
            *why_reserved,
            *why_affinity,
            *why_weight,
            *why_scheduling,
            *why_omp,
            *why_governor,
            *why_nodes,
            *why_numa,
            *why_parallel,
            *why_memory(settings, n_parallel, workers, kv_cache_bytes, needed_bytes),
            *why_cache,
            *why_limits,
            *why_zram,
            *why_swappiness,
            *why_sysctl_name,
            *why_packages,
            *observations(profile, cpus),
            *LEFT_ALONE,
        ),
    )


# --- which CPUs -----------------------------------------------------------------------------------


def plan_cpus(profile: HostProfile, settings: Settings) -> tuple[CpuSet, Reasons]:
    """The CPUs the service may use: the mask, less isolated, small and housekeeping cores."""
    visible = visible_cpus(profile)
    reasons = []
    if len(visible) < len(profile.cpus_online):
        reasons.append(_why("cpus", f"services may run on {visible} only (cpuset or affinity)"))
    if settings.cpus is not None:
        wanted = explicit_cpus(settings)
        given = wanted & visible
        if given:
            text = f"{given}: set by the inventory"
            if given != wanted:
                text += f"; {wanted - given} of {wanted} cannot be used here"
            return given, (*reasons, _why("cpus", text, warning=given != wanted))
        text = f"cpus={settings.cpus} names no CPU that can be used here ({visible}): ignored"
        reasons.append(_why("cpus", text, warning=True))
    isolated = profile.kernel.isolated_cpus
    free = visible - isolated or visible
    if free != visible:
        text = f"{isolated} left out: isolcpus= keeps the scheduler from balancing there"
        reasons.append(_why("cpus", text))
    big, why_big = big_cores(profile, free)
    if why_big is not None:
        return big, (*reasons, why_big)
    cores = physical_cores(profile, free)
    if len(cores) < HOUSEKEEPING_FROM_CORES:
        text = f"{free}: all of {_count(len(cores), 'core')}, too few to set one aside"
        return free, (*reasons, _why("cpus", text))
    used = free - cores[0]
    text = f"{used}: all cores alike; {cores[0]} left to interrupts, ssh and the system"
    return used, (*reasons, _why("cpus", text))


def visible_cpus(profile: HostProfile) -> CpuSet:
    """Online CPUs within the cgroup's mask."""
    effective = profile.cgroup.effective_cpus
    if effective is None:
        return profile.cpus_online
    return profile.cpus_online & effective or profile.cpus_online


def explicit_cpus(settings: Settings) -> CpuSet:
    """settings.cpus; empty where it is no cpulist ("7-3"), which check_host reports."""
    try:
        return CpuSet.parse(settings.cpus or "")
    except ParseError:
        return CpuSet(cpus=())


def big_cores(profile: HostProfile, free: CpuSet) -> tuple[CpuSet, Reason | None]:
    """The fast clusters of `free`, with the reason; all of it and None where all are alike."""
    ranked = _ranked_clusters(profile.clusters, free)
    if not ranked:
        return free, None
    top = ranked[0][0]
    chosen = CpuSet(cpus=())
    names: list[str] = []
    for speed, cluster in ranked:
        enough = len(physical_cores(profile, chosen)) >= MIN_BIG_CORES
        if speed < BIG_CORE_FRACTION * top and enough:
            continue
        chosen = chosen | (cluster.cpus & free)
        if cluster.core_type and cluster.core_type not in names:
            names.append(cluster.core_type)
    if chosen == free:
        return free, None
    rest = free - chosen
    kind = f" ({', '.join(names)})" if names else ""
    text = (
        f"{chosen}: {len(chosen)} of {len(free)} CPUs, the fast cores{kind} only; "
        f"{rest} stay on line for the system, as the slowest thread sets the pace"
    )
    return chosen, _why("cpus", text)


def _ranked_clusters(
    clusters: tuple[CpuCluster, ...], free: CpuSet
) -> list[tuple[float, CpuCluster]]:
    """(speed, cluster), fastest first; [] where the kernel does not tell them apart."""
    present = [c for c in clusters if c.cpus & free]
    types = {c.core_type for c in present}
    capacities = [c.cpu_capacity for c in present]
    frequencies = [c.max_freq_khz for c in present]
    speeds: list[float]
    if {"core", "atom"} <= types:
        # Hybrid x86: boost frequencies lie close together, the cores do not.
        speeds = [1.0 if c.core_type == "core" else 0.5 for c in present]
    elif None not in capacities and len(set(capacities)) > 1:
        speeds = [float(value or 0) for value in capacities]
    elif None not in frequencies:
        speeds = [float(value or 0) for value in frequencies]
    else:
        return []
    pairs = zip(speeds, present, strict=True)
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1].cpus.cpus))


def physical_cores(profile: HostProfile, cpus: CpuSet) -> tuple[CpuSet, ...]:
    """`cpus` grouped by core: SMT siblings together, in the order of their first CPU."""
    cores = []
    seen: set[int] = set()
    siblings = {cpu: group for group in profile.smt_siblings for cpu in group.cpus}
    for cpu in cpus.cpus:
        if cpu in seen:
            continue
        core = siblings[cpu] & cpus if cpu in siblings else CpuSet(cpus=(cpu,))
        seen.update(core.cpus)
        cores.append(core)
    return tuple(cores)


def quota_threads(profile: HostProfile) -> int | None:
    """Threads a CFS quota can feed: a thread above it stalls all the others (ollama#17916)."""
    quota = profile.cgroup.quota_cpus
    return None if quota is None else max(1, math.floor(quota))


# --- threads and workers --------------------------------------------------------------------------


def plan_workers(
    profile: HostProfile,
    settings: Settings,
    cpus: CpuSet,
    nodes: tuple[NumaNode, ...],
    room: int,
    cache_ram_mib: int,
) -> tuple[int, Reasons]:
    """One process, or one a NUMA node: each is one more model in memory (fastapi#2425)."""
    smallest = worker_bytes(settings, 1, cache_ram_mib)
    by_memory = max(1, memory_budget(profile) // smallest)
    by_cores = max(1, len(physical_cores(profile, cpus)))
    by_cpus = min(by_cores, quota_threads(profile) or by_cores)
    most = min(by_memory, by_cpus)
    if settings.workers is not None:
        workers = min(settings.workers, most)
        if workers == settings.workers:
            return workers, (_why("workers", f"{workers}: set by the inventory"),)
        text = (
            f"{workers} instead of {settings.workers}: memory carries {by_memory} "
            f"of {mb(smallest)}, cores and quota carry {by_cpus}"
        )
        return workers, (_why("workers", text, warning=True),)
    if len(nodes) < 2:
        text = "1: slots inside one process share one model; a second worker is a second model"
        return 1, (_why("workers", text),)
    fits = all(holds(n, room) for n in nodes) and len(nodes) * room <= memory_budget(profile)
    if len(nodes) > most or not fits:
        text = f"1: {_count(len(nodes), 'NUMA node')}, but no room for {mb(room)} on each"
        return 1, (_why("workers", text),)
    text = f"{len(nodes)}: one a NUMA node, so that no weight crosses between nodes"
    return len(nodes), (_why("workers", text),)


def plan_threads(
    profile: HostProfile, settings: Settings, cpus: CpuSet, worker_cpus: tuple[CpuSet, ...]
) -> tuple[int, int, Reasons]:
    """(decode threads, prefill threads) of one worker."""
    workers = len(worker_cpus)
    share = min(len(physical_cores(profile, part)) for part in worker_cpus)
    quota = quota_threads(profile)
    by_quota = None if quota is None else max(1, quota // workers)
    if settings.threads is not None:
        most = min(len(part) for part in worker_cpus)
        most = most if by_quota is None else min(most, by_quota)
        threads = min(settings.threads, most)
        if threads == settings.threads:
            return threads, threads, (_why("threads", f"{threads}: set by the inventory"),)
        text = f"{threads} instead of {settings.threads}: no more CPUs for a worker on {cpus}"
        if by_quota == threads:
            text += f" under a CFS quota of {profile.cgroup.quota_cpus:g} CPUs"
        return threads, threads, (_why("threads", text, warning=True),)
    if by_quota is not None and by_quota < share:
        text = (
            f"{by_quota}: floor of the CFS quota of {profile.cgroup.quota_cpus:g} CPUs"
            f"{'' if workers == 1 else f' over {workers} workers'}, not {_count(share, 'core')}; "
            "a thread above the quota stalls all of them"
        )
        return by_quota, by_quota, (_why("threads", text),)
    decode = min(share, MAX_DECODE_THREADS)
    smt = any(len(core) > 1 for part in worker_cpus for core in physical_cores(profile, part))
    each = "" if workers == 1 else " a worker"
    text = f"{decode}{each}: one a core of {cpus}"
    if smt:
        text += "; SMT siblings add nothing to decode, which is bound by memory bandwidth"
    if decode < share:
        text = (
            f"{decode}{each}: of {share} cores; a model this small is not worth splitting "
            "further, prefill uses them all"
        )
    batch = _why("threads_batch", f"{share}{each}: prefill is bound by arithmetic, one a core")
    return decode, share, (_why("threads", text), batch)


# --- NUMA -----------------------------------------------------------------------------------------


def plan_nodes(
    profile: HostProfile, settings: Settings, cpus: CpuSet, packages: tuple[str, ...]
) -> tuple[tuple[NumaNode, ...], bool, Reasons]:
    """(nodes that the CPUs in use lie on, whether numactl can bind, reasons); () for one node."""
    nodes = real_nodes(profile, cpus)
    if len(nodes) < 2:
        shared = _count(len(profile.numa_nodes), "node")
        if len(profile.numa_nodes) > 1 and not _disjoint(profile.numa_nodes):
            text = (
                f"{shared} share their CPUs (numa=fake): emulated for memory interleaving, "
                "which a binding would undo"
            )
        elif len(profile.numa_nodes) > 1:
            text = f"{shared}, but the CPUs in use are on one: nothing to spread"
        else:
            text = "one node: nothing to bind to"
        return (), False, (_why("numa", text, left_alone=True),)
    if settings.numa == "off":
        return (), False, (_why("numa", "numa=off in the inventory", left_alone=True),)
    if not settings.holds_model:
        text = "what the upstream's model takes is not known: a strict binding could end in the OOM"
        return (), False, (_why("numa", text, left_alone=True),)
    if not numactl_usable(profile, packages):
        how = "fails here (EPERM is usual in containers)" if profile.tools.numactl else "is missing"
        text = f"{len(nodes)} nodes, but numactl {how}: no binding"
        return nodes, False, (_why("numa", text, left_alone=True),)
    return nodes, True, ()


def real_nodes(profile: HostProfile, cpus: CpuSet) -> tuple[NumaNode, ...]:
    """Nodes with CPUs and memory that a service may use; a binding to any other is refused.

    Emulated nodes share their CPUs, so they are none (raspberrypi/linux#6273).
    """
    if not _disjoint(profile.numa_nodes):
        return ()
    allowed = profile.cgroup.effective_nodes
    return tuple(
        n
        for n in profile.numa_nodes
        if n.cpus & cpus and n.mem_total_bytes != 0 and (not allowed or n.node in allowed)
    )


def _disjoint(nodes: tuple[NumaNode, ...]) -> bool:
    return sum(len(n.cpus) for n in nodes) == len({cpu for n in nodes for cpu in n.cpus.cpus})


def numactl_usable(profile: HostProfile, packages: tuple[str, ...]) -> bool:
    """It works, or this run installs it on a host that has no reason to refuse it."""
    return profile.tools.numactl_works or PACKAGES["apt"]["numactl"] in packages


def plan_numa(
    profile: HostProfile,
    settings: Settings,
    cpus: CpuSet,
    nodes: tuple[NumaNode, ...],
    bindable: bool,
    workers: int,
    worker_size: int,
) -> tuple[CpuSet, NumaBinding | None, tuple[CpuSet, ...], Reasons]:
    """(cpus, binding, cpus of each worker): one node for one worker, one each for several."""
    if not nodes:
        return cpus, None, split_cpus(profile, cpus, workers), ()
    reasons = []
    if workers == 1 and settings.cpus is None:
        # The node with most cores to give: node 0 has lost one to housekeeping.
        best = max(nodes, key=lambda n: (len(n.cpus & cpus), -n.node))
        if not holds(best, worker_size):
            text = f"no node has twice the {mb(worker_size)} of a worker: spread, not bound"
            return cpus, None, (cpus,), (_why("numa", text, left_alone=True),)
        cpus, nodes = best.cpus & cpus, (best,)
        text = f"{cpus}: one worker stays on node {best.node}, its threads beside its weights"
        reasons.append(_why("cpus", text))
    parts = split_over_nodes(profile, cpus, nodes, workers)
    if not bindable:
        return cpus, None, parts, tuple(reasons)
    names = ",".join(str(n.node) for n in nodes)
    if not all(holds(n, worker_size) for n in nodes):
        text = f"nodes {names} have less than twice the {mb(worker_size)} of a worker: not bound"
        return cpus, None, parts, (*reasons, _why("numa", text, left_alone=True))
    text = f"--physcpubind={cpus} --membind={names}: by CPU number, within the cgroup's mask"
    binding = NumaBinding(cpus=cpus, nodes=tuple(n.node for n in nodes))
    return cpus, binding, parts, (*reasons, _why("numa", text))


def holds(node: NumaNode, worker_size: int) -> bool:
    """Enough memory on a node for a strict binding; False where the kernel does not tell."""
    return (node.mem_total_bytes or 0) >= NODE_MEMORY_FACTOR * worker_size


def split_over_nodes(
    profile: HostProfile, cpus: CpuSet, nodes: tuple[NumaNode, ...], workers: int
) -> tuple[CpuSet, ...]:
    """CPUs of each worker, none of several across two nodes where the cores allow it."""
    if workers == 1:
        return (cpus,)  # also across nodes: the inventory names them
    parts: list[CpuSet] = []
    for index, node in enumerate(nodes):
        own = node.cpus & cpus
        count = len(range(index, workers, len(nodes)))  # workers dealt out in turn
        if len(physical_cores(profile, own)) < count:
            return split_cpus(profile, cpus, workers)
        if count:
            parts.extend(split_cpus(profile, own, count))
    return tuple(parts)


def split_cpus(profile: HostProfile, cpus: CpuSet, workers: int) -> tuple[CpuSet, ...]:
    """Whole cores dealt to `workers` in runs of equal length; the remainder to the last."""
    cores = physical_cores(profile, cpus)
    each = max(1, len(cores) // workers)
    parts = []
    for worker in range(workers):
        end = len(cores) if worker == workers - 1 else (worker + 1) * each
        part = cores[worker * each : end]
        parts.append(CpuSet.of(cpu for core in part for cpu in core.cpus))
    return tuple(parts)


# --- memory ---------------------------------------------------------------------------------------


def kv_bytes(settings: Settings, n_parallel: int) -> int:
    """KV cache of one worker."""
    if not settings.holds_model:
        return 0
    return settings.n_ctx * n_parallel * KV_BYTES_PER_TOKEN


def worker_bytes(settings: Settings, n_parallel: int, cache_ram_mib: int) -> int:
    """All that one worker may come to hold; the model of another server is not ours to count."""
    if not settings.holds_model:
        return RUNTIME_BYTES
    return (
        MODEL_COPIES * settings.model_size_bytes
        + RUNTIME_BYTES
        + kv_bytes(settings, n_parallel)
        + cache_ram_mib * MIB
    )


def total_memory(profile: HostProfile) -> int:
    """MemTotal, or the cgroup's limit where that is less."""
    limit = profile.cgroup.memory_limit_bytes
    total = profile.mem_total_settled_bytes
    return total if limit is None else min(total, limit)


def available_memory(profile: HostProfile) -> int:
    """MemAvailable without an edgellm that runs already, the same from run to run."""
    return min(profile.mem_settled_bytes, total_memory(profile))


def memory_budget(profile: HostProfile) -> int:
    """What the service may take: available memory less the host's own headroom."""
    headroom = max(MIN_HEADROOM_BYTES, int(total_memory(profile) * HEADROOM_FRACTION))
    return max(0, available_memory(profile) - headroom)


def plan_cache(profile: HostProfile, settings: Settings) -> tuple[int, Reasons]:
    """llama.cpp's cache of evicted prompts in MiB, by total memory: stable from run to run."""
    if not settings.holds_model:
        return 0, ()
    if total_memory(profile) >= CACHE_RAM_FROM_BYTES:
        text = f"{CACHE_RAM_MIB} MiB for parked prompts; llama.cpp's default is 8192 MiB"
        return CACHE_RAM_MIB, (_why("cache_ram", text),)
    text = f"0: {mb(total_memory(profile))} of memory; prefixes are still kept inside the slots"
    return 0, (_why("cache_ram", text),)


def plan_slots(
    profile: HostProfile, settings: Settings, cpus: CpuSet, workers: int, cache_ram_mib: int
) -> tuple[int, Reasons]:
    """Requests that one worker decodes together (continuous batching)."""
    budget = memory_budget(profile)

    def fits(slots: int) -> bool:
        return workers * worker_bytes(settings, slots, cache_ram_mib) <= budget

    if settings.n_parallel is not None:
        slots = next((n for n in range(settings.n_parallel, 1, -1) if fits(n)), 1)
        if slots == settings.n_parallel:
            return slots, (_why("n_parallel", f"{slots}: set by the inventory"),)
        text = f"{slots} instead of {settings.n_parallel}: {mb(budget)} of memory to spend"
        return slots, (_why("n_parallel", text, warning=True),)
    cores = len(physical_cores(profile, cpus))
    by_cpus = SLOTS_PER_CORE * max(1, min(cores, quota_threads(profile) or cores) // workers)
    slots = next((n for n in PARALLEL_SLOTS if n <= by_cpus and fits(n)), 1)
    if slots == PARALLEL_SLOTS[0]:
        text = f"{slots} requests decode together, each with its own {settings.n_ctx} tokens"
    elif fits(PARALLEL_SLOTS[0]):
        text = f"{slots}: the time of one CPU serves no more at a readable pace"
    else:
        text = f"{slots}: {mb(budget)} of memory to spend do not carry more"
    return slots, (_why("n_parallel", text),)


def why_memory(
    settings: Settings, n_parallel: int, workers: int, kv_cache: int, needed: int
) -> Reasons:
    if not settings.holds_model:
        text = f"{mb(needed)}: engine=forward holds no model; the upstream's is its own business"
        return (_why("memory", text),)
    each = "" if workers == 1 else f" x {workers} workers"
    whose = "" if workers == 1 else f" for {workers} workers"
    kv = (
        f"{mb(kv_cache)}: {settings.n_ctx} tokens x {_count(n_parallel, 'slot')}{each} "
        f"x {KV_BYTES_PER_TOKEN // 1024} KiB a token"
    )
    batch = (
        f"{settings.n_batch}: a short request waits for one batch of a long prompt, not for all "
        "of it"
    )
    memory = (
        f"{mb(needed)}{whose}: the model twice (mapped, and repacked "
        f"for this CPU), KV and prompt cache, and {mb(RUNTIME_BYTES)} of runtime"
    )
    return (_why("kv_cache", kv), _why("n_batch", batch), _why("memory", memory))


def plan_limits(
    profile: HostProfile, settings: Settings, workers: int, needed_bytes: int
) -> tuple[bool, Limits, Reasons]:
    """Whether the engine locks the model, and the limits that allow it. (mlock, limits, reasons)"""
    why_nofile = _why("nofile", f"LimitNOFILE={settings.nofile} in the unit: PAM limits miss it")
    if not settings.holds_model:
        text = (
            "unlimited: engine=forward locks nothing, and what the upstream may need to is unknown"
        )
        limits = Limits(nofile=settings.nofile, memlock_bytes=None)
        return False, limits, (_why("memlock", text), why_nofile)
    locked = MODEL_COPIES * settings.model_size_bytes
    ample = workers * locked < available_memory(profile) and needed_bytes <= memory_budget(profile)
    warning = False
    if settings.mlock is None:
        mlock = ample
        text = (
            f"the model stays in memory: {mb(workers * locked)} "
            f"of {mb(available_memory(profile))} available"
        )
        if not ample:
            text = (
                f"{mb(workers * locked)} locked of {mb(available_memory(profile))} available "
                "would starve the host"
            )
    elif settings.mlock and not ample:
        mlock, warning = False, True
        text = f"refused: {mb(workers * locked)} locked of {mb(available_memory(profile))}"
    else:
        mlock = settings.mlock
        text = "set by the inventory"
    memlock = locked + MEMLOCK_SLACK_BYTES if mlock else DEFAULT_MEMLOCK_BYTES
    why_mlock = _why("mlock", text, left_alone=not mlock and not warning, warning=warning)
    why_memlock = _why(
        "memlock",
        f"LimitMEMLOCK of {mb(memlock)}: "
        + ("both copies of the model and some slack" if mlock else "the kernel's own default"),
    )
    limits = Limits(nofile=settings.nofile, memlock_bytes=memlock)
    return mlock, limits, (why_mlock, why_memlock, why_nofile)


# --- scheduling -----------------------------------------------------------------------------------


def plan_scheduling(
    profile: HostProfile, settings: Settings, cpus: CpuSet, packages: tuple[str, ...]
) -> tuple[bool, Scheduling, Reasons]:
    """(use chrt, policy): set at exec, as chrt -p on a running server changes one thread only."""
    if not profile.tools.chrt and PACKAGES["apt"]["chrt"] not in packages:
        text = "chrt is not there: policy other"
        plain = Scheduling(policy="other", priority=0)
        return False, plain, (_why("scheduling", text, left_alone=True),)
    policy, priority = settings.scheduling, settings.scheduling_priority
    reasons = []
    if policy in ("rr", "fifo"):
        refused = realtime_refused(profile, settings)
        if refused is not None:
            reasons.append(_why("scheduling", f"{policy} -> batch: {refused}", warning=True))
            policy, priority = "batch", 0
        else:
            text = (
                f"{policy} at priority {priority}, acknowledged by allow_realtime; the host goes "
                "back to batch by itself unless the roll-out confirms it"
            )
            if cpus == visible_cpus(profile):
                text += "; the server may use every CPU: a busy loop takes the host off the air"
            return (
                True,
                Scheduling(policy=policy, priority=priority),
                (_why("scheduling", text, warning=True),),
            )
    if policy == "batch" and not reasons:
        text = (
            "batch: set at exec, costs nothing and gains nothing measurable; CPUWeight is the lever"
        )
        reasons.append(_why("scheduling", text))
    elif not reasons:
        reasons.append(_why("scheduling", f"{policy}: set by the inventory"))
    realtime = "rr and fifo need allow_realtime: they can take a host off the air"
    reasons.append(_why("realtime", realtime, left_alone=True))
    return True, Scheduling(policy=policy, priority=priority), tuple(reasons)


def realtime_refused(profile: HostProfile, settings: Settings) -> str | None:
    """Why rr and fifo cannot be had on this host, or None where they can."""
    if not settings.allow_realtime:  # Settings refuses this too: a host may hang
        return "allow_realtime does not acknowledge that it can hang the host"
    if is_tegra(profile):
        return "real-time throttling does not work on Tegra kernels (linux-tegra-4.9#37)"
    if in_container(profile):
        return f"real-time is refused inside {profile.virtualization}"
    if not settings.holds_model:
        return "a unit of others has no way back by itself where the host hangs"
    budget_us = profile.kernel.rt_runtime_us
    if budget_us is None:
        return "the kernel does not tell its real-time budget (kernel.sched_rt_runtime_us)"
    if budget_us < 0 or budget_us >= RT_PERIOD_US:
        return (
            f"kernel.sched_rt_runtime_us={budget_us} lets real time take all of a CPU, and with it "
            "the host; 950000 is the kernel's default"
        )
    if budget_us == 0:
        return "kernel.sched_rt_runtime_us=0 leaves no time at all to real-time tasks"
    if not profile.tools.realtime_works:
        text = "chrt --fifo was refused when the host was probed"
        if profile.cgroup.version == 1:
            text += ": on cgroup v1 a kernel with RT_GROUP_SCHED gives services no budget"
        return text
    return None


def plan_cpu_governor(profile: HostProfile, settings: Settings) -> tuple[str | None, Reasons]:
    """The clock's governor, set only where the inventory asks for one."""
    wanted, cpufreq = settings.cpu_governor, profile.cpufreq
    if in_container(profile):
        text = f"the clock belongs to the kernel that {profile.virtualization} shares"
        return None, (_governor(text, wanted),)
    if cpufreq is None:
        text = "no cpufreq here: firmware or hypervisor rule the clock"
        return None, (_governor(text, wanted),)
    now = ", ".join(cpufreq.governors)
    if wanted is None:
        return None, (_governor_seen(cpufreq),)
    if wanted not in cpufreq.available:
        offered = ", ".join(cpufreq.available) or "none"
        return None, (_governor(f"{now} stays: the kernel offers {offered}", wanted),)
    text = f"{wanted} on all cores: set by the inventory"
    if cpufreq.governors != (wanted,):
        text += f" (it was {now})"
    others = []
    if profile.tools.power_profiles_daemon:
        others.append("power-profiles-daemon")
    if profile.tools.tuned_profile is not None:
        others.append(f"tuned ({profile.tools.tuned_profile})")
    if others:
        text += f"; {' and '.join(others)} may set another by its own profile"
    return wanted, (_why("cpu_governor", text, warning=bool(others)),)


def _governor(text: str, wanted: str | None) -> Reason:
    """A governor that is not set; a warning where one was asked for."""
    if wanted is None:
        return _why("cpu_governor", text, left_alone=True)
    return _why("cpu_governor", f"{wanted} cannot be had: {text}", warning=True)


def _governor_seen(cpufreq: CpuFreq) -> Reason:
    now = ", ".join(cpufreq.governors)
    if "powersave" not in cpufreq.governors:
        text = f"{now}, as it is; cpu_governor in the inventory sets another"
        return _why("cpu_governor", text, left_alone=True)
    if set(cpufreq.available) <= PSTATE_GOVERNORS:
        text = f"{now}, as it is: this processor's own powersave follows the load"
        return _why("cpu_governor", text, left_alone=True)
    text = f"{now} keeps the clock at its lowest: cpu_governor=schedutil follows the load"
    return _why("cpu_governor", text, warning=True)


def plan_cpu_weight(profile: HostProfile, settings: Settings) -> tuple[int | None, Reasons]:
    """CPUWeight= of our own top-level slice: weights compete among siblings."""
    if "cpu" in profile.cgroup.controllers:
        text = (
            f"{settings.cpu_weight} on edgellm.slice (others have 100): kept median TTFT under "
            "load at 494 ms instead of 2306 ms where it was measured"
        )
        return settings.cpu_weight, (_why("cpu_weight", text),)
    return None, (_why("cpu_weight", _no_controller(profile, "cpu"), warning=True),)


def plan_allowed_cpus(profile: HostProfile, cpus: CpuSet) -> tuple[CpuSet | None, Reasons]:
    """AllowedCPUs= of edgellm.slice, for a real subset and where systemd can set it."""
    reasons: list[Reason] = []
    if "memory" not in profile.cgroup.controllers:
        reasons.append(_why("memory_cgroup", _no_controller(profile, "memory"), left_alone=True))
    if cpus == visible_cpus(profile):
        text = f"the server may use all of {cpus}: nothing to restrict"
        return None, (_why("allowed_cpus", text, left_alone=True), *reasons)
    if profile.cgroup.version == 2 and "cpuset" in profile.cgroup.controllers:
        text = f"{cpus} on edgellm.slice: every thread of the service inherits it"
        return cpus, (_why("allowed_cpus", text), *reasons)
    return None, (
        _why("allowed_cpus", _no_controller(profile, "cpuset"), warning=True),
        *reasons,
    )


def plan_reserved_cpus(
    profile: HostProfile, settings: Settings, cpus: CpuSet, allowed_cpus: CpuSet | None
) -> tuple[CpuSet | None, Reasons]:
    """AllowedCPUs= of system.slice and user.slice: all cores but ours, where asked for."""
    if not settings.reserve_cpus:
        text = (
            "reserve_cpus is off: keeping others off our cores is harsh, the weight does it when "
            "needed"
        )
        return None, (_why("reserved_cpus", text, left_alone=True),)
    visible = visible_cpus(profile)
    # isolcpus= is nobody's: named in a cpuset, tasks would be put there and never moved away.
    rest = visible - cpus - profile.kernel.isolated_cpus
    whole = [core for core in physical_cores(profile, visible) if not core - rest]
    if not whole:
        text = (
            f"not reserved: beside {cpus} no whole core is left to system.slice and user.slice; "
            "cpus in the inventory can leave one"
        )
        return None, (_why("reserved_cpus", text, warning=True),)
    if allowed_cpus is None:
        text = f"not reserved: {_no_controller(profile, 'cpuset')}"
        return None, (_why("reserved_cpus", text, warning=True),)
    text = (
        f"{rest} for system.slice and user.slice, {cpus} for the server alone: set by the "
        "inventory (reserve_cpus)"
    )
    return rest, (_why("reserved_cpus", text),)


def plan_affinity(
    profile: HostProfile,
    cpus: CpuSet,
    allowed_cpus: CpuSet | None,
    numa: NumaBinding | None,
    has_util_linux: bool,
) -> tuple[CpuSet | None, Reasons]:
    """The server's own affinity, for a subset that neither the cgroup nor numactl holds it to."""
    # What starts has all CPUs but the isolated ones
    all_by_itself = cpus == visible_cpus(profile) and not cpus & profile.kernel.isolated_cpus
    if all_by_itself or allowed_cpus is not None or numa is not None:
        return None, ()
    if not has_util_linux:
        text = f"taskset is not there: nothing but its thread count keeps the server to {cpus}"
        return None, (_why("affinity", text, left_alone=True),)
    text = f"{cpus} by taskset at exec, in place of AllowedCPUs: the server could leave it"
    return cpus, (_why("affinity", text),)


def _no_controller(profile: HostProfile, name: str) -> str:
    """Why a controller is not there, and what brings it back."""
    if name == "cpuset" and profile.cgroup.version == 1:
        return (
            "systemd has no AllowedCPUs= on cgroup v1: boot with systemd.unified_cgroup_hierarchy=1"
        )
    if profile.cgroup.version is None:
        return f"no {name} controller: no cgroup hierarchy to be seen"
    if profile.cgroup.version == 2 and not profile.cgroup.controllers:
        return f"no {name} controller: none is on cgroup v2 here, v1 or an outer host holds them"
    if in_container(profile):
        return f"no {name} controller: {profile.virtualization} does not delegate it"
    if is_raspberry_pi(profile):
        return (
            f"no {name} controller: the Raspberry Pi's firmware turns it off; add "
            f"cgroup_enable={name} to the line in /boot/firmware/cmdline.txt and reboot"
        )
    return (
        f"no {name} controller: remove cgroup_disable={name} from the kernel command line, or "
        f"add cgroup_enable={name}, and reboot"
    )


def plan_omp_wait_policy(
    profile: HostProfile, scheduling: Scheduling, cpu_weight: int | None
) -> tuple[str | None, Reasons]:
    """PASSIVE only where spinning does harm: it costs some 5 % of TTFT on an idle host."""
    if scheduling.is_realtime:
        return "PASSIVE", (_why("omp_wait_policy", "PASSIVE: real-time threads must not spin"),)
    if profile.cgroup.quota_cpus is not None:
        return "PASSIVE", (_why("omp_wait_policy", "PASSIVE: spinning would use up the CFS quota"),)
    if cpu_weight is None:
        text = "PASSIVE: no CPUWeight here, and it halved TTFT under load (1216 against 2306 ms)"
        return "PASSIVE", (_why("omp_wait_policy", text),)
    text = "CPUWeight keeps the cores; sleeping between steps would cost TTFT on an idle host"
    return None, (_why("omp_wait_policy", text, left_alone=True),)


# --- swap -----------------------------------------------------------------------------------------


def plan_zram(profile: HostProfile, settings: Settings) -> tuple[ZramPlan, Reasons]:
    """One manager of zram, never two: the one there, else zram-generator, else our own unit."""
    manager = profile.tools.zram_manager
    foreign_swap = any(s.is_zram for s in profile.swaps) and manager != OWN_ZRAM_MANAGER
    none = ZramPlan(
        manager="none", adopted_manager=None, size_bytes=None, algorithm=None, priority=None
    )

    def left(text: str) -> tuple[ZramPlan, Reasons]:
        return none, (_why("zram", text, left_alone=True),)

    if in_container(profile):
        return left(f"swap belongs to the host of {profile.virtualization}")
    if settings.zram == "off":
        return left("zram=off in the inventory")
    if foreign_swap or (manager is not None and manager != OWN_ZRAM_MANAGER):
        adopted = manager if manager != OWN_ZRAM_MANAGER else None
        text = f"{adopted or 'an unknown manager'} is in charge: a second one would break both"
        if not foreign_swap:
            text += "; it has no zram swap on now"
        plan = ZramPlan(
            manager="adopted",
            adopted_manager=adopted or "unknown",
            size_bytes=None,
            algorithm=None,
            priority=None,
        )
        return plan, (_why("zram", text, left_alone=True),)
    if not profile.kernel.zram_module:
        return left(f"kernel {profile.kernel.release} has no zram module (ubuntu-rockchip#161)")
    total = profile.mem_total_settled_bytes
    if settings.zram_size_bytes is None and total > ZRAM_UP_TO_RAM_BYTES:
        return left(f"{mb(total)} of memory hold the model several times over; set up to 4 GiB")
    most = int(total * ZRAM_RAM_FRACTION)
    size = min(settings.zram_size_bytes or most, most) // MIB * MIB
    # log2ram and the like hold a device for themselves: zram-generator's [zram0] would collide,
    # our own unit asks the kernel for a new one.
    held = [d.name for d in profile.zram_devices if d.disksize_bytes > 0 and not d.is_swap]
    by_generator = profile.tools.zram_generator and not held
    how = "by zram-generator" if by_generator else "by our own unit"
    text = f"{size // MIB} MiB {how}: half of memory at most, the kernel's default compressor"
    if settings.zram_size_bytes is not None and size < settings.zram_size_bytes // MIB * MIB:
        text += f", instead of {settings.zram_size_bytes // MIB} MiB"
    if held:
        text += f"; {', '.join(held)} belongs to others and is not touched"
    plan = ZramPlan(
        manager="zram-generator" if by_generator else "own-unit",
        adopted_manager=None,
        size_bytes=size,
        algorithm=None,  # the kernel's default is always built; lz4 and zstd may not be
        priority=ZRAM_PRIORITY,
    )
    return plan, (_why("zram", text),)


def plan_swappiness(
    profile: HostProfile, settings: Settings, zram: ZramPlan
) -> tuple[int | None, Reasons]:
    """vm.swappiness as it must be once zram is as planned."""
    reasons: list[Reason] = []
    if in_container(profile) and settings.swappiness is None:
        text = f"vm.swappiness belongs to the kernel that {profile.virtualization} shares"
        return None, (_why("swappiness", text, left_alone=True),)
    if profile.tools.tuned_profile is not None:
        text = (
            f"tuned ({profile.tools.tuned_profile}) applies its own sysctls when it starts, and "
            "then /etc/sysctl.d again (reapply_sysctl=1, its default): the value there wins"
        )
        reasons.append(_why("tuned", text))
    disk = [s.path for s in profile.swaps if not s.is_zram]
    kept_zram = any(s.is_zram for s in profile.swaps) and (
        profile.tools.zram_manager != OWN_ZRAM_MANAGER
    )
    with_zram = kept_zram or zram.manager in ("zram-generator", "own-unit")
    warning = False
    if settings.swappiness is not None:
        value = settings.swappiness
        text = f"{value}: set by the inventory"
        if value > 100 and kernel_version(profile) < SWAPPINESS_OVER_100_SINCE:
            value, warning = 100, True
            text = f"100 instead of {settings.swappiness}: kernels before 5.8 refuse more"
    elif disk:
        value = SWAPPINESS_DISK
        text = f"{value}: swap on {', '.join(disk)}; weights must not go to disk"
    elif with_zram:
        value = SWAPPINESS_ZRAM
        text = f"{value}: zram is the only swap, and cheaper than reading the model again"
    else:
        value = SWAPPINESS_DISK
        text = f"{value}: no swap now, so without effect; right the day a disk swap is added"
    return value, (_why("swappiness", text, warning=warning), *reasons)


def plan_sysctl_name(profile: HostProfile, swappiness: int | None) -> tuple[str, Reasons]:
    """Our file's name in /etc/sysctl.d: systemd-sysctl applies files in the order of their names,
    whatever their directories, and the last one wins (sysctl.d(5))."""
    first, last = SYSCTL_NAMES
    names = {path: posixpath.basename(path) for path in profile.swappiness_files}
    later = [path for path, name in names.items() if name > first]
    if swappiness is None or not later:
        return first, ()
    beaten = [path for path in later if names[path] < last]
    lasting = [path for path in later if names[path] > last]
    reasons = []
    if beaten:
        text = f"{last}: {', '.join(beaten)} sets vm.swappiness too, and would win over {first}"
        reasons.append(_why("sysctl_name", text))
    if lasting:
        text = f"{', '.join(lasting)} sets vm.swappiness again at boot, after ours: remove it"
        reasons.append(_why("sysctl_name", text, warning=True))
    return last if beaten else first, tuple(reasons)


# --- packages -------------------------------------------------------------------------------------


def plan_packages(profile: HostProfile, settings: Settings) -> tuple[tuple[str, ...], Reasons]:
    """Packages to install, by the names of the host's package manager."""
    missing = missing_tools(profile, settings)
    manager = profile.tools.package_manager
    if not missing:
        text = "nothing to install: libgomp, libstdc++ and chrt are there"
        return (), (_why("packages", text, left_alone=True),)
    if manager is None or not settings.install_packages:
        why = "no apt or dnf here" if manager is None else "install_packages is off"
        text = f"{', '.join(missing)} missing, not installed: {why}"
        return (), (_why("packages", text, left_alone=True),)
    names = tuple(sorted({PACKAGES[manager][tool] for tool in missing}))
    return names, (_why("packages", f"{', '.join(names)}: missing, by {manager}"),)


def missing_tools(profile: HostProfile, settings: Settings) -> tuple[str, ...]:
    """Keys of PACKAGES that this host lacks; numactl only where there are nodes to bind to."""
    tools = profile.tools
    binds = (
        settings.numa == "auto"
        and not in_container(profile)
        and len(real_nodes(profile, visible_cpus(profile))) > 1
    )
    wanted = {
        "libgomp": tools.libgomp,
        "libstdcxx": tools.libstdcxx,
        "numactl": tools.numactl or not binds,
        "chrt": tools.chrt,
    }
    return tuple(tool for tool, there in wanted.items() if not there)


# --- what is seen and what is left alone ----------------------------------------------------------


def observations(profile: HostProfile, cpus: CpuSet) -> Reasons:
    """What the operator should know of a host, though no knob of ours changes it."""
    reasons = []
    if profile.tools.irqbalance and cpus != visible_cpus(profile):
        text = (
            f"it may put interrupts on our cores: IRQBALANCE_BANNED_CPULIST={cpus} in "
            "/etc/default/irqbalance (/etc/sysconfig/irqbalance with dnf) keeps them off"
        )
        reasons.append(_why("irqbalance", text))
    if profile.tools.power_profiles_daemon:
        text = "it rules the clock by its own profile: powerprofilesctl set performance keeps it up"
        reasons.append(_why("power_profiles_daemon", text))
    health = profile.health
    if health.throttled_flags:
        now = [w for bit, w in THROTTLE_BITS.items() if health.throttled_flags & 1 << bit]
        past = [w for bit, w in THROTTLE_BITS.items() if health.throttled_flags & 1 << bit + 16]
        when = ", ".join(now) + " now" if now else ", ".join(past) + " since boot"
        text = f"{when} ({health.throttled_flags:#x}): check the power supply and the cooling"
        reasons.append(_why("throttling", text, warning=True))
    if health.temperature_c is not None and health.temperature_c >= HOT_C:
        text = f"{health.temperature_c:.0f} C: the board lowers its clock at such heat"
        reasons.append(_why("temperature", text, warning=True))
    if health.clock_skew_s is not None and abs(health.clock_skew_s) > CLOCK_SKEW_WARNING_S:
        text = f"{health.clock_skew_s:+.0f} s from the control machine: no file time is relied on"
        reasons.append(_why("clock", text, warning=True))
    if profile.kernel.page_size_bytes != 4096:
        text = f"{profile.kernel.page_size_bytes // 1024} KiB pages: the aarch64 wheel carries them"
        reasons.append(_why("page_size", text, left_alone=True))
    if profile.tools.selinux_enforcing:
        text = "enforcing: files are placed with restorecon, or systemd answers 203/EXEC"
        reasons.append(_why("selinux", text))
    return tuple(reasons)


# Advice of the field that is not followed, each with its reason (docs/tuning.md has the sources).
LEFT_ALONE: Reasons = tuple(
    Reason(knob=knob, text=text, left_alone=True)
    for knob, text in (
        ("cpu_quota", "a quota (docker --cpus) is a hard stop; weight and cpuset share instead"),
        ("cpu_online", "small cores stay on line: the cpuset keeps decode off them"),
        ("nice", "under autogroup nice counts only inside one session; CPUWeight does not"),
        ("omp_num_threads", "the engine sets its own thread count; 1 would cripple one prompt"),
        ("overcommit_memory", "unrelated: nothing here reserves memory it does not use"),
        ("swapoff", "never: swapoff -a can kill a host that needs its swap"),
        ("mlockall", "no such command: the engine locks the model itself"),
    )
)


# --- small words ----------------------------------------------------------------------------------


def in_container(profile: HostProfile) -> bool:
    return profile.virtualization in CONTAINERS


def is_tegra(profile: HostProfile) -> bool:
    names = f"{profile.kernel.release} {profile.board_model or ''}".lower()
    return any(word in names for word in ("tegra", "jetson"))


def is_raspberry_pi(profile: HostProfile) -> bool:
    return (profile.board_model or "").startswith("Raspberry Pi")


def kernel_version(profile: HostProfile) -> tuple[int, int]:
    """'6.6.31+rpt-rpi-2712' -> (6, 6); (0, 0) where it does not say."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})", profile.kernel.release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _why(knob: str, text: str, *, left_alone: bool = False, warning: bool = False) -> Reason:
    return Reason(knob=knob, text=text, left_alone=left_alone, warning=warning)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def mb(size_bytes: int) -> str:
    return f"{round(size_bytes / 1e6)} MB"
