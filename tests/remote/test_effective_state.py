"""effective_state: what is in force, read from a real process and from trees like a host's."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.facts.effective import Effective
from edgellm.observed import Account, EffectiveState, ResourceLimit, SysctlLine

Run = Callable[..., Any]

# A process with threads that differ, as somebody's taskset, chrt and prlimit leave them
BUSY = """
import ctypes, os, resource, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 2000))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
page = ctypes.create_string_buffer(64 << 10)
locked = ctypes.CDLL(None).mlock(page, len(page)) == 0
started = threading.Barrier(2)
def other():
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    open("/proc/thread-self/comm", "w").write("a) b \\x1b[2J(c")
    started.wait()
    time.sleep(60)
threading.Thread(target=other, daemon=True).start()
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
started.wait()
print("locked" if locked else "", flush=True)
time.sleep(60)
"""


@pytest.fixture
def busy() -> Iterator[tuple[int, bool]]:
    """(pid, whether it could lock memory)."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        locked = one.stdout.readline().strip() == "locked"
        yield one.pid, locked
        one.kill()


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """systemctl(**{"edgellm.service": {"MainPID": 1}}, enabled="enabled"): what it says."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def says(units: dict[str, dict[str, Any]], enabled: str = "disabled") -> None:
        blocks = [
            "\n".join(f"{name}={value}" for name, value in {"Id": unit, **values}.items())
            for unit, values in units.items()
        ]
        (tmp_path / "show").write_text("\n\n".join(blocks) + "\n")
        program = programs / "systemctl"
        program.write_text(
            f"#!/bin/sh\ncase $1 in show) cat {tmp_path}/show ;; *) echo {enabled} ;; esac\n"
        )
        program.chmod(0o755)

    says({})
    return says


@pytest.fixture
def look(run: Run, tmp_path: Path, systemctl: Any) -> Callable[..., Any]:
    """look(replacing={…}): the script's answer, with its own constants changed."""

    def at_this_machine(*, replacing: dict[str, str] | None = None, **asked: Any) -> Any:
        argument = {
            "service": "edgellm.service",
            "units": layout.UNITS,
            "slices": ("edgellm.slice", *layout.RESERVED_SLICES),
            "user": "nobody-of-this-name",
            "zram_unit": "edgellm-zram.service",
            "zram_note": str(tmp_path / "note"),
            "realtime_confirmed": str(tmp_path / "confirmed"),
            "realtime_trial": str(tmp_path / "trial"),
            **asked,
        }
        done = run("effective_state", argument, replacing=replacing)
        assert (done.returncode, done.stderr) == (0, "")
        return done.answer

    return at_this_machine


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# The process


def test_each_thread_has_its_own_policy_and_cpus(
    look: Any, systemctl: Any, busy: tuple[int, bool]
) -> None:
    pid, _ = busy
    systemctl({"edgellm.service": {"MainPID": pid, "ActiveState": "active"}})
    found = look()
    assert (found["main_pid"], found["service_state"]) == (pid, "active")
    (process,) = found["processes"]
    first, second = process["threads"]
    every = CpuSet.of(os.sched_getaffinity(0))
    assert (first["tid"], first["policy"], first["priority"], first["cpus"]) == (
        pid,
        "batch",
        0,
        str(every),
    )
    lowest = str(every.cpus[0])
    assert (second["comm"], second["policy"], second["cpus"]) == (
        "a) b ?[2J(c",  # a terminal would obey what stood there
        "idle",
        lowest,
    )


def test_a_process_has_its_limits_its_user_its_program_and_its_locked_memory(
    look: Any, systemctl: Any, busy: tuple[int, bool]
) -> None:
    pid, locked = busy
    systemctl({"edgellm.service": {"MainPID": pid}})
    (process,) = look()["processes"]
    assert process["nofile"] == {"soft": 1000, "hard": 2000}
    assert process["memlock"] == {"soft": 1 << 20, "hard": 1 << 20}
    assert process["uid"] == os.getuid()
    assert process["program"] == os.path.realpath(sys.executable)
    assert (process["vm_locked_bytes"] >= 64 << 10) is locked


