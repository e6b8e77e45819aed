# argv[1]: JSON {service, units, slices, user, zram_unit, zram_note, realtime_confirmed,
# realtime_trial}. Prints what is in force now: each thread of the service, its cgroup, its slices,
# and the kernel's settings. Reads only, needs no rights, never fails: null is "not there, or not to
# be read".
import glob
import grp
import json
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

asked = json.loads(sys.argv[1])
# sched(7), and 7 of sched_ext
POLICIES = {0: "other", 1: "fifo", 2: "rr", 3: "batch", 5: "idle", 6: "deadline", 7: "ext"}
NUMA_MAPS_WITHIN_S = 3.0  # the kernel walks the page tables of all processes asked for
UNIT_DIRS = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
# No /etc/sysctl.conf: systemd-sysctl reads it only where a distribution has linked it into
# /etc/sysctl.d, as Debian did up to 12.
SYSCTL_DIRS = (
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
)


def read(path: str) -> str | None:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def lines(path: str) -> list[str]:
    return (read(path) or "").splitlines()


def show() -> dict[str, dict[str, str]]:
    """Unit -> what systemd says of it."""
    names = "Id,ActiveState,MainPID,NRestarts,ControlGroup,DropInPaths,AllowedCPUs,CPUWeight"
    units = [*asked["units"], *(name for name in asked["slices"] if name not in asked["units"])]
    command = ["systemctl", "show", "--property=" + names, "--", *units]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    blocks = [
        dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        for block in done.stdout.decode(errors="replace").split("\n\n")
    ]
    return {block["Id"]: block for block in blocks if "Id" in block}


def in_cgroup(group: str | None, *candidates: str) -> str | None:
    """The first of the files that is there; a candidate is 'cpu:cpu.shares', or a name for v2."""
    if not group:
        return None
    for candidate in candidates:
        controller, _, name = candidate.rpartition(":")
        for root in [controller] if controller else ["", "unified", "systemd"]:
            text = read(os.path.join("/sys/fs/cgroup", root, group.lstrip("/"), name))
            if text is not None:
                return text
    return None


def shown(text: str) -> str:
    """Names that any program may give itself, without what a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def thread(pid: str, tid: str) -> dict[str, Any] | None:
    folder = f"/proc/{pid}/task/{tid}/"
    text = read(folder + "stat")
    if text is None:
        return None
    comm, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return {
        "tid": int(tid),
        "comm": shown(comm),
        "policy": POLICIES.get(int(fields[38]), fields[38]),
        "priority": int(fields[37]),
        "cpus": named(lines(folder + "status"), "Cpus_allowed_list:"),
    }


def named(rows: list[str], name: str) -> str | None:
    found = [row[len(name) :].strip() for row in rows if row.startswith(name)]
    return found[0] if found else None


def limit(pid: str, name: str) -> dict[str, int | None] | None:
    values = (named(lines(f"/proc/{pid}/limits"), name) or "").split()
    if len(values) < 2:
        return None
    soft, hard = [None if value == "unlimited" else int(value) for value in values[:2]]
    return {"soft": soft, "hard": hard}


def process(pid: str) -> dict[str, Any] | None:
    folder = f"/proc/{pid}/"
    try:
        tids = sorted(os.listdir(folder + "task"), key=int)
    except OSError:
        return None
    status = lines(folder + "status")
    locked_kib = number((named(status, "VmLck:") or "").split(" ")[0])
    try:
        program: str | None = shown(os.readlink(folder + "exe"))
    except OSError:
        program = None
    return {
        "pid": int(pid),
        "uid": number((named(status, "Uid:") or "").split("\t")[0]),
        "program": program,
        "threads": [found for found in (thread(pid, tid) for tid in tids) if found],
        "vm_locked_bytes": None if locked_kib is None else locked_kib * 1024,
        "nofile": limit(pid, "Max open files"),
        "memlock": limit(pid, "Max locked memory"),
    }


def node_pages(pids: list[str]) -> list[dict[str, int]]:
    if len(glob.glob("/sys/devices/system/node/node[0-9]*")) < 2:
        return []
    until = time.monotonic() + NUMA_MAPS_WITHIN_S
    pages: dict[int, dict[str, int]] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/numa_maps") as file:
                for line in file:
                    kind = "file" if " file=" in line else "anonymous"
                    size = number((re.findall(r"kernelpagesize_kB=(\d+)", line) or ["4"])[0])
                    for node, count in re.findall(r" N(\d+)=(\d+)", line):
                        own = pages.setdefault(int(node), {"anonymous": 0, "file": 0})
                        own[kind] += int(count) * (size or 4) // 4
                    if time.monotonic() > until:
                        return []
        except OSError:
            return []
    return [dict(found, node=node) for node, found in sorted(pages.items())]


def foreign_drop_ins(units: dict[str, dict[str, str]]) -> list[str]:
    """Of our units by name, loaded or not; what is for every unit of a type is not listed."""
    found: set[str] = set()
    for unit in asked["units"]:
        paths = units.get(unit, {}).get("DropInPaths", "").split()
        for directory in UNIT_DIRS:
            paths += glob.glob(os.path.join(directory, unit + ".d", "*.conf"))
        for path in paths:
            folder, name = os.path.split(path)
            if os.path.basename(folder) == unit + ".d":
                # One file, not two, where /lib is a link to /usr/lib
                found.add(os.path.join(os.path.realpath(folder), name))
    return sorted(found)


def swappiness_lines() -> list[dict[str, Any]]:
    """As systemd-sysctl applies them: by name; of one name, the file in the first directory."""
    files: dict[str, str] = {}
    for directory in SYSCTL_DIRS:
        for path in glob.glob(os.path.join(directory, "*.conf")):
            # A link to /dev/null hides the same name in later directories; one to nowhere does not
            if os.path.exists(path) and not os.path.isdir(path):
                files.setdefault(os.path.basename(path), path)
    found = []
    for _, path in sorted(files.items()):
        values = [value for line in lines(path) for value in swappiness_in(line)]
        if values:
            found.append({"path": path, "value": values[-1]})
    return found


def swappiness_in(line: str) -> Iterator[int | None]:
    """The value that one line of a sysctl.d file gives; None: it takes the key out again."""
    key, equals, value = line.strip().partition("=")
    key = key.strip()
    if key.startswith(("#", ";")) or not (equals or key.startswith("-")):
        return
    if key.startswith("-"):  # "a failure is no matter"; without a value: not to be set
        key = key[1:].strip()
    if key.replace("/", ".") == "vm.swappiness":
        yield number((value.split() or [""])[0])


def zram_swaps() -> Iterator[dict[str, Any]]:
    for line in lines("/proc/swaps")[1:]:
        words = line.split()
        if len(words) < 5 or not words[0].startswith("/dev/zram"):
            continue
        device = words[0][len("/dev/") :]
        folder = f"/sys/block/{device}/"
        algorithm = re.findall(r"\[(\S+)\]", read(folder + "comp_algorithm") or "")
        yield {
            "device": device,
            "algorithm": algorithm[0] if algorithm else None,
            "size_bytes": number(read(folder + "disksize")),
            "priority": number(words[4]),
        }


def slice_state(name: str, said: dict[str, str]) -> dict[str, Any]:
    group = said.get("ControlGroup") or "/" + name
    shares = number(in_cgroup(group, "cpu:cpu.shares"))
    weight = number(in_cgroup(group, "cpu.weight"))
    if weight is None and shares is not None:
        weight = round(shares * 100 / 1024)  # what systemd writes for a CPUWeight= on v1
    cpus = in_cgroup(group, "cpuset.cpus.effective", "cpuset:cpuset.effective_cpus")
    own = in_cgroup(group, "cpuset.cpus")  # of v2 alone: systemd sets none on v1
    weight_set = number(said.get("CPUWeight"))
    return {
        "name": name,
        "allowed_cpus": said.get("AllowedCPUs", "").replace(" ", ",") or None,
        "effective_cpus": cpus or None,
        "own_cpus": own,
        "cpu_weight": weight,
        # Unset is "[not set]", or the largest number there is, by systemd's version
        "cpu_weight_set": weight_set if weight_set is not None and weight_set <= 10000 else None,
    }


def is_enabled(unit: str) -> bool | None:
    try:
        command = ["systemctl", "is-enabled", unit]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() == "enabled"


def is_of_kernel(path: str) -> bool | None:
    """Whether a file of /proc/sys is the kernel's own, and not one that was put in its place."""
    try:
        return os.stat(path).st_dev == os.stat("/proc/self").st_dev
    except OSError:
        return None


