"""What a host is: the typed result of one probe."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from edgellm.cpuset import CpuSet


class Arch(str, Enum):
    """Architectures the runtime is built for; the value is the inventory's and the group's word."""

    ARM64 = "arm64"
    X86_64 = "x86_64"

    @property
    def machine(self) -> str:
        """`uname -m`'s word."""
        return "aarch64" if self is Arch.ARM64 else "x86_64"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCluster:
    """CPUs of one kind. `cpu_capacity` is the kernel's 0..1024 scale (arm64 only)."""

    cpus: CpuSet
    cpu_capacity: int | None  # 446 on the Cortex-A55 of an RK3588
    max_freq_khz: int | None  # 2400000
    core_type: str | None  # "Cortex-A76", "core" / "atom" on hybrid x86


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One node with memory, CPUs or both."""

    node: int
    cpus: CpuSet
    mem_total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One line of /proc/swaps."""

    path: str  # "/dev/zram0"
    kind: str  # "partition" | "file"
    size_bytes: int
    used_bytes: int
    priority: int

    @property
    def is_zram(self) -> bool:
        return self.path.startswith("/dev/zram")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZramDevice:
    """One /sys/block/zram*, in use or not."""

    name: str  # "zram0"
    disksize_bytes: int  # 0: not set up
    algorithm: str | None  # "lzo-rle"
    is_swap: bool
    mountpoint: str | None  # "/var/log" where log2ram holds it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The cgroup hierarchy as services on this host see it."""

    version: int | None  # 1, 2 (also for hybrid: what systemd uses), None where there is none
    controllers: tuple[str, ...]  # available to services: ("cpu", "cpuset", "memory")
    effective_cpus: CpuSet | None  # cpuset.cpus.effective of the root the probe sees
    quota_cpus: float | None  # CFS quota over period; None: no quota
    memory_limit_bytes: int | None = None  # memory.max above all services; None: no limit
    # Mems_allowed_list of pid 1; None: not told. Node numbers, in the notation of CPUs.
    effective_nodes: CpuSet | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSupport:
    """What the kernel offers to the knobs."""

    release: str  # "6.6.31+rpt-rpi-2712"
    page_size_bytes: int  # 16384 on a Raspberry Pi 5
    zram_module: bool  # loaded, built in, or loadable
    isolated_cpus: CpuSet  # isolcpus=
    psi: bool
    # kernel.sched_rt_runtime_us, of 1 s: 950000; -1: real time may take all of it, 0: none
    rt_runtime_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFreq:
    """Clock governors of all policies (one a cluster or a core)."""

    governors: tuple[str, ...]  # in force now, each once: ("schedutil",)
    available: tuple[str, ...]  # that every policy offers


