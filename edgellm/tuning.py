"""HostProfile + Settings -> TuningPlan: every rule of docs/tuning.md, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.cpuset import CpuSet


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