@pytest.mark.parametrize("policy", ["fifo", "rr"])
def test_real_time_has_its_priority(
    look: Any, systemctl: Any, busy: tuple[int, bool], policy: str
) -> None:
    pid, _ = busy
    kind = {"fifo": os.SCHED_FIFO, "rr": os.SCHED_RR}[policy]
    try:
        os.sched_setscheduler(pid, kind, os.sched_param(7))
    except PermissionError:
        pytest.skip("real time is refused to tests here")
    systemctl({"edgellm.service": {"MainPID": pid}})
    thread = look()["processes"][0]["threads"][0]
    assert (thread["policy"], thread["priority"]) == (policy, 7)


def test_a_program_that_was_replaced_is_told(look: Any, systemctl: Any, tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([program, "60"]) as running:
        program.unlink()
        systemctl({"edgellm.service": {"MainPID": running.pid}})
        (process,) = look()["processes"]
        running.kill()
    assert process["program"] == f"{program} (deleted)"


def test_all_processes_of_the_cgroup_are_read_and_those_that_are_gone_are_not(
    look: Any, systemctl: Any, busy: tuple[int, bool], tmp_path: Path
) -> None:
    pid, _ = busy
    group = "/edgellm.slice/edgellm.service"
    tree(tmp_path, {f"cg{group}/cgroup.procs": f"{pid}\n{os.getpid()}\n4194303\n"})
    systemctl({"edgellm.service": {"MainPID": pid, "ControlGroup": group}})
    found = look(replacing=cgroups(tmp_path / "cg"))
    assert [process["pid"] for process in found["processes"]] == [pid, os.getpid()]


def test_a_host_without_systemd_or_service_is_no_error(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    found = look()
    assert (found["service_state"], found["main_pid"], found["processes"]) == (None, None, [])
    assert found["zram_unit_enabled"] is None
    assert found["account"] is None
    assert found["cpus_online"]
    assert found["nofile_of_systemd"] is not None


# cgroups


def cgroups(root: Path) -> dict[str, str]:
    return {
        '"/sys/fs/cgroup",': f'"{root}",',
        '"/sys/fs/cgroup/cgroup.controllers"': f'"{root}/cgroup.controllers"',
    }


SLICES: dict[str, dict[str, Any]] = {
    "edgellm.service": {"MainPID": 0, "ControlGroup": "/edgellm.slice/edgellm.service"},
    "edgellm.slice": {
        "ControlGroup": "/edgellm.slice",
        "AllowedCPUs": "2-3 8",
        "CPUWeight": "1000",
    },
    "system.slice": {"ControlGroup": "/system.slice", "AllowedCPUs": "", "CPUWeight": "[not set]"},
    "user.slice": {"ControlGroup": "", "AllowedCPUs": "", "CPUWeight": str(2**64 - 1)},
}


def test_slices_are_read_on_cgroup_v2(look: Any, systemctl: Any, tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "cgroup.controllers": "cpuset cpu\n",
            "edgellm.slice/cpuset.cpus": "2-3,8\n",
            "edgellm.slice/cpuset.cpus.effective": "2-3\n",
            "edgellm.slice/cpu.weight": "1000\n",
            "edgellm.slice/edgellm.service/cpu.stat": "usage_usec 1\nnr_throttled 7\n",
            "system.slice/cpuset.cpus": "\n",
            "system.slice/cpuset.cpus.effective": "0-3\n",
        },
    )
    systemctl(SLICES)
    found = look(replacing=cgroups(tmp_path))
    assert (found["cgroup_version"], found["nr_throttled"]) == (2, 7)
    assert found["slices"] == [
        {
            "name": "edgellm.slice",
            "allowed_cpus": "2-3,8",
            "effective_cpus": "2-3",
            "own_cpus": "2-3,8",
            "cpu_weight": 1000,
            "cpu_weight_set": 1000,
        },
        {
            "name": "system.slice",
            "allowed_cpus": None,
            "effective_cpus": "0-3",
            "own_cpus": "",
            "cpu_weight": None,
            "cpu_weight_set": None,
        },
        {
            "name": "user.slice",
            "allowed_cpus": None,
            "effective_cpus": None,
            "own_cpus": None,
            "cpu_weight": None,
            "cpu_weight_set": None,
        },
    ]


@pytest.mark.parametrize(
    ("weight", "shares"), [(1000, 10240), (333, 3409), (1, 10), (9999, 102389)]
)
def test_the_weight_of_cgroup_v1_is_the_one_that_systemd_was_given(
    look: Any, systemctl: Any, tmp_path: Path, weight: int, shares: int
) -> None:
    tree(
        tmp_path,
        {
            "cpu/edgellm.slice/cpu.shares": f"{shares}\n",
            "cpu/edgellm.slice/edgellm.service/cpu.stat": "nr_periods 9\nnr_throttled 3\n",
            # Beside v1, the unified hierarchy counts time alone
            "unified/edgellm.slice/edgellm.service/cpu.stat": "usage_usec 1\n",
            "unified/edgellm.slice/edgellm.service/cgroup.procs": "",
        },
    )
    systemctl(SLICES)
    found = look(replacing=cgroups(tmp_path))
    own = found["slices"][0]
    assert (own["cpu_weight"], own["effective_cpus"]) == (weight, None)
    assert (found["cgroup_version"], found["nr_throttled"]) == (1, 3)


# Drop-ins


def test_drop_ins_of_our_units_are_listed_once_loaded_or_not(
    look: Any, systemctl: Any, tmp_path: Path
) -> None:
    real, link = tmp_path / "usr", tmp_path / "lib"
    tree(
        real,
        {
            "edgellm.slice.d/50-AllowedCPUs.conf": "",
            "edgellm.slice.d/notes.txt": "",
            "edgellm-zram.service.d/other.conf": "",
            "service.d/all.conf": "",
        },
    )
    link.symlink_to(real)
    loaded = [f"{link}/edgellm.slice.d/50-AllowedCPUs.conf", f"{link}/service.d/all.conf"]
    systemctl({"edgellm.slice": {"DropInPaths": " ".join(loaded)}})
    found = look(replacing={"UNIT_DIRS = (": f'UNIT_DIRS = ("{real}", "{link}") or ('})
    assert found["foreign_drop_ins"] == [f"{real}/edgellm.slice.d/50-AllowedCPUs.conf"]


def test_a_drop_in_that_is_loaded_and_gone_is_still_told(
    look: Any, systemctl: Any, tmp_path: Path
) -> None:
    gone = f"{tmp_path}/edgellm.service.d/gone.conf"
    systemctl({"edgellm.service": {"DropInPaths": gone}})
    assert look()["foreign_drop_ins"] == [gone]


# sysctl.d, as systemd-sysctl reads it


@pytest.fixture
def sysctl(look: Any, tmp_path: Path) -> Callable[[dict[str, str]], list[tuple[str, int | None]]]:
    """sysctl({"etc/10-a.conf": "…"}): (file, value) in the order that they are applied."""
    folders = [str(tmp_path / name) for name in ("etc", "run", "usr")]

    def ask(files: dict[str, str]) -> list[tuple[str, int | None]]:
        tree(tmp_path, files)
        found = look(replacing={"SYSCTL_DIRS = (": f"SYSCTL_DIRS = {tuple(folders)!r} or ("})
        return [
            (os.path.relpath(line["path"], tmp_path), line["value"])
            for line in found["swappiness_lines"]
        ]

    return ask


def test_files_are_applied_by_name_whatever_their_directory(sysctl: Any) -> None:
    assert sysctl(
        {
            "etc/50-a.conf": "vm.swappiness=1\n",
            "usr/90-b.conf": "vm.swappiness = 2\n",
            "run/10-c.conf": "vm.swappiness =3\n",
            "usr/99-none.conf": "vm.overcommit_memory=1\n",
        }
    ) == [("run/10-c.conf", 3), ("etc/50-a.conf", 1), ("usr/90-b.conf", 2)]


def test_a_name_in_etc_hides_the_same_name_elsewhere(sysctl: Any) -> None:
    assert sysctl(
        {
            "usr/50-a.conf": "vm.swappiness=1\n",
            "run/50-a.conf": "vm.swappiness=2\n",
            "etc/50-a.conf": "# nothing of it\n",
            "run/60-b.conf": "vm.swappiness=3\n",
            "usr/60-b.conf": "vm.swappiness=4\n",
        }
    ) == [("run/60-b.conf", 3)]


def test_a_link_to_dev_null_hides_a_name_and_a_link_to_nowhere_does_not(
    sysctl: Any, tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "50-a.conf").symlink_to("/dev/null")
    (tmp_path / "etc" / "60-b.conf").symlink_to("/nowhere-at-all")
    (tmp_path / "etc" / "70-c.conf").mkdir()
    assert sysctl(
        {f"usr/{name}.conf": "vm.swappiness=1\n" for name in ("50-a", "60-b", "70-c")}
    ) == [("usr/60-b.conf", 1), ("usr/70-c.conf", 1)]


def test_etc_sysctl_conf_counts_where_a_distribution_has_linked_it(
    sysctl: Any, tmp_path: Path
) -> None:
    (tmp_path / "sysctl.conf").write_text("vm.swappiness=5\n")
    assert sysctl({"etc/README": "vm.swappiness=6\n"}) == []
    (tmp_path / "etc" / "99-sysctl.conf").symlink_to("../sysctl.conf")
    assert sysctl({}) == [("etc/99-sysctl.conf", 5)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("vm/swappiness=7", [7]),
        ("-vm.swappiness = 7", [7]),
        ("  - vm/swappiness =7", [7]),
        ("vm.swappiness=7\nvm.swappiness=8", [8]),
        ("vm.swappiness=7\n-vm.swappiness", [None]),  # not to be set, says sysctl.d(5)
        ("vm.swappiness=seven", [None]),
        ("vm.swappiness=7 # of 200", [7]),
        ("#vm.swappiness=7\n; vm.swappiness=8\nvm.swappiness\n", []),
        ("vm.swappiness.x=7\nvmxswappiness=8", []),
    ],
)
def test_lines_are_read_as_systemd_reads_them(
    sysctl: Any, text: str, values: list[int | None]
) -> None:
    assert [value for _, value in sysctl({"etc/a.conf": text})] == values


