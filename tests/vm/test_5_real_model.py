"""SmolLM2-135M in place of the model that counts: a real answer."""

from __future__ import annotations

import pytest

from tests.e2e.support import Run

from .conftest import FirstRollOut
from .support import NAME, REAL_MODEL, WITHOUT_SMOKE_TEST, Board, Control


@pytest.fixture(scope="module")
def real_release(control: Control, first: FirstRollOut) -> Run:
    first.run.assert_ok(NAME)
    # The tests ask it once themselves: each answer takes a minute here
    return control(**REAL_MODEL, **WITHOUT_SMOKE_TEST).assert_ok(NAME)


def test_real_model_answers_in_words(board: Board, real_release: Run) -> None:
    assert real_release.host(NAME)["plan"]["engine"]["n_threads"] == 2
    assert "hello" in board.ask("Hello", max_tokens=6).lower()


def test_real_model_is_locked_in_memory(board: Board, real_release: Run) -> None:
    locked_bytes = int(board.status()["VmLck"].split()[0]) * 1024
    assert locked_bytes > 0.9 * REAL_MODEL["model_size_bytes"]  # the header need not be


def test_others_have_all_cores_again_that_no_release_asks_for(
    board: Board, real_release: Run
) -> None:
    assert real_release.host(NAME)["plan"]["reserved_cpus"] is None
    assert board.read("/sys/fs/cgroup/system.slice/cpuset.cpus.effective") == "0-3"