def account(user: str) -> dict[str, Any] | None:
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return None
    try:
        group: str | None = grp.getgrgid(found.pw_gid).gr_name
    except KeyError:
        group = None
    return {
        "uid": found.pw_uid,
        "group": group,
        "comment": found.pw_gecos,
        "home": found.pw_dir,
        "shell": found.pw_shell,
    }


def first_line(path: str) -> str | None:
    text = read(path)
    return None if text is None else text.split("\n")[0].strip()


def throttled(group: str | None) -> int | None:
    # v1 first: beside it, v2 has a cpu.stat that counts no throttling
    rows = (in_cgroup(group, "cpu:cpu.stat", "cpu.stat") or "").splitlines()
    return number(named(rows, "nr_throttled "))


units = show()
service = units.get(asked["service"], {})
group = service.get("ControlGroup")
main_pid = number(service.get("MainPID")) or None
pids = (in_cgroup(group, "cgroup.procs", "systemd:cgroup.procs") or "").split()
if main_pid is not None and not pids:
    pids = [str(main_pid)]
zram_note = os.path.basename(read(asked["zram_note"]) or "") or None
governors = glob.glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor")
print(
    json.dumps(
        {
            "account": account(asked["user"]),
            "service_state": service.get("ActiveState"),
            "n_restarts": number(service.get("NRestarts")),
            "main_pid": main_pid,
            "processes": [found for found in map(process, pids) if found],
            "foreign_drop_ins": foreign_drop_ins(units),
            "cgroup_version": 2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else 1,
            "slices": [slice_state(name, units.get(name, {})) for name in asked["slices"]],
            "nr_throttled": throttled(group),
            "node_pages": node_pages(pids),
            "cpus_online": read("/sys/devices/system/cpu/online"),
            "swappiness": number(read("/proc/sys/vm/swappiness")),
            "swappiness_of_kernel": is_of_kernel("/proc/sys/vm/swappiness"),
            "swappiness_lines": swappiness_lines(),
            "zram_swaps": list(zram_swaps()),
            "zram_device": zram_note,
            "zram_unit_enabled": is_enabled(asked["zram_unit"]),
            "governors": sorted({text for text in map(read, governors) if text}),
            "nofile_of_systemd": limit("1", "Max open files"),
            "memlock_of_systemd": limit("1", "Max locked memory"),
            "realtime_confirmed": first_line(asked["realtime_confirmed"]),
            "realtime_trial": first_line(asked["realtime_trial"]),
        }
    )
)