def test_what_no_locale_can_read_does_not_end_the_script(sysctl: Any, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "a.conf").write_bytes(b"# \xff\xfe\nvm.swappiness=9\n")
    assert sysctl({}) == [("etc/a.conf", 9)]


def test_a_copy_of_proc_sys_is_told(look: Any, tmp_path: Path) -> None:
    assert look()["swappiness_of_kernel"] in (True, False)
    copy = tmp_path / "swappiness"
    copy.write_text("60\n")
    replacing = {'is_of_kernel("/proc/sys/vm/swappiness")': f'is_of_kernel("{copy}")'}
    assert look(replacing=replacing)["swappiness_of_kernel"] is False
    gone = {'is_of_kernel("/proc/sys/vm/swappiness")': 'is_of_kernel("/nowhere")'}
    assert look(replacing=gone)["swappiness_of_kernel"] is None


# Swap, the clock, memory nodes, and the rest


def test_zram_swaps_are_read_with_their_device(look: Any, systemctl: Any, tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "swaps": "Filename Type Size Used Priority\n"
            "/dev/zram1 partition 947196 0 100\n/swap.img file 1 0 -2\n"
            "/dev/zram2 partition 4 0 -3\n",
            "block/zram1/comp_algorithm": "lzo lzo-rle [lz4] zstd\n",
            "block/zram1/disksize": "969932800\n",
            "note": "/dev/zram1\n",
        },
    )
    systemctl({}, enabled="enabled")
    found = look(
        replacing={
            '"/proc/swaps"': f'"{tmp_path}/swaps"',
            'f"/sys/block/{device}/"': f'"{tmp_path}/block/" + device + "/"',
        }
    )
    assert (found["zram_device"], found["zram_unit_enabled"]) == ("zram1", True)
    assert found["zram_swaps"] == [
        {"device": "zram1", "algorithm": "lz4", "size_bytes": 969932800, "priority": 100},
        {"device": "zram2", "algorithm": None, "size_bytes": None, "priority": -3},
    ]


