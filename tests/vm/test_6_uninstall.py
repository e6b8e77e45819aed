"""The machine as it was before the first roll-out."""

from __future__ import annotations

import pytest

from tests.e2e.support import differences

from .conftest import FirstRollOut
from .support import NAME, Board, Control


@pytest.fixture(scope="module", autouse=True)
def uninstalled(first: FirstRollOut, control: Control) -> None:
    control("uninstall").assert_ok(NAME)


def test_zram_swap_is_off_and_its_device_free(board: Board) -> None:
    assert board.swaps() == []
    assert set(board("cat /sys/block/zram*/disksize 2>/dev/null || true").split()) <= {"0"}


def test_swappiness_is_what_it_was(board: Board, first: FirstRollOut) -> None:
    assert board.read("/proc/sys/vm/swappiness") == first.swappiness_before == "60"


def test_service_and_its_cgroup_are_gone(board: Board) -> None:
    assert board("pgrep -l python3 || true") == ""
    assert board("ls -d /sys/fs/cgroup/edgellm.slice 2>/dev/null || true") == ""
    assert board("id edgellm 2>&1 || true").endswith("no such user")


def test_no_file_of_ours_is_left(board: Board, first: FirstRollOut) -> None:
    found = board("find / -xdev -iname '*edgellm*' -not -name '*edgellm-demo*'")  # the image's own
    assert found == ""
    assert differences(first.things_before, board.things()) == []
