"""Output of edgellm/facts/host_probe.sh -> HostProfile. Garbage raises ParseError, nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError
from edgellm.hardware import (
    OWN_ZRAM_MANAGER,
    Cgroup,
    CpuCluster,
    CpuFreq,
    Health,
    HostProfile,
    KernelSupport,
    NumaNode,
    RecordedHost,
    Swap,
    Tools,
    ZramDevice,
)

PROBE_FORMAT = "1"  # `@@ format` of host_probe.sh; raise both together

Lines = tuple[str, ...]
Sections = Mapping[str, Lines]
Files = Mapping[str, str]  # path -> first line, as `grep -H` prints them

KIB = 1024
_CPU_DIR = "/sys/devices/system/cpu"
# v1 writes "no limit" as the largest page-aligned long; no host has an exbibyte.
_NO_MEMORY_LIMIT_BYTES = 1 << 60
# Sensors that are not wired report sentinels such as -274000 or 255000 millidegrees.
_SANE_TEMPERATURE_C = (-40.0, 130.0)
# What firmware writes where its vendor wrote nothing.
_NO_MODEL = re.compile(
    r"(?i)to be filled|default string|system (product name|manufacturer)|not specified"
)

# (implementer, part) of /proc/cpuinfo, as util-linux' lscpu-arm.c names them.
ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd04"): "Cortex-A35",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd09"): "Cortex-A73",
    ("0x41", "0xd0a"): "Cortex-A75",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd0d"): "Cortex-A77",
    ("0x41", "0xd0e"): "Cortex-A76AE",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd44"): "Cortex-X1",
    ("0x41", "0xd46"): "Cortex-A510",
    ("0x41", "0xd47"): "Cortex-A710",
    ("0x41", "0xd48"): "Cortex-X2",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4b"): "Cortex-A78C",
    ("0x41", "0xd4d"): "Cortex-A715",
    ("0x41", "0xd4e"): "Cortex-X3",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd80"): "Cortex-A520",
    ("0x41", "0xd81"): "Cortex-A720",
    ("0x41", "0xd82"): "Cortex-X4",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0x48", "0xd01"): "TSV110",  # Kunpeng 920
    ("0x4e", "0x003"): "Denver-2",
    ("0x4e", "0x004"): "Carmel",
    ("0x51", "0x001"): "Oryon",
    ("0x70", "0x661"): "FTC661",  # Phytium
    ("0x70", "0x662"): "FTC662",
    ("0x70", "0x663"): "FTC663",
    ("0x70", "0x664"): "FTC664",
    ("0x70", "0x862"): "FTC862",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}

# A file that shows a manager at work, by the end of its path -> the manager's package name.
# Order matters: rpi-swap drives zram-generator, so it goes first.
ZRAM_MANAGER_FILES = (
    (r"/rpi-swap-generator$", "rpi-swap"),
    (r"/zram-generator\.conf(\.d/.*)?$", "systemd-zram-generator"),
    (r"/zramswap\.service$", "zram-tools"),
    (r"/armbian-zram-config\.service$", "armbian-zram-config"),
    (r"/zram-config\.service$", "zram-config"),
    (r"/nvzramconfig\.service$", "nvzramconfig"),
)


def parse_profile(text: str, *, control_time_s: float | None) -> HostProfile:
    """Whole output of host_probe.sh -> HostProfile. Raises ParseError, and nothing else.

    `control_time_s`: the control machine's clock when the probe ran, for the clock skew.
    """
    sections = split_sections(text)
    files = parse_files(sections.get("sysfs", ()))
    release, machine = parse_uname(sections)
    online = _required_online(files)
    swaps = parse_swaps(sections.get("swaps", ()))
    memory = parse_meminfo(sections.get("meminfo", ()))
    os_release = parse_os_release(sections.get("os-release", ()))
    disk_free_bytes, disk_mount = parse_disk(sections.get("disk", ()))
    isolated = CpuSet.parse(files.get(f"{_CPU_DIR}/isolated", ""))
    return HostProfile(
        machine=machine,
        distribution_id=os_release.get("ID", "unknown"),
        distribution_version=os_release.get("VERSION_ID", ""),
        distribution_name=os_release.get("PRETTY_NAME", os_release.get("ID", "unknown")),
        board_model=parse_board_model(sections.get("device_tree_model", ()), files),
        virtualization=parse_virtualization(sections.get("virt", ())),
        kernel=KernelSupport(
            release=release,
            page_size_bytes=_whole(_first(sections, "page_size"), "page size"),
            zram_module=bool(sections.get("zram_module")),
            isolated_cpus=isolated & online,
            psi=bool(sections.get("psi")),
            rt_runtime_us=_optional_whole(
                files.get("/proc/sys/kernel/sched_rt_runtime_us"), "rt_runtime_us", negative=True
            ),
        ),
        cpus_online=online,
        clusters=parse_clusters(files, sections.get("cpuinfo", ()), online),
        smt_siblings=parse_smt_siblings(files, online),
        numa_nodes=parse_numa_nodes(files, sections.get("node_meminfo", ()), online),
        cpu_flags=parse_cpu_flags(sections.get("cpuinfo", ())),
        mem_total_bytes=memory["MemTotal"],
        mem_available_bytes=memory["MemAvailable"],
        mem_own_bytes=parse_own_memory(sections.get("own_memory", ())),
        swaps=swaps,
        zram_devices=parse_zram_devices(files, swaps, sections.get("mounts", ())),
        cgroup=parse_cgroup(sections, isolated),
        tools=parse_tools(sections, files, machine),
        disk_free_bytes=disk_free_bytes,
        disk_noexec=parse_noexec(sections.get("mounts", ()), disk_mount),
        service_user_exists=bool(sections.get("service_user")),
        swappiness=_optional_whole(files.get("/proc/sys/vm/swappiness"), "vm.swappiness"),
        swappiness_files=tuple(
            path for path in parse_files(sections.get("sysctl_swappiness", ())) if not _ours(path)
        ),
        cpufreq=parse_cpufreq(files),
        recorded=parse_recorded(sections.get("recorded", ())),
        measured_json="\n".join(sections.get("measured", ())) or None,
        health=Health(
            temperature_c=parse_temperature(files),
            throttled_flags=parse_throttled(sections.get("throttled", ()), files),
            clock_skew_s=parse_clock_skew(sections.get("time", ()), control_time_s),
        ),
    )


def split_sections(text: str) -> dict[str, Lines]:
    """'@@ name' and the lines below it; whatever a login shell prints before it is skipped.

    Raises ParseError where the format is another or the end is missing (a probe cut short).
    """
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("@@ "):
            name = line[3:]
            if name in sections:
                raise _bad("sections of the probe", "each name once", f"{name!r} twice")
            lines = sections[name] = []
            if name == "end":
                break
        elif lines is not None and line:
            lines.append(line)
    if "end" not in sections:
        raise _bad("the probe's output", "'@@ end' as its last section", _shown(text[-80:]))
    found = sections.get("format", [])
    if found != [PROBE_FORMAT]:
        raise _bad("the probe's format", PROBE_FORMAT, _shown(" ".join(found)))
    return {name: tuple(content) for name, content in sections.items()}


def parse_files(lines: Lines) -> dict[str, str]:
    """`grep -H '' PATH…` -> path: first line. '/sys/…/online:0-3' -> {'/sys/…/online': '0-3'}."""
    files: dict[str, str] = {}
    for line in lines:
        # soc:firmware is the one path with a colon inside.
        path, colon, value = line.replace("soc:firmware", "soc/firmware").partition(":")
        if colon and path.startswith("/"):
            files.setdefault(path, value.strip())
    return files


def parse_uname(sections: Sections) -> tuple[str, str]:
    """`uname -mr` -> (kernel release, machine).

    A 32-bit userland on a 64-bit kernel (Raspberry Pi OS 32-bit) is reported as the kernel's
    32-bit personality, "armv8l" or "i686": a 64-bit runtime cannot run there.
    """
    words = _first(sections, "uname").split()
    if len(words) != 2:
        raise _bad("uname -mr", "'6.6.31+rpt-rpi-2712 aarch64'", _shown(" ".join(words)))
    # uname sorts its own output: release before machine, whatever the order of the flags.
    release, machine = words
    if sections.get("long_bit") == ("32",):
        machine = {"aarch64": "armv8l", "x86_64": "i686"}.get(machine, machine)
    return release, machine


def parse_os_release(lines: Lines) -> dict[str, str]:
    """os-release(5): KEY="value" -> {KEY: value}."""
    values = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and key.isidentifier():
            values[key] = value.strip().strip("\"'")
    return values


def parse_board_model(device_tree: Lines, files: Files) -> str | None:
    """The device tree's model, else DMI's vendor and product; None where neither says."""
    if device_tree:
        return device_tree[0]
    dmi = "/sys/class/dmi/id"
    vendor = files.get(f"{dmi}/sys_vendor", "")
    product = files.get(f"{dmi}/product_name", "")
    words = [word for word in (vendor, product) if word and not _NO_MODEL.search(word)]
    return " ".join(words) or None


def parse_virtualization(lines: Lines) -> str | None:
    """systemd-detect-virt: 'kvm' | 'lxc' | …; 'none' -> None."""
    return lines[0] if lines and lines[0] != "none" else None


def parse_clusters(files: Files, cpuinfo: Lines, online: CpuSet) -> tuple[CpuCluster, ...]:
    """CPUs grouped by capacity, top frequency and core type, in the order of their first CPU."""
    core_types = parse_core_types(files, cpuinfo)
    groups: dict[tuple[int | None, int | None, str | None], list[int]] = {}
    for cpu in online.cpus:
        base = f"{_CPU_DIR}/cpu{cpu}"
        key = (
            _optional_whole(files.get(f"{base}/cpu_capacity"), "cpu_capacity"),
            _optional_whole(files.get(f"{base}/cpufreq/cpuinfo_max_freq"), "cpuinfo_max_freq"),
            core_types.get(cpu),
        )
        groups.setdefault(key, []).append(cpu)
    return tuple(
        CpuCluster(
            cpus=CpuSet.of(cpus), cpu_capacity=capacity, max_freq_khz=freq, core_type=core_type
        )
        for (capacity, freq, core_type), cpus in groups.items()
    )


def parse_core_types(files: Files, cpuinfo: Lines) -> dict[int, str]:
    """CPU number -> "Cortex-A76" (arm64 MIDR) or "core"/"atom" (hybrid x86)."""
    types: dict[int, str] = {}
    for kind in ("core", "atom"):
        for cpu in CpuSet.parse(files.get(f"/sys/devices/cpu_{kind}/cpus", "")).cpus:
            types[cpu] = kind
    for line in cpuinfo:
        words = line.split()
        if words[0] != "core":
            continue
        if len(words) != 4:
            raise _bad("CPU part in /proc/cpuinfo", "'core 0 0x41 0xd0b'", _shown(line))
        cpu, key = _whole(words[1], "processor"), (words[2].lower(), words[3].lower())
        types[cpu] = ARM_CORES.get(key, "/".join(key))
    return types


def parse_cpufreq(files: Files) -> CpuFreq | None:
    """scaling_governor and scaling_available_governors of all policies; None: no cpufreq."""
    governors: list[str] = []
    available: list[str] | None = None
    for path, value in files.items():
        if not path.startswith(f"{_CPU_DIR}/cpufreq/policy"):
            continue
        if path.endswith("/scaling_governor"):
            governors.append(value)
        elif path.endswith("/scaling_available_governors"):
            offered = value.split()
            available = offered if available is None else [g for g in available if g in offered]
    if not governors:
        return None
    return CpuFreq(governors=tuple(dict.fromkeys(governors)), available=tuple(available or ()))


def parse_smt_siblings(files: Files, online: CpuSet) -> tuple[CpuSet, ...]:
    """thread_siblings_list of each CPU -> the groups of two and more; () where SMT is off."""
    groups = {
        CpuSet.parse(files.get(f"{_CPU_DIR}/cpu{cpu}/topology/thread_siblings_list", "")) & online
        for cpu in online.cpus
    }
    return tuple(sorted((g for g in groups if len(g) > 1), key=lambda g: g.cpus))


def parse_numa_nodes(files: Files, meminfo: Lines, online: CpuSet) -> tuple[NumaNode, ...]:
    """node*/cpulist and 'Node 0 MemTotal: 4417740 kB' -> nodes by number."""
    memory: dict[int, int] = {}
    for line in meminfo:
        found = re.search(r"Node (\d{1,5}) MemTotal: +(\d{1,15}) kB", line)
        if found is None:
            raise _bad("node meminfo", "'Node 0 MemTotal: 4417740 kB'", _shown(line))
        memory[int(found[1])] = int(found[2]) * KIB
    nodes = []
    for path, cpulist in files.items():
        found = re.fullmatch(r"/sys/devices/system/node/node(\d{1,5})/cpulist", path)
        if found is not None:
            node = int(found[1])
            cpus = CpuSet.parse(cpulist) & online
            nodes.append(NumaNode(node=node, cpus=cpus, mem_total_bytes=memory.get(node)))
    return tuple(sorted(nodes, key=lambda n: n.node))


def parse_cpu_flags(cpuinfo: Lines) -> tuple[str, ...]:
    """The 'flags' line of the first CPU -> sorted names."""
    for line in cpuinfo:
        kind, _, flags = line.partition(" ")
        if kind == "flags":
            return tuple(sorted(set(flags.split())))
    return ()


def parse_meminfo(lines: Lines) -> dict[str, int]:
    """/proc/meminfo -> bytes. MemTotal is required; MemAvailable is made up for on old kernels."""
    values: dict[str, int] = {}
    for line in lines:
        found = re.fullmatch(r"(\w+): +(\d{1,15}) kB", line)
        if found is None:
            raise _bad("/proc/meminfo", "'MemTotal: 4000000 kB'", _shown(line))
        values[found[1]] = int(found[2]) * KIB
    if "MemTotal" not in values:
        raise _bad("/proc/meminfo", "a MemTotal line", "none")
    values.setdefault("MemAvailable", values.get("MemFree", 0) + values.get("Cached", 0))
    return values


def parse_swaps(lines: Lines) -> tuple[Swap, ...]:
    """/proc/swaps: '/dev/zram0 partition 2097148 0 100' -> Swap(size_bytes=2147479552, …)."""
    swaps = []
    for line in lines:
        if line.startswith("Filename"):
            continue
        words = line.rsplit(maxsplit=4)
        if len(words) != 5:
            raise _bad("/proc/swaps", "path, type, size, used, priority", _shown(line))
        path, kind, size, used, priority = words
        swaps.append(
            Swap(
                path=path,
                kind=kind,
                size_bytes=_whole(size, "swap size") * KIB,
                used_bytes=_whole(used, "swap used") * KIB,
                priority=_whole(priority, "swap priority", negative=True),
            )
        )
    return tuple(swaps)


def parse_zram_devices(
    files: Files, swaps: Iterable[Swap], mounts: Lines
) -> tuple[ZramDevice, ...]:
    """/sys/block/zram*, with what uses it: swap, a mount (log2ram), or nothing (disksize 0)."""
    swap_paths = {swap.path for swap in swaps}
    mounted = {words[0]: words[1] for words in map(str.split, mounts) if len(words) >= 4}
    devices = []
    for path, size in files.items():
        found = re.fullmatch(r"/sys/block/(zram\d{1,4})/disksize", path)
        if found is None:
            continue
        name = found[1]
        chosen = re.search(r"\[([\w-]+)\]", files.get(f"/sys/block/{name}/comp_algorithm", ""))
        devices.append(
            ZramDevice(
                name=name,
                disksize_bytes=_whole(size, f"{name}/disksize"),
                algorithm=chosen[1] if chosen else None,
                is_swap=f"/dev/{name}" in swap_paths,
                mountpoint=mounted.get(f"/dev/{name}"),
            )
        )
    return tuple(sorted(devices, key=lambda d: d.name))


def parse_cgroup(sections: Sections, isolated: CpuSet) -> Cgroup:
    """The hierarchy that systemd puts services in, and what bounds all of them."""
    files = parse_files(sections.get("cgroup", ()))
    version = parse_cgroup_version(sections.get("mounts", ()))
    return Cgroup(
        version=version,
        controllers=_controllers(version, files, sections.get("mounts", ())),
        effective_cpus=_effective_cpus(files, sections.get("pid1_cpus", ()), isolated),
        effective_nodes=_effective_nodes(sections.get("pid1_cpus", ())),
        quota_cpus=parse_quota(files),
        memory_limit_bytes=_memory_limit(files),
    )


def parse_cgroup_version(mounts: Lines) -> int | None:
    """2: cgroup2 on /sys/fs/cgroup; 1: legacy and hybrid, where systemd's knobs act on v1."""
    kinds = {(words[1], words[2]) for words in map(str.split, mounts) if len(words) >= 4}
    if ("/sys/fs/cgroup", "cgroup2") in kinds:
        return 2
    if any(kind == "cgroup" for _, kind in kinds):
        return 1
    return 2 if any(kind == "cgroup2" for _, kind in kinds) else None


