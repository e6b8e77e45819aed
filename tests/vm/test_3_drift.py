"""What an update or a hand changes in the kernel: an audit names it, the next run puts it right.

Here are the drifts that a container cannot have; tests/e2e/test_drift.py has the others. Every
other audit proves as well that the repair before it left nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from .conftest import FirstRollOut
from .support import NAME, WITHOUT_SMOKE_TEST, Board, Control

GROUP = "/sys/fs/cgroup/edgellm.slice/edgellm.service"
PID = "$(systemctl show edgellm --property=MainPID --value)"
ENGINE_THREAD = f"$(tail -n 1 {GROUP}/cgroup.threads)"
VENDOR = "/etc/sysctl.d/99-vendor.conf"
LAST_CORE = "/sys/devices/system/cpu/cpu3/online"
MODULES = "/lib/modules/$(uname -r)"


@dataclass(frozen=True)
class Drift:
    """What was done, the knobs that an audit names for it, the operations that repair them."""

    what: str
    command: str
    named: tuple[str, ...]
    repaired_by: tuple[str, ...]


KERNEL_FILES = "sysctl.d and limits.d files present"
SWAPPINESS = "vm.swappiness in force"
ZRAM = "zram swap in force"
SERVICE = "Service runs the release"

DRIFTS = (
    Drift(
        "swappiness reverted, zram swap off",
        "sysctl -q vm.swappiness=60 && systemctl stop edgellm-zram",
        ("swappiness", "zram"),
        (SWAPPINESS, ZRAM),
    ),
    Drift(
        "a sysctl file that comes after ours, a core taken away in the slice's cgroup",
        f"echo vm.swappiness=60 >{VENDOR} && /lib/systemd/systemd-sysctl && "
        "echo 3 >/sys/fs/cgroup/edgellm.slice/cpuset.cpus",
        ("allowed_cpus", "cpus", "swappiness"),
        (KERNEL_FILES, SWAPPINESS, SERVICE),
    ),
    Drift(
        "that file gone again; a thread of another policy, limits lowered, the slice opened",
        f"rm {VENDOR} && /lib/systemd/systemd-sysctl && chrt --other -p 0 {PID} && "
        f"prlimit --pid {PID} --nofile=1000:1000 --memlock=4096:4096 && "
        "systemctl set-property --runtime edgellm.slice AllowedCPUs=0-3 CPUWeight=50",
        ("drop_ins", "memlock", "nofile", "scheduling", "swappiness"),
        (KERNEL_FILES, SERVICE),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def rolled_out(first: FirstRollOut) -> None:
    first.run.assert_ok(NAME)


@pytest.mark.parametrize("drift", DRIFTS, ids=[drift.what for drift in DRIFTS])
def test_drift_is_named_and_repaired_and_nothing_else_is(
    board: Board, control: Control, drift: Drift
) -> None:
    board(drift.command)
    audited = control("audit")
    assert audited.exit_code == 2, audited.output
    assert audited.drifted() == {NAME: sorted(drift.named)}
    run = control(**WITHOUT_SMOKE_TEST).assert_ok(NAME)
    assert run.changed() == {NAME: list(drift.repaired_by)}
    assert run.repaired() == {NAME: sorted(drift.named)}


@pytest.fixture
def newer_kernel(board: Board) -> Iterator[None]:
    """As after an update to a kernel whose package has no zram, on a board that lost a core."""
    board(
        f"""systemctl stop edgellm-zram && modprobe -r zram && cd {MODULES} &&
        mv $(find . -name 'zram.ko*') /root && depmod && echo 0 >{LAST_CORE}"""
    )
    yield
    board(f"cd {MODULES} && mv /root/zram.ko* kernel/ && depmod && echo 1 >{LAST_CORE}")


def test_plan_follows_the_host_that_there_is(
    board: Board, control: Control, newer_kernel: None
) -> None:
    assert control("audit").drifted() == {NAME: ["release", "zram"]}
    run = control(**WITHOUT_SMOKE_TEST).assert_ok(NAME)
    assert run.repaired() == {NAME: ["release", "zram"]}
    plan = run.host(NAME)["plan"]
    assert (plan["engine"]["n_threads"], plan["cpus"]) == (1, "0-2")
    assert plan["zram"]["manager"] == "none"
    (why,) = [r["text"] for r in run.host(NAME)["reasons"] if r["knob"] == "zram"]
    assert "module" in why
    assert board.read("/proc/sys/vm/swappiness") == "10" == str(plan["swappiness"])
    assert board.swaps() == []
    environment = board(f"tr '\\000' '\\n' </proc/{board.main_pid()}/environ").splitlines()
    assert "EDGELLM_N_THREADS=1" in environment


def test_the_host_as_it_was_gets_the_release_that_it_had(
    board: Board, control: Control, first: FirstRollOut
) -> None:
    assert control("audit").drifted() == {NAME: ["release", "zram"]}
    run = control(**WITHOUT_SMOKE_TEST).assert_ok(NAME)
    assert run.host(NAME)["release"] == first.release
    assert control("audit").assert_ok(NAME).drifted() == {NAME: []}
    assert board.read("/sys/fs/cgroup/edgellm.slice/cpuset.cpus.effective") == "2-3"
    assert set(board.threads()) == {("2-3", "SCHED_BATCH")}
    assert len(board.swaps()) == 1
