"""SmolLM2-135M in place of the model that counts: a real answer."""

from __future__ import annotations

import pytest

from tests.e2e.support import Run

from .conftest import FirstRollOut
from .support import NAME, REAL_MODEL, WITHOUT_SMOKE_TEST, Board, Control

ALL = "0-3"
ALL_CORES = {"cpus": ALL, "workers": 1}


@pytest.fixture(scope="module")
def real_release(control: Control, first: FirstRollOut) -> Run:
    first.run.assert_ok(NAME)
    # The tests ask it once themselves: each answer takes a minute here
    return control(**REAL_MODEL, **WITHOUT_SMOKE_TEST, **ALL_CORES).assert_ok(NAME)


def test_real_model_answers_in_words(board: Board, real_release: Run) -> None:
    assert real_release.host(NAME)["plan"]["engine"]["n_threads"] == 4
    assert "hello" in board.ask("Hello", max_tokens=6).lower()


def test_real_model_is_locked_in_memory(board: Board, real_release: Run) -> None:
    locked_bytes = int(board.status()["VmLck"].split()[0]) * 1024
    assert locked_bytes > 0.9 * REAL_MODEL["model_size_bytes"]  # the header need not be


def test_no_cpuset_of_the_release_before_is_left(board: Board, real_release: Run) -> None:
    assert real_release.host(NAME)["plan"]["allowed_cpus"] is None
    # systemd leaves it there by itself while another slice has one (systemd#43846)
    assert board("cat /sys/fs/cgroup/edgellm.slice/cpuset.cpus 2>/dev/null || true") == ""
    assert {cpus for cpus, _ in board.threads()} == {ALL}


def test_others_have_all_cores_again_that_no_release_asks_for(
    board: Board, real_release: Run
) -> None:
    assert real_release.host(NAME)["plan"]["reserved_cpus"] is None
    # By the kernel's word on a process of system.slice: no slice asks for the controller now
    ssh = board("systemctl show ssh --property=MainPID --value")
    assert f"Cpus_allowed_list:\t{ALL}" in board(f"cat /proc/{ssh}/status").splitlines()