def _controllers(version: int | None, files: Files, mounts: Lines) -> tuple[str, ...]:
    if version == 2:
        nearest = next((v for p, v in files.items() if p.endswith("/cgroup.controllers")), "")
        return tuple(sorted(nearest.split()))
    names: set[str] = set()
    for words in map(str.split, mounts):
        if len(words) >= 4 and words[2] == "cgroup":
            options = set(words[3].split(","))
            names |= options & {"cpu", "cpuacct", "cpuset", "memory", "blkio", "devices", "pids"}
    return tuple(sorted(names))


def _effective_cpus(files: Files, pid1: Lines, isolated: CpuSet) -> CpuSet | None:
    """The nearest effective cpuset, cut by pid 1's affinity (CPUAffinity= of system.conf).

    isolcpus= takes its CPUs out of pid 1's affinity too; a service may still be put there by name.
    """
    names = ("/cpuset.cpus.effective", "/cpuset.effective_cpus")
    nearest = next((v for p, v in files.items() if p.endswith(names)), None)
    effective = CpuSet.parse(nearest) if nearest else None
    lines = [line for line in pid1 if line.startswith("Cpus_allowed_list")]
    affinity = CpuSet.parse(lines[0].partition(":")[2]) | isolated if lines else None
    if effective is None or affinity is None:
        return effective if affinity is None else affinity
    return effective & affinity or effective


