"""May this host have the roll-out at all? What keeps it out, each fault with its fix."""

from __future__ import annotations

from edgellm.errors import EdgellmError, HostMismatchError
from edgellm.hardware import Arch, HostProfile
from edgellm.settings import Settings
from edgellm.tuning import (
    PACKAGES,
    explicit_cpus,
    is_tegra,
    mb,
    memory_budget,
    missing_tools,
    total_memory,
    visible_cpus,
    worker_bytes,
)

MIN_PYTHON = (3, 10)  # xllamacpp's abi3 wheels: cp310
MIN_SYSTEMD = 244  # AllowedCPUs= appeared there
X86_FLAGS = ("avx2", "bmi2", "f16c", "fma")  # what the x86_64 wheel is compiled for


def check_host(
    profile: HostProfile,
    settings: Settings,
    *,
    group_arch: Arch | None,
    disk_needed_bytes: int,
) -> tuple[EdgellmError, ...]:
    """Every fault that keeps a host out of the roll-out; () for a fit one."""
    checks = (
        check_arch(profile, group_arch),
        check_python(profile),
        check_systemd(profile),
        check_instructions(profile),
        check_libraries(profile, settings),
        check_disk(profile, disk_needed_bytes),
        check_exec(profile),
        check_memory(profile, settings),
        check_explicit_cpus(profile, settings),
    )
    return tuple(error for error in checks if error is not None)


def check_arch(profile: HostProfile, group_arch: Arch | None) -> HostMismatchError | None:
    if profile.arch is None:
        return HostMismatchError(
            what="architecture",
            want=" or ".join(arch.value for arch in Arch),
            have=f"{profile.machine} ({profile.distribution_name})",
            fix="install a 64-bit OS"
            if profile.machine.startswith(("arm", "i"))
            else "take it out of the inventory: no runtime is built for it",
        )
    if group_arch is None or group_arch is profile.arch:
        return None
    return HostMismatchError(
        what="architecture",
        want=f"{group_arch.value}, the group it is in",
        have=profile.machine,
        fix=f"move it to group {profile.arch.value}",
    )


def check_python(profile: HostProfile) -> HostMismatchError | None:
    version = profile.tools.python_version
    if version is not None and version[:2] >= MIN_PYTHON:
        return None
    return HostMismatchError(
        what="python3",
        want=f"{_dotted(MIN_PYTHON)} or later",
        have="none" if version is None else _dotted(version),
        fix="install python3" if version is None else f"upgrade the OS ({_with_python(profile)})",
    )


def _with_python(profile: HostProfile) -> str:
    """Releases with a new enough python3; one more beside it is not what the service runs."""
    if is_tegra(profile):
        return "JetPack 6 and later have it"
    if profile.tools.package_manager == "dnf":
        return "Rocky 10, openEuler 24.03 and later have it; python3 itself must be it"
    return "Debian 12, Ubuntu 22.04 and later have it"


def check_systemd(profile: HostProfile) -> HostMismatchError | None:
    version = profile.tools.systemd_version
    if version is not None and version >= MIN_SYSTEMD:
        return None
    return HostMismatchError(
        what="systemd",
        want=f"{MIN_SYSTEMD} or later, running as pid 1",
        have="none running" if version is None else str(version),
        fix="use a distribution that boots with systemd" if version is None else "upgrade the OS",
    )


def check_instructions(profile: HostProfile) -> HostMismatchError | None:
    if profile.arch is not Arch.X86_64:
        return None
    missing = [flag for flag in X86_FLAGS if flag not in profile.cpu_flags]
    if not missing:
        return None
    return HostMismatchError(
        what="CPU instructions",
        want=", ".join(X86_FLAGS),
        have=f"no {', '.join(missing)}",
        fix="use a CPU of 2013 or later; in a VM, pass the host's CPU model through",
    )


def check_libraries(profile: HostProfile, settings: Settings) -> HostMismatchError | None:
    missing = [
        tool for tool in missing_tools(profile, settings) if tool in ("libgomp", "libstdcxx")
    ]
    if not missing or (settings.install_packages and profile.tools.package_manager is not None):
        return None
    names = " ".join(PACKAGES[profile.tools.package_manager or "apt"][tool] for tool in missing)
    return HostMismatchError(
        what="shared libraries",
        want="libgomp.so.1 and libstdc++.so.6",
        have=f"{names} missing, "
        + ("no apt or dnf" if settings.install_packages else "install_packages is off"),
        fix=f"install {names} by hand, or set install_packages to true",
    )


def check_disk(profile: HostProfile, disk_needed_bytes: int) -> HostMismatchError | None:
    if profile.disk_free_bytes >= disk_needed_bytes:
        return None
    return HostMismatchError(
        what="disk space under /opt/edgellm",
        want=mb(disk_needed_bytes),
        have=f"{mb(profile.disk_free_bytes)} free",
        fix="free some space, or lower keep_releases",
    )


def check_exec(profile: HostProfile) -> HostMismatchError | None:
    if not profile.disk_noexec:
        return None
    return HostMismatchError(
        what="mount of /opt/edgellm",
        want="a filesystem that code may be loaded from",
        have="mounted noexec",
        fix="mount another filesystem on /opt/edgellm, or remount this one exec",
    )


def check_memory(profile: HostProfile, settings: Settings) -> HostMismatchError | None:
    needed = worker_bytes(settings, 1, 0)
    if needed <= memory_budget(profile):
        return None
    return HostMismatchError(
        what="memory",
        want=f"{mb(needed)} for one worker with one slot",
        have=f"{mb(memory_budget(profile))} to spend of {mb(total_memory(profile))}",
        fix="a smaller model or n_ctx, fewer other services, or a board with more memory",
    )


def check_explicit_cpus(profile: HostProfile, settings: Settings) -> HostMismatchError | None:
    if settings.cpus is None or explicit_cpus(settings) & visible_cpus(profile):
        return None
    return HostMismatchError(
        what="setting cpus",
        want=f"some of {visible_cpus(profile)}",
        have=settings.cpus,
        fix="correct cpus for this host, or leave it out",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
