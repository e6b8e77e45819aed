"""What was read on a host beside its HostProfile. Pure: values only, and None is "not known"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgellm.cpuset import CpuSet
from edgellm.hardware import HostProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class PathState:
    """`kind`: file, directory, link, other, absent; the rest is None where it has no meaning."""

    kind: str
    mode: str | None = None  # "0644"
    owner: str | None = None
    group: str | None = None
    sha256: str | None = None  # of a file
    target: str | None = None  # of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """`running_release` comes from the environment of the running process, not from a file."""

    active: bool  # it has a main process; also while that still loads its model
    enabled: bool
    socket_active: bool
    socket_enabled: bool
    # The socket in force is not the one of the unit file, or the process was started without it
    socket_stale: bool
    needs_daemon_reload: bool
    running_release: str | None
    current_release: str | None  # where /opt/edgellm/current points; None: to no release of ours
    previous_release: str | None
    runs_replaced_files: bool = (
        False  # it maps a model or a library that is no longer the one there
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamState:
    """`tuning` is what the main process was started with: None without one, "" untuned."""

    known: bool  # systemd has a unit of that name
    active: bool
    needs_daemon_reload: bool
    drop_in_sha256: str | None  # of our drop-in; None: it has none
    tuning: str | None
    # It runs only at times: a oneshot that has ended, or one that a socket, timer or path starts
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """One thread of the service, as the kernel schedules it."""

    tid: int
    comm: str  # "uvicorn", "llama-0"
    policy: str  # sched(7) in chrt's words: other, fifo, rr, batch, idle, deadline
    priority: int  # 0 but for fifo and rr
    cpus: CpuSet | None  # Cpus_allowed_list


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """One line of /proc/<pid>/limits; None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process in the service's cgroup."""

    pid: int
    uid: int | None
    program: str | None  # "/usr/bin/python3.11"; ends in " (deleted)" where it was replaced since
    threads: tuple[ThreadState, ...]
    vm_locked_bytes: int | None
    nofile: ResourceLimit | None
    memlock: ResourceLimit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceState:
    """One slice, as systemd means it and as the kernel has it."""

    name: str  # "edgellm.slice"
    allowed_cpus: CpuSet | None  # systemd's AllowedCPUs=; None: not set
    effective_cpus: CpuSet | None  # cpuset.cpus.effective; None: the kernel has no such file there
    own_cpus: CpuSet | None  # cpuset.cpus of itself, empty: not set; None: no such file
    cpu_weight_set: int | None  # systemd's CPUWeight=; None: not set
    cpu_weight: int | None  # cpu.weight, or the weight that cpu.shares stands for on cgroup v1


@dataclass(frozen=True, slots=True, kw_only=True)
class SysctlLine:
    """One sysctl.d file that decides about a key, and what it makes of it."""

    path: str
    value: int | None  # None: it takes the key out again, or gives what is no number


@dataclass(frozen=True, slots=True, kw_only=True)
class ZramSwap:
    """One zram device that is swap now."""

    device: str  # "zram0"
    algorithm: str | None
    size_bytes: int | None
    priority: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePages:
    """Pages of the service on one NUMA node."""

    node: int
    anonymous: int  # what a binding decides about
    file: int  # the page cache keeps what an earlier process has read, wherever that was


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The service's account, as the host's name service has it."""

    uid: int
    group: str | None  # its primary one; None: that has no name
    comment: str
    home: str
    shell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveState:
    """What is in force now. Source: edgellm/remote/effective_state.py, one round trip."""

    account: Account | None  # None: there is none
    service_state: str | None  # systemd's ActiveState: "active", "activating"
    n_restarts: int | None  # by systemd itself, since it was last started
    main_pid: int | None  # None: no process
    processes: tuple[ProcessState, ...]
    foreign_drop_ins: tuple[str, ...]  # of our units alone, and not ours
    cgroup_version: int | None
    slices: tuple[SliceState, ...]
    nr_throttled: int | None  # cpu.stat of the service
    node_pages: tuple[NodePages, ...]  # () where there is one node, or it cannot be read
    cpus_online: CpuSet | None
    swappiness: int | None
    swappiness_of_kernel: bool | None  # False: /proc/sys/vm is a copy, without effect
    swappiness_lines: tuple[SysctlLine, ...]  # in the order they are applied: the last one wins
    zram_swaps: tuple[ZramSwap, ...]
    zram_device: str | None  # the one that our own unit has noted: "zram1"
    zram_unit_enabled: bool | None
    governors: tuple[str, ...]  # distinct, over all cores
    nofile_of_systemd: ResourceLimit | None  # of pid 1: no service gets more than its hard limit
    memlock_of_systemd: ResourceLimit | None
    realtime_confirmed: str | None  # the release ids in the two files, None: no such file
    realtime_trial: str | None

    def slice(self, name: str) -> SliceState | None:
        return next((found for found in self.slices if found.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedState:
    """One host, as it was found. None: could not be read, or does not concern this host."""

    profile: HostProfile
    paths: Mapping[str, PathState]
    whole: Mapping[str, bool]  # path of a model or a runtime -> its bytes are the right ones
    service: ServiceState | None
    effective: EffectiveState | None
    upstream: UpstreamState | None = None  # of the operator's own server, where there is one
