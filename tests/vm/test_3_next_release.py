"""A release with a real model and the cores of both NUMA nodes, and a power cut right after it."""

from __future__ import annotations

import pytest

from demo.arm64_machine import Arm64Machine
from tests.e2e.support import MODEL_PATH, MODEL_SHA256, Run

from .conftest import FirstRollOut
from .support import BOTH_NODES, NAME, REAL_MODEL, Board, Control

CORES = "1-3"


@pytest.fixture(scope="module", autouse=True)
def next_release(board: Board, control: Control, first: FirstRollOut) -> Run:
    first.run.assert_ok(NAME)
    return control(**REAL_MODEL, **BOTH_NODES, smoke_max_tokens=6).assert_ok(NAME)


def test_real_model_answers_in_words(next_release: Run, first: FirstRollOut) -> None:
    record = next_release.host(NAME)
    assert record["release"] != first.release
    assert any(word.isalpha() for word in record["answer_sample"].split()), record
    assert record["ttft_ms"]["median"] > 0


def test_cores_follow_the_inventory_while_the_slice_is_in_use(board: Board) -> None:
    assert board.read("/sys/fs/cgroup/edgellm.slice/cpuset.cpus.effective") == CORES
    assert set(board.threads()) == {(CORES, "SCHED_BATCH")}


def test_memory_is_bound_to_the_nodes_of_those_cores(board: Board, next_release: Run) -> None:
    assert next_release.host(NAME)["plan"]["numa"] == {"cpus": CORES, "nodes": [0, 1]}
    assert "bind:0-1" in board.memory_policies()


def test_real_model_is_locked_in_memory(board: Board) -> None:
    assert int(board.status()["VmLck"].split()[0]) > 90_000


def test_what_was_reported_ok_survives_a_power_cut(
    arm64: Arm64Machine, board: Board, next_release: Run
) -> None:
    arm64.power_cut()
    arm64.up()
    board.wait_ready()
    assert board.current_release() == next_release.host(NAME)["release"]
    assert board(f"sha256sum {MODEL_PATH}").split()[0] == MODEL_SHA256
    assert board.read("/proc/sys/vm/swappiness") == "100"
    assert len(board.swaps()) == 1
    assert set(board.threads()) == {(CORES, "SCHED_BATCH")}
