"""What the plan says is in force on a real kernel: after the first roll-out, and after a reboot."""

from __future__ import annotations

import pytest

from demo.arm64_machine import Arm64Machine

from . import tiny_model
from .conftest import FirstRollOut
from .support import NAME, WITHOUT_SMOKE_TEST, Board, Control

SLICE = "/sys/fs/cgroup/edgellm.slice"
BIG_CORES = "2-3"
MIB = 1 << 20


@pytest.fixture(scope="module", params=["rolled out", "rebooted"], autouse=True)
def settled(
    request: pytest.FixtureRequest, arm64: Arm64Machine, board: Board, first: FirstRollOut
) -> str:
    """All tests of this file run twice: on the machine as rolled out to, then as it booted."""
    first.run.assert_ok(NAME)
    if request.param == "rebooted":
        arm64.reboot()
        board.wait_ready()
    return str(request.param)


def test_release_that_the_report_names_runs(board: Board, first: FirstRollOut) -> None:
    assert board("systemctl is-active edgellm.service edgellm.slice").split() == ["active"] * 2
    assert board.current_release() == first.release
    environment = board(f"tr '\\000' '\\n' </proc/{board.main_pid()}/environ").splitlines()
    assert f"EDGELLM_RELEASE={first.release}" in environment


def test_model_answers_as_its_weights_say(board: Board) -> None:
    assert board.ask("Do you hear me?").split() == list(tiny_model.WORDS)


def test_slice_has_the_big_cores_only(board: Board) -> None:
    assert board.read(f"{SLICE}/cpuset.cpus.effective") == BIG_CORES


def test_every_thread_is_on_the_big_cores_by_sched_batch(board: Board) -> None:
    threads = board.threads()
    assert len(threads) > 4  # the server's, and the engine's
    assert set(threads) == {(BIG_CORES, "SCHED_BATCH")}


def test_engine_has_one_thread_a_big_core(board: Board, first: FirstRollOut) -> None:
    assert first.run.host(NAME)["plan"]["engine"]["n_threads"] == 2
    environment = board(f"tr '\\000' '\\n' </proc/{board.main_pid()}/environ").splitlines()
    assert "EDGELLM_N_THREADS=2" in environment


def test_slice_outweighs_all_others(board: Board) -> None:
    assert board.read(f"{SLICE}/cpu.weight") == "1000"
    assert board.read("/sys/fs/cgroup/system.slice/cpu.weight") == "100"


def test_swappiness_is_that_of_a_host_whose_only_swap_is_zram(
    board: Board, first: FirstRollOut
) -> None:
    assert first.run.host(NAME)["plan"]["swappiness"] == 100
    assert board.read("/proc/sys/vm/swappiness") == "100"
    assert "vm.swappiness = 100" in board.read("/etc/sysctl.d/90-edgellm.conf")


def test_half_of_the_memory_is_zram_swap_of_the_planned_priority(
    board: Board, first: FirstRollOut
) -> None:
    plan = first.run.host(NAME)["plan"]["zram"]
    assert plan["manager"] == "own-unit"
    memory_bytes = int(board("awk '/^MemTotal/ { print $2 }' /proc/meminfo")) * 1024
    assert plan["size_bytes"] == memory_bytes // 2 // MIB * MIB
    (swap,) = board.swaps()
    assert swap["Filename"].startswith("/dev/zram")
    assert swap["Priority"] == str(plan["priority"]) == "100"
    name = swap["Filename"].removeprefix("/dev/")
    assert board.read(f"/sys/block/{name}/disksize") == str(plan["size_bytes"])
    page_kib = 4  # the first one is the swap's header
    assert int(swap["Size"]) == plan["size_bytes"] // 1024 - page_kib


def test_memory_really_goes_to_zram(board: Board) -> None:
    """Reclaimed from a shell's cgroup by memory.reclaim (kernel 5.19), and read back unharmed."""
    said = board(
        """set -e
        group=/sys/fs/cgroup/swapped; mkdir $group
        (echo 0 >$group/cgroup.procs; exec python3 -c '
import sys, pathlib
data = bytes(range(256)) * 16 * 1024  # 4 MiB
try: pathlib.Path("/sys/fs/cgroup/swapped/memory.reclaim").write_text("4M")
except OSError: pass  # it got less than it wanted
swapped = int(pathlib.Path("/sys/fs/cgroup/swapped/memory.swap.current").read_text())
print(swapped, data == bytes(range(256)) * 16 * 1024)')
        sleep 1; rmdir $group"""
    ).split()
    assert int(said[0]) > MIB
    assert said[1] == "True"


def test_limits_of_the_unit_reach_the_server(board: Board, first: FirstRollOut) -> None:
    memlock = str(first.run.host(NAME)["plan"]["limits"]["memlock_bytes"])
    assert board.limit("Max open files") == ("65536", "65536")
    assert board.limit("Max locked memory") == (memlock, memlock)


def test_model_is_locked_in_memory(board: Board, first: FirstRollOut) -> None:
    assert first.run.host(NAME)["plan"]["engine"]["mlock"] is True
    locked_bytes = int(board.status()["VmLck"].split()[0]) * 1024
    assert locked_bytes > tiny_model.WEIGHTS_BYTES


def test_memory_of_both_nodes_is_allowed_as_the_cores_in_use_are_on_one(
    board: Board, first: FirstRollOut
) -> None:
    record = first.run.host(NAME)
    assert record["plan"]["numa"] is None
    (reason,) = [reason for reason in record["reasons"] if reason["knob"] == "numa"]
    assert reason["text"] == "2 nodes, but the CPUs in use are on one: nothing to spread"
    assert board.status()["Mems_allowed_list"] == "0-1"
    assert board.memory_policies() == {"default"}


def test_next_run_changes_nothing(board: Board, control: Control, first: FirstRollOut) -> None:
    look = "systemctl show edgellm edgellm-zram --property=MainPID,NRestarts,ActiveEnterTimestamp"
    before = board(look)
    run = control(**WITHOUT_SMOKE_TEST).assert_ok(NAME).assert_changed_nothing()
    assert run.host(NAME)["release"] == first.release
    assert run.host(NAME)["plan"] == first.run.host(NAME)["plan"]
    assert board(look) == before