OWN_ZRAM_MANAGER = "edgellm"  # Tools.zram_manager of our own drop-in or unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Programs and libraries; None or False: not there."""

    python_version: tuple[int, int, int] | None
    systemd_version: int | None
    numactl: bool
    numactl_works: bool  # `numactl … true` succeeded: EPERM in containers
    chrt: bool
    package_manager: str | None  # "apt" | "dnf"
    libgomp: bool
    libstdcxx: bool
    tuned_profile: str | None  # "throughput-performance"
    zram_manager: str | None  # who is set up to make zram: "zram-tools", "rpi-swap", or we
    selinux_enforcing: bool
    zram_generator: bool = False  # systemd-zram-generator is installed, configured or not
    realtime_works: bool = False  # `chrt -f 1 true` succeeded
    irqbalance: bool = False  # running now, as the next
    power_profiles_daemon: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The board at the time of the probe; None: the board does not tell."""

    temperature_c: float | None
    throttled_flags: int | None  # vcgencmd get_throttled
    clock_skew_s: float | None  # host's clock minus the control machine's


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHost:
    """What a host was at its last verified roll-out; lies in layout.RECORDED."""

    kernel: str  # "6.6.31+rpt-rpi-2712"
    python: str  # "3.11.2"; "" for none
    cpus_online: str  # "0-3"
    cgroup_version: int | None
    distribution: str  # "debian 12"
    mem_total_bytes: int
    mem_available_bytes: int  # as the plan used it, an edgellm that runs not counted

    @classmethod
    def of(cls, profile: HostProfile) -> RecordedHost:
        return cls(
            kernel=profile.kernel.release,
            python=".".join(map(str, profile.tools.python_version or ())),
            cpus_online=str(profile.cpus_online),
            cgroup_version=profile.cgroup.version,
            distribution=f"{profile.distribution_id} {profile.distribution_version}".strip(),
            mem_total_bytes=profile.mem_total_settled_bytes,
            mem_available_bytes=profile.mem_settled_bytes,
        )

    def to_json_text(self) -> str:
        """One text for one host: a second roll-out finds the file as it is."""
        return json.dumps(plain(self), indent=1, sort_keys=True) + "\n"


# Two probes of one host see different amounts of memory, and a plan near a limit must not swing
# with them: what the last verified roll-out used holds while it is this close.
MEM_SETTLED_WITHIN = 0.15  # of MemTotal
# MemTotal of one board differs by some MB from kernel to kernel.
SAME_MEM_TOTAL_WITHIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """Everything the plan may depend on. Source: edgellm/facts/host_probe.sh, one round trip."""

    machine: str  # `uname -m`: "aarch64"
    distribution_id: str  # os-release ID: "debian"
    distribution_version: str  # "12"
    distribution_name: str  # PRETTY_NAME
    board_model: str | None  # device tree or DMI: "Raspberry Pi 5 Model B Rev 1.0"
    virtualization: str | None  # systemd-detect-virt: "kvm", "lxc"; None on bare metal
    kernel: KernelSupport
    cpus_online: CpuSet
    clusters: tuple[CpuCluster, ...]
    smt_siblings: tuple[CpuSet, ...]  # groups of logical CPUs on one core; () where SMT is off
    numa_nodes: tuple[NumaNode, ...]
    cpu_flags: tuple[str, ...]  # sorted; x86 "flags", arm64 "Features"
    mem_total_bytes: int
    mem_available_bytes: int
    swaps: tuple[Swap, ...]
    zram_devices: tuple[ZramDevice, ...]
    cgroup: Cgroup
    tools: Tools
    disk_free_bytes: int  # where /opt/edgellm is or will be
    disk_noexec: bool  # mounted noexec there
    service_user_exists: bool
    swappiness: int | None
    health: Health
    # Held by an edgellm that runs already: without it a second run would see less memory than the
    # first for its own sake, and plan something else.
    mem_own_bytes: int = 0
    swappiness_files: tuple[str, ...] = ()  # sysctl.d files that set vm.swappiness, but ours
    cpufreq: CpuFreq | None = None  # None: the clock is not ours to govern (most VMs)
    recorded: RecordedHost | None = None  # None: never rolled out, or not readable
    measured_json: str | None = None  # layout.MEASURED as it lies there

    @property
    def mem_total_settled_bytes(self) -> int:
        """MemTotal, the same from kernel to kernel on one board."""
        if self.recorded is None:
            return self.mem_total_bytes
        then, now = self.recorded.mem_total_bytes, self.mem_total_bytes
        return then if abs(then - now) <= SAME_MEM_TOTAL_WITHIN * now else now

    @property
    def mem_settled_bytes(self) -> int:
        """MemAvailable without an edgellm that runs already, the same from run to run."""
        now = self.mem_available_bytes + self.mem_own_bytes
        if self.recorded is None:
            return now
        total, then = self.mem_total_bytes, self.recorded.mem_available_bytes
        same_board = self.mem_total_settled_bytes == self.recorded.mem_total_bytes
        close = abs(now - then) <= MEM_SETTLED_WITHIN * total
        return min(then, total) if same_board and close else now

    @property
    def arch(self) -> Arch | None:
        """None for a machine that the runtime is not built for ("armv7l")."""
        return next((arch for arch in Arch if arch.machine == self.machine), None)

    @property
    def hardware_class(self) -> str:
        """Hosts of one class may be compared: "Raspberry Pi 5 Model B / 4 CPUs".

        Where no board is told: "x86_64 docker / 2 CPUs". With a CPU quota: "… (quota 1.5)".
        """
        named = re.sub(r"\s+Rev\s.*$", "", self.board_model or "")
        board = named or " ".join(filter(None, (self.machine, self.virtualization)))
        cpus = len(self.cpus_online)
        quota = self.cgroup.quota_cpus
        limit = "" if quota is None or quota >= cpus else f" (quota {quota:g})"
        return f"{board} / {cpus} {'CPU' if cpus == 1 else 'CPUs'}{limit}"

    def to_json(self) -> Any:
        """Plain values, as `pyinfra … fact` prints them."""
        return plain(self)


def plain(value: Any) -> Any:
    """Any of the product's values -> what JSON can hold; a CpuSet as the kernel's cpulist."""
    if isinstance(value, CpuSet):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