def _effective_nodes(pid1: Lines) -> CpuSet | None:
    """'Mems_allowed_list: 0-1' -> nodes that a service may have memory of."""
    lines = [line for line in pid1 if line.startswith("Mems_allowed_list")]
    return CpuSet.parse(lines[0].partition(":")[2]) if lines else None


def parse_quota(files: Files) -> float | None:
    """cpu.max '150000 100000' (v2) or cfs_quota_us over cfs_period_us (v1) -> the smallest, 1.5."""
    quotas = []
    for path, value in files.items():
        if path.endswith("/cpu.max"):
            quota, _, period = value.partition(" ")
        elif path.endswith("/cpu.cfs_quota_us"):
            quota, period = value, files.get(path.replace("quota", "period"), "100000")
        else:
            continue
        if quota in ("max", "-1"):
            continue
        quota_us, period_us = _whole(quota, "CFS quota"), _whole(period, "CFS period")
        if period_us == 0:
            raise _bad("CFS period", "more than 0", period)
        quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def _memory_limit(files: Files) -> int | None:
    limits = [
        _whole(value, "memory limit")
        for path, value in files.items()
        if path.endswith(("/memory.max", "/memory.limit_in_bytes")) and value != "max"
    ]
    return min((limit for limit in limits if limit < _NO_MEMORY_LIMIT_BYTES), default=None)


