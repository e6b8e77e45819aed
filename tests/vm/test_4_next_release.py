"""A release for cores of both NUMA nodes, kept free for it, in real time; then a power cut."""

from __future__ import annotations

import pytest

from demo.arm64_machine import Arm64Machine
from tests.e2e.support import Run

from . import tiny_model
from .conftest import FirstRollOut
from .support import NAME, Board, Control

CORES = "1-3"  # by itself the plan takes the big cores, and they are on one node
REALTIME = {"scheduling": "fifo", "scheduling_priority": 10, "allow_realtime": True}
SLICE = "/sys/fs/cgroup/edgellm.slice"


@pytest.fixture(scope="module", autouse=True)
def next_release(control: Control, first: FirstRollOut) -> Run:
    first.run.assert_ok(NAME)
    return control(cpus=CORES, workers=1, **REALTIME, reserve_cpus=True).assert_ok(NAME)


def test_cores_follow_the_inventory_while_the_slice_is_in_use(
    board: Board, next_release: Run, first: FirstRollOut
) -> None:
    assert board.current_release() == next_release.host(NAME)["release"] != first.release
    assert board.read(f"{SLICE}/cpuset.cpus.effective") == CORES
    assert set(board.threads()) == {(CORES, "SCHED_FIFO")}
    assert next_release.host(NAME)["plan"]["engine"]["n_threads"] == 3


def test_real_time_is_confirmed_and_nothing_waits_to_end_it(
    board: Board, next_release: Run
) -> None:
    release = next_release.host(NAME)["release"]
    assert board.read("/opt/edgellm/realtime-confirmed") == release
    assert board("ls /run/edgellm-realtime-trial 2>/dev/null || true") == ""
    assert board("systemctl list-timers --no-legend 'edgellm*'") == ""
    priority = next_release.host(NAME)["plan"]["scheduling"]["priority"]
    assert f"priority: {priority}" in board(f"chrt -p {board.main_pid()}")


def test_memory_is_bound_to_the_nodes_of_those_cores(board: Board, next_release: Run) -> None:
    assert next_release.host(NAME)["plan"]["numa"] == {"cpus": CORES, "nodes": [0, 1]}
    assert "bind:0-1" in board.memory_policies()


OTHERS = "cat /sys/fs/cgroup/system.slice/cpuset.cpus.effective"


def test_others_are_kept_off_those_cores(board: Board, next_release: Run) -> None:
    assert next_release.host(NAME)["plan"]["reserved_cpus"] == "0"
    assert board(OTHERS) == "0"


def test_what_was_reported_ok_survives_a_power_cut(
    arm64: Arm64Machine, board: Board, next_release: Run
) -> None:
    arm64.power_cut()
    arm64.up()
    board.wait_ready()
    assert board.current_release() == next_release.host(NAME)["release"]
    assert board.ask("Are you still there?").split() == list(tiny_model.WORDS)
    assert board.read(f"{SLICE}/cpuset.cpus.effective") == CORES
    assert set(board.threads()) == {(CORES, "SCHED_FIFO")}
    assert board(OTHERS) == "0"
    assert board.read("/proc/sys/vm/swappiness") == "100"
    assert len(board.swaps()) == 1
