"""The thousand hosts of bench.plan_cost are hosts, and not one a thousand times."""

from __future__ import annotations

from collections.abc import Callable

from bench.plan_cost import Cost, measured, probes, varied
from edgellm.hardware import HostProfile
from edgellm.parse import parse_profile


def profile(probe: str) -> HostProfile:
    return parse_profile(probe, control_time_s=None)


def test_no_two_hosts_of_a_hundred_are_alike() -> None:
    hosts = {profile(probe) for probe in probes(100)}
    assert len(hosts) == 100


def test_the_first_round_is_the_boards_as_they_are(probe_text: Callable[[str], str]) -> None:
    assert varied(probe_text("rk3588"), 0) == probe_text("rk3588")


def test_a_varied_board_has_another_kernel_memory_and_number_of_cores(
    probe_text: Callable[[str], str], board: Callable[[str], HostProfile]
) -> None:
    plain = board("rk3588")
    other = profile(varied(probe_text("rk3588"), 6))
    assert other.kernel.release == f"{plain.kernel.release}-6"
    assert other.mem_total_bytes == plain.mem_total_bytes // 2 - 6 * 1024
    assert len(other.cpus_online) == len(plain.cpus_online) - 1
    assert other.machine == plain.machine


def test_the_cost_of_a_host_is_the_mean_of_all_its_parts() -> None:
    costs = [
        Cost(parse_ms=1, plan_ms=2, files_ms=3),
        Cost(parse_ms=1, plan_ms=2, files_ms=3),
        Cost(parse_ms=4, plan_ms=5, files_ms=9),
    ]
    told = measured(costs).as_json()
    assert (told["value"], told["n"], told["spread"]) == (10, 3, [6, 18])
    assert told["details"]["files_ms"] == 5
    assert told["details"]["highest_ms"] == 18