def parse_tools(sections: Sections, files: Files, machine: str) -> Tools:
    """Programs, libraries, and who manages zram and sysctl on this host."""
    lines = sections.get("tools", ())
    words = {line.split()[0]: line.split()[1:] for line in lines}
    managers = sections.get("zram_managers", ())
    tuned = sections.get("tuned", ())
    libraries = sections.get("libraries", ())
    return Tools(
        python_version=_python_version(words.get("python3")),
        systemd_version=_systemd_version(words.get("systemd")),
        numactl="numactl" in words,
        numactl_works="numactl_works" in words,
        chrt="chrt" in words,
        package_manager="apt" if "apt-get" in words else "dnf" if "dnf" in words else None,
        libgomp=has_library(libraries, "libgomp.so.1", machine),
        libstdcxx=has_library(libraries, "libstdc++.so.6", machine),
        tuned_profile=tuned[0] if tuned else None,
        zram_manager=parse_zram_manager(managers),
        zram_generator=any(path.endswith("/system-generators/zram-generator") for path in managers),
        selinux_enforcing=files.get("/sys/fs/selinux/enforce") == "1",
        realtime_works="realtime_works" in words,
        irqbalance="irqbalance" in words,
        power_profiles_daemon="power-profiles-daemon" in words,
    )


