"""What fleets share on this machine: its tools, its cgroup tree, its limits, and who is up.

RUN_DIR lists the fleets that are up, one folder each. What is changed for all of them is noted
there, and put back when the last one that needs it goes down.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

from demo import syscalls
from demo.errors import DemoError
from demo.processes import locked_directory, machine_boot_id, replace_text, run_tool

RUN_DIR = Path("/run/edgellm-fleets")
NETNS_DIR = Path("/run/netns")  # ip-netns(8)
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGE_OF_TOOL = {
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "chroot": "coreutils",
}
# For real AllowedCPUs=, CPUWeight=, MemoryMax= and TasksMax= in the hosts.
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
# systemd in a host holds some 7 inotify instances, all of the same user, and 128 is the default.
INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
HOSTS_WITHIN_DEFAULT_INOTIFY_LIMIT = 16
INOTIFY_INSTANCES_PER_HOST = 16


def required_packages(*, only_missing: bool = False) -> list[str]:
    """The Debian and Ubuntu packages of all tools that the fleet needs on this machine."""
    tools = _missing_tools() if only_missing else list(PACKAGE_OF_TOOL)
    return sorted({PACKAGE_OF_TOOL[tool] for tool in tools})


def _missing_tools() -> list[str]:
    return [tool for tool in PACKAGE_OF_TOOL if shutil.which(tool, path=TOOL_PATH) is None]


def check_machine() -> None:
    """Raises DemoError unless this is root with all tools."""
    if os.geteuid() != 0:
        raise DemoError(
            "demo fleet",
            want="root: it makes namespaces, mounts and cgroups",
            have=f"user id {os.geteuid()}",
            fix="run it with sudo",
        )
    missing = _missing_tools()
    if missing:
        packages = required_packages(only_missing=True)
        raise DemoError(
            "demo fleet",
            want=f"the commands {', '.join(missing)}",
            have="none of these on this machine",
            fix=f"apt-get install {' '.join(packages)}",
        )


def invoking_user() -> tuple[int, int]:
    """(uid, gid) of who called sudo, or our own."""
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    return (int(uid), int(gid)) if uid and gid else (os.getuid(), os.getgid())


def make_folder_of_user(path: Path) -> None:
    """mkdir -p; what is new belongs to the invoking user, not to sudo's root."""
    if not path.is_dir():
        make_folder_of_user(path.parent)
        path.mkdir()
        os.chown(path, *invoking_user())


def cgroup2_mount() -> Path:
    """/sys/fs/cgroup, or /sys/fs/cgroup/unified beside cgroup v1. Raises DemoError without one."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    raise DemoError(
        "demo fleet",
        want="a cgroup2 file system, for systemd in the hosts",
        have="none mounted on this machine",
        fix="mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified (mkdir it first)",
    )


# --- changes shared by all fleets -------------------------------------------------------------


def register(name: str, details: dict[str, object]) -> None:
    """Notes that the fleet is up, and makes what its hosts need beyond their own fleet.

    `details` has 'size', its number of hosts. Call with the fleet's own folder locked.
    """
    with locked_directory(RUN_DIR):
        noted = _read_notes()
        if "netns_dir_was_mounted" not in noted:
            noted["netns_dir_was_mounted"] = _is_mounted(NETNS_DIR)
        top = cgroup2_mount()
        enabled = (top / "cgroup.subtree_control").read_text().split()
        available = (top / "cgroup.controllers").read_text().split()
        added = noted.setdefault("added_controllers", [])
        assert isinstance(added, list)
        for controller in CONTROLLERS:
            if controller in available and controller not in enabled:
                with contextlib.suppress(OSError):
                    (top / "cgroup.subtree_control").write_text(f"+{controller}")
                    added.append(controller)
        replace_text(RUN_DIR / name / "owner.json", json.dumps(details, indent=1))
        _adjust_inotify_limit(noted)
        _write_notes(noted)


def unregister(name: str) -> None:
    """Forgets the fleet. The last one out puts the machine back as it was."""
    with locked_directory(RUN_DIR):
        shutil.rmtree(RUN_DIR / name, ignore_errors=True)
        noted = _read_notes()
        _adjust_inotify_limit(noted)
        if any(path.is_dir() for path in RUN_DIR.iterdir()):
            _write_notes(noted)
            return
        added = noted.get("added_controllers", [])
        assert isinstance(added, list)
        for controller in added:
            # refused while something else came to use it meanwhile, and then rightly so
            with contextlib.suppress(OSError):
                (cgroup2_mount() / "cgroup.subtree_control").write_text(f"-{controller}")
        if noted.get("netns_dir_was_mounted") is False and _is_mounted(NETNS_DIR):
            # 'ip netns add' mounts the folder on itself; undo that if nobody else uses it
            with contextlib.suppress(OSError):
                if not any(NETNS_DIR.iterdir()):
                    syscalls.umount(NETNS_DIR, syscalls.MNT_DETACH)
                    NETNS_DIR.rmdir()
        shutil.rmtree(RUN_DIR)


def owner_of(name: str) -> dict[str, object] | None:
    """What `register` noted, or None: the fleet is not up, or was before this machine's boot."""
    try:
        owner: dict[str, object] = json.loads((RUN_DIR / name / "owner.json").read_text())
    except (OSError, ValueError):
        return None
    return owner if owner.get("boot_id") == machine_boot_id() else None


