"""A release for the cores of both NUMA nodes, and a power cut right after it was reported ok."""

from __future__ import annotations

import pytest

from demo.arm64_machine import Arm64Machine
from tests.e2e.support import Run

from . import tiny_model
from .conftest import FirstRollOut
from .support import NAME, Board, Control

CORES = "1-3"  # by itself the plan takes the big cores, and they are on one node
SLICE = "/sys/fs/cgroup/edgellm.slice"


@pytest.fixture(scope="module", autouse=True)
def next_release(control: Control, first: FirstRollOut) -> Run:
    first.run.assert_ok(NAME)
    return control(cpus=CORES, workers=1).assert_ok(NAME)


def test_cores_follow_the_inventory_while_the_slice_is_in_use(
    board: Board, next_release: Run, first: FirstRollOut
) -> None:
    assert board.current_release() == next_release.host(NAME)["release"] != first.release
    assert board.read(f"{SLICE}/cpuset.cpus.effective") == CORES
    assert set(board.threads()) == {(CORES, "SCHED_BATCH")}


def test_memory_is_bound_to_the_nodes_of_those_cores(board: Board, next_release: Run) -> None:
    assert next_release.host(NAME)["plan"]["numa"] == {"cpus": CORES, "nodes": [0, 1]}
    assert "bind:0-1" in board.memory_policies()


def test_what_was_reported_ok_survives_a_power_cut(
    arm64: Arm64Machine, board: Board, next_release: Run
) -> None:
    arm64.power_cut()
    arm64.up()
    board.wait_ready()
    assert board.current_release() == next_release.host(NAME)["release"]
    assert board.ask("Are you still there?").split() == list(tiny_model.WORDS)
    assert board.read(f"{SLICE}/cpuset.cpus.effective") == CORES
    assert board.read("/proc/sys/vm/swappiness") == "100"
    assert len(board.swaps()) == 1