def test_governors_are_told_each_once(look: Any, tmp_path: Path) -> None:
    for policy, governor in (("0", "schedutil"), ("4", "performance"), ("6", "schedutil")):
        tree(tmp_path, {f"policy{policy}/scaling_governor": f"{governor}\n"})
    pattern = '"/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"'
    found = look(replacing={pattern: f'"{tmp_path}/policy*/scaling_governor"'})
    assert found["governors"] == ["performance", "schedutil"]


NUMA_MAPS = """\
5580000000 default anon=300 dirty=300 N0=100 N1=200 kernelpagesize_kB=4
7f00000000 default file=/opt/edgellm/model.gguf mapped=900 N1=900 kernelpagesize_kB=4
7f10000000 default anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7f20000000 default
7f30000000 default heap anon=16 N1=16 kernelpagesize_kB=16
"""


def test_pages_are_counted_by_node_in_4_kib(look: Any, systemctl: Any, tmp_path: Path) -> None:
    tree(tmp_path, {"node0/x": "", "node1/x": "", f"{os.getpid()}": NUMA_MAPS})
    systemctl({"edgellm.service": {"MainPID": os.getpid()}})
    replacing = {
        '"/sys/devices/system/node/node[0-9]*"': f'"{tmp_path}/node[0-9]*"',
        'f"/proc/{pid}/numa_maps"': f'"{tmp_path}/" + pid',
    }
    assert look(replacing=replacing)["node_pages"] == [
        {"node": 0, "anonymous": 100 + 2 * 512, "file": 0},
        {"node": 1, "anonymous": 200 + 16 * 4, "file": 900},
    ]
    (tmp_path / f"{os.getpid()}").unlink()
    assert look(replacing=replacing)["node_pages"] == []