def _python_version(words: list[str] | None) -> tuple[int, int, int] | None:
    if not words:
        return None
    numbers = [_whole(number, "python3 version") for number in words[0].split(".")]
    if len(numbers) != 3:
        raise _bad("python3 version", "three numbers", _shown(words[0]))
    return numbers[0], numbers[1], numbers[2]


def _systemd_version(words: list[str] | None) -> int | None:
    # "systemd 252 (252.38-1~deb12u1)"; release candidates are "256~rc3"
    if not words:
        return None
    found = re.match(r"\d{1,6}", words[0])
    if found is None:
        raise _bad("systemctl --version", "'systemd 252 (…)'", _shown(" ".join(words)))
    return int(found[0])


def has_library(lines: Lines, soname: str, machine: str) -> bool:
    """A line of `ldconfig -p` or a path, for this host's own word size.

    'libgomp.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libgomp.so.1' -> True on x86_64.
    """
    abi = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(machine, "")
    for line in lines:
        if not line.endswith(f"/{soname}"):
            continue
        tags = re.search(r"\(([^)]*)\)", line)
        if tags is not None and abi in tags[1]:
            return True
        if tags is None and not re.search(r"i386|i686|arm-linux|/lib32/", line):
            return True
    return False


def parse_zram_manager(paths: Lines) -> str | None:
    """Paths of unit and config files -> who sets zram up; "edgellm" where only we do."""
    foreign = [path for path in paths if not _ours(path)]
    for pattern, manager in ZRAM_MANAGER_FILES:
        if any(re.search(pattern, path) for path in foreign):
            return manager
    return OWN_ZRAM_MANAGER if len(foreign) < len(paths) else None