def _is_mounted(path: Path) -> bool:
    # os.path.ismount cannot see a folder that is mounted on itself
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(path) for line in mounts)


def _read_notes() -> dict[str, object]:
    try:
        noted: dict[str, object] = json.loads((RUN_DIR / "machine.json").read_text())
    except (OSError, ValueError):
        return {}
    return noted if noted.get("boot_id") == machine_boot_id() else {}


def _write_notes(noted: dict[str, object]) -> None:
    noted["boot_id"] = machine_boot_id()
    replace_text(RUN_DIR / "machine.json", json.dumps(noted, indent=1))


def _adjust_inotify_limit(noted: dict[str, object]) -> None:
    owners = (owner_of(path.name) for path in RUN_DIR.iterdir() if path.is_dir())
    host_count = sum(int(str(owner["size"])) for owner in owners if owner is not None)
    limit = int(INOTIFY_LIMIT.read_text())
    if host_count > HOSTS_WITHIN_DEFAULT_INOTIFY_LIMIT:
        needed = 128 + host_count * INOTIFY_INSTANCES_PER_HOST
        if limit < needed:
            noted.setdefault("inotify_limit_before", limit)
            INOTIFY_LIMIT.write_text(str(needed))
            noted["inotify_limit_set"] = needed
    elif "inotify_limit_before" in noted:
        if limit == noted["inotify_limit_set"]:  # else somebody else has changed it since
            INOTIFY_LIMIT.write_text(str(noted["inotify_limit_before"]))
        del noted["inotify_limit_before"], noted["inotify_limit_set"]


def make_fleet_cgroup(cgroup: Path) -> None:
    """The fleet's cgroup with the controllers that the machine offers, handed on to its hosts."""
    cgroup.mkdir(exist_ok=True)
    (cgroup / "supervisor").mkdir(exist_ok=True)
    for controller in (cgroup / "cgroup.controllers").read_text().split():
        if controller in CONTROLLERS:
            with contextlib.suppress(OSError):
                (cgroup / "cgroup.subtree_control").write_text(f"+{controller}")


# --- network ----------------------------------------------------------------------------------


def ip(*arguments: str, batch: str | None = None) -> None:
    """ip(8), with `batch` as its commands, one a line. Raises DemoError with what it said."""
    run_tool("ip", *arguments, *(("-batch", "-") if batch is not None else ()), stdin=batch or "")


def delete_network_namespaces(prefix: str) -> None:
    """All named ones that begin with `prefix`, with the links inside them."""
    if NETNS_DIR.is_dir():
        for path in NETNS_DIR.glob(f"{prefix}*"):
            ip("netns", "delete", path.name)