def test_one_node_has_no_pages_to_count(look: Any, systemctl: Any, tmp_path: Path) -> None:
    tree(tmp_path, {"node0/x": ""})
    systemctl({"edgellm.service": {"MainPID": os.getpid()}})
    replacing = {'"/sys/devices/system/node/node[0-9]*"': f'"{tmp_path}/node[0-9]*"'}
    assert look(replacing=replacing)["node_pages"] == []


def test_the_account_is_read_as_the_name_service_has_it(look: Any) -> None:
    root = pwd.getpwnam("root")
    assert look(user="root")["account"] == {
        "uid": 0,
        "group": grp.getgrgid(root.pw_gid).gr_name,
        "comment": root.pw_gecos,
        "home": root.pw_dir,
        "shell": root.pw_shell,
    }
    assert look(user="no-such-account")["account"] is None


def test_real_time_is_confirmed_for_the_release_in_the_files_first_line(
    look: Any, tmp_path: Path
) -> None:
    (tmp_path / "confirmed").write_text("3abadcf8e3b5c3fa\nand more\n")
    (tmp_path / "trial").write_text("")
    found = look()
    assert (found["realtime_confirmed"], found["realtime_trial"]) == ("3abadcf8e3b5c3fa", "")


def test_the_fact_reads_the_scripts_own_line(
    run: Run, systemctl: Any, busy: tuple[int, bool], tmp_path: Path
) -> None:
    pid, _ = busy
    systemctl({**SLICES, "edgellm.service": {"MainPID": pid, "ActiveState": "active"}})
    (tmp_path / "90-a.conf").write_text("vm.swappiness=1\n")
    argument = {
        "service": "edgellm.service",
        "units": layout.UNITS,
        "slices": ("edgellm.slice",),
        "user": "root",
        "zram_unit": "z.service",
        "zram_note": "/nowhere",
        "realtime_confirmed": "/nowhere",
        "realtime_trial": "/nowhere",
    }
    done = run(
        "effective_state",
        argument,
        replacing={"SYSCTL_DIRS = (": f'SYSCTL_DIRS = ("{tmp_path}",) or ('},
    )
    found = Effective().process(["a banner of the login shell", *done.stdout.splitlines()])
    assert isinstance(found, EffectiveState)
    assert isinstance(found.account, Account)
    (process,) = found.processes
    assert process.nofile == ResourceLimit(soft=1000, hard=2000)
    assert [thread.policy for thread in process.threads] == ["batch", "idle"]
    assert process.threads[1].cpus == CpuSet.of([min(os.sched_getaffinity(0))])
    own = found.slice("edgellm.slice")
    assert own is not None
    assert own.allowed_cpus == CpuSet.of([2, 3, 8])
    assert found.slice("other.slice") is None
    assert found.swappiness_lines == (SysctlLine(path=f"{tmp_path}/90-a.conf", value=1),)
    assert found.cpus_online is not None