def parse_disk(lines: Lines) -> tuple[int, str]:
    """Last line of `df -Pk` -> (free bytes, mount point)."""
    words = lines[-1].split() if lines else []
    if len(words) < 6:
        raise _bad("df -Pk", "a line of six columns", _shown(" ".join(words)))
    return _whole(words[-3], "free KiB of df") * KIB, words[-1]


def parse_noexec(mounts: Lines, mountpoint: str) -> bool:
    """Options of the filesystem that is mounted last, and so visible, on `mountpoint`."""
    options = ""
    for words in map(str.split, mounts):
        if len(words) >= 4 and words[1] == mountpoint:
            options = words[3]
    return "noexec" in options.split(",")


def parse_own_memory(lines: Lines) -> int:
    """KiB that processes of user edgellm hold; no line where none runs."""
    return _whole(lines[0], "own memory") * KIB if lines else 0


def parse_recorded(lines: Lines) -> RecordedHost | None:
    """layout.RECORDED; None where it is not there, or not what RecordedHost.to_json_text wrote."""
    try:
        values = json.loads("\n".join(lines))
        recorded = RecordedHost(**values)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (recorded.kernel, recorded.python, recorded.cpus_online, recorded.distribution)
    sizes = (recorded.mem_total_bytes, recorded.mem_available_bytes)
    sound = (
        all(isinstance(text, str) for text in texts)
        and all(type(size) is int and size >= 0 for size in sizes)  # a bool is no size
        and recorded.cgroup_version in (None, 1, 2)
    )
    return recorded if sound else None


def parse_temperature(files: Files) -> float | None:
    """The hottest thermal zone in degrees Celsius, unwired sensors left out."""
    low, high = _SANE_TEMPERATURE_C
    values = [
        _whole(value, "temperature", negative=True) / 1000
        for path, value in files.items()
        if path.startswith("/sys/class/thermal/")
    ]
    return max((value for value in values if low <= value <= high), default=None)


def parse_throttled(lines: Lines, files: Files) -> int | None:
    """'throttled=0x50005' of vcgencmd, or the older kernels' file of hex digits."""
    path = "/sys/devices/platform/soc/soc/firmware/get_throttled"
    text = lines[0].partition("=")[2] if lines else files.get(path)
    if not text:
        return None
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
        # vcgencmd without access to /dev/vcio prints a sentence: the board does not tell
        return None
    return int(text, 16)


def parse_clock_skew(lines: Lines, control_time_s: float | None) -> float | None:
    """`date +%s` of the host minus the control machine's clock."""
    if control_time_s is None or not lines:
        return None
    return _whole(lines[0], "date +%s") - control_time_s


def _required_online(files: Files) -> CpuSet:
    online = CpuSet.parse(files.get(f"{_CPU_DIR}/online", ""))
    if not online:
        raise _bad(f"{_CPU_DIR}/online", "a cpulist such as '0-3'", "nothing")
    return online


def _ours(path: str) -> bool:
    return "edgellm" in path


def _first(sections: Sections, name: str) -> str:
    lines = sections.get(name, ())
    if not lines:
        raise _bad(f"section {name} of the probe", "one line", "none")
    return lines[0]


def _whole(text: str, what: str, *, negative: bool = False) -> int:
    digits = text[1:] if negative and text.startswith("-") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise _bad(what, "a whole number", _shown(text))
    return int(text)


def _optional_whole(text: str | None, what: str, *, negative: bool = False) -> int | None:
    return None if text is None or text == "" else _whole(text, what, negative=negative)


def _shown(text: str) -> str:
    return repr(text[:80])


def _bad(what: str, want: str, have: str) -> ParseError:
    return ParseError(
        what=what,
        want=want,
        have=have,
        fix="run edgellm/facts/host_probe.sh on the host by hand and report what it prints",
    )
