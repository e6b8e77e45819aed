"""deploys/verify.py over fleets of which some hosts do not prove themselves any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from edgellm.cpuset import CpuSet
from tests.fleet.conftest import smoke_line
from tests.rolled_out import RolledOut

PROBE = "edgellm_server/probe.py"
STARTS = ("systemctl start", "systemctl restart", "systemctl stop", "def write_whole")


def nothing(host: RolledOut) -> RolledOut:
    return host


def answering(median_ttft_ms: float, **more: Any) -> dict[str, Any]:
    return {PROBE: smoke_line(median_ttft_ms=median_ttft_ms, **more)}


@pytest.fixture(scope="module")
def mixed(new_fleet: Callable[[], Any]) -> Any:
    """One verification of hosts alike, of which one is hot and slow, and of bad ones."""
    fleet = new_fleet()
    for number, ttft_ms in enumerate((350.0, 353.0, 356.0, 349.0, 360.0)):
        fleet.add(f"pi5-0{number}", since=nothing, responses=answering(ttft_ms))
    hot = {"temperature_c": 82.0, "throttled": "0x4"}
    fleet.add("hot", since=nothing, responses=answering(812.0, host=hot))
    fleet.add("slow", "x86_64", since=nothing, responses=answering(8000.0))
    fleet.add("drifted", "x86_64", since=lambda host: host.in_force(swappiness=60))
    fleet.add("moved", "x86_64", since=lambda host: host.threaded(1, cpus=CpuSet.parse("0-7")))
    fleet.add("stopped", since=lambda host: host.served(active=False, running_release=None))
    fleet.add("new")
    return fleet.run("verify", "--debug")


def test_each_host_has_its_own_verdict(mixed: Any) -> None:
    assert mixed.statuses == {
        **{f"pi5-0{number}": "ok" for number in range(5)},
        "hot": "ok",
        "slow": "failed",
        "drifted": "drifted",
        "moved": "failed",
        "stopped": "failed",
        "new": "failed",
    }
    assert mixed.returncode == 1
    assert "Traceback" not in mixed.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("slow", "slow: median TTFT 8000 ms is over the budget of 1500 ms"),
        ("moved", "threads"),
        ("stopped", "not active"),
        ("new", "never rolled out to"),
        ("drifted", "swappiness: 60 now"),
    ],
)
def test_the_reason_says_what_and_how_to_mend_it(mixed: Any, name: str, reason: str) -> None:
    found = mixed.host(name)["reason"]
    assert reason in found
    assert "fix: " in found


def test_a_host_slower_than_its_peers_gets_a_warning_with_the_cause(mixed: Any) -> None:
    verdict = mixed.host("hot")["verdict"]
    assert verdict["healthy"]
    outlier = "@fake/hot is 2.3 times slower than its 5 peers"
    (warning,) = [text for text in verdict["warnings"] if text.startswith(outlier)]
    assert "throttled, 82 °C" in warning
    # The table folds it into its last column
    assert outlier in re.sub(r"[│\s]+", " ", mixed.output)


def test_a_host_with_another_model_is_no_peer(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    for number, ttft_ms in enumerate((350.0, 353.0, 356.0, 349.0, 360.0)):
        fleet.add(f"pi5-0{number}", since=nothing, responses=answering(ttft_ms))
    theirs = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}
    theirs |= {"model_name": "large"}
    fleet.add("forwards", since=nothing, data=theirs, responses=answering(812.0))
    ended = fleet.run("verify")
    assert ended.host("forwards")["ttft_ms"]["median"] == 812.0, ended.output
    assert ended.host("forwards")["model"] == {"name": "large", "sha256": None}
    assert "times slower" not in ended.output


def test_nothing_on_any_host_is_changed_or_started(mixed: Any) -> None:
    assert {tuple(host["changed"]) for host in mixed.report["hosts"]} == {()}
    said = mixed.output.split("[fake] simulating command on ")[1:]
    assert len(said) > 20
    assert [text for text in said if any(word in text for word in STARTS)] == []


def test_only_hosts_that_run_the_service_are_asked(mixed: Any) -> None:
    said = mixed.output.split("[fake] simulating command on ")[1:]
    asked = {text.partition(":")[0] for text in said if PROBE in text.partition("\n")[0]}
    assert asked == {f"@fake/{name}" for name in mixed.statuses if name not in ("stopped", "new")}


def test_a_fleet_that_proves_itself_exits_0_and_one_that_drifted_2(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    ended = fleet.run("verify")
    assert ended.returncode == 0, ended.output
    assert ended.host("pi5-01")["ttft_ms"]["median"] == 112.4

    fleet.add("drifted", since=lambda host: host.in_force(swappiness=60))
    ended = fleet.run("verify")
    assert ended.returncode == 2, ended.output
    assert ended.statuses == {"pi5-01": "ok", "drifted": "drifted"}


def test_a_host_slower_than_at_its_last_good_run_is_failed(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    assert fleet.run("verify").returncode == 0
    fleet.hosts.clear()
    fleet.add("pi5-01", since=nothing, responses=answering(300.0))
    ended = fleet.run("verify")
    assert ended.returncode == 1
    reason = ended.host("pi5-01")["reason"]
    assert (
        "regressed: median TTFT 300 ms (n=5) is 167 % over this host's last good 112 ms" in reason
    )
    # What failed is no good run: the next one is compared with the same
    assert "last good 112 ms" in fleet.run("verify").host("pi5-01")["reason"]
