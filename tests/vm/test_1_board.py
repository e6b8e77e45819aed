"""The machine is what the other tests take it for; without this they would prove little."""

from __future__ import annotations

from .support import Board


def test_board_runs_a_distribution_kernel_on_arm64(board: Board) -> None:
    assert board("uname -m") == "aarch64"
    assert board("uname -r").endswith("-arm64")
    assert board("systemd-detect-virt --container || true") == "none"


def test_board_has_two_little_and_two_big_cores(board: Board) -> None:
    capacities = board("cat /sys/devices/system/cpu/cpu[0-3]/cpu_capacity")
    assert capacities.split() == ["446", "446", "1024", "1024"]


def test_board_has_two_numa_nodes(board: Board) -> None:
    assert board("cat /sys/devices/system/node/node*/cpulist").split() == ["0-1", "2-3"]


def test_board_has_cgroup_v2_with_its_controllers(board: Board) -> None:
    assert board("stat -f -c %T /sys/fs/cgroup") == "cgroup2fs"
    assert {"cpu", "cpuset", "memory"} <= set(
        board.read("/sys/fs/cgroup/cgroup.controllers").split()
    )


def test_board_has_no_swap_but_a_zram_module(board: Board) -> None:
    assert board.swaps() == []
    assert "zram" in board("modinfo --field filename zram")


def test_board_cannot_reach_anything(board: Board) -> None:
    said = board("timeout 5 bash -c ': </dev/tcp/10.0.2.2/22' 2>&1 && echo reached || echo shut")
    assert said.endswith("shut")
