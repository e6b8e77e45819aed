"""deploys/audit.py over fleets of which some hosts are no longer as the roll-out left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgellm import layout
from edgellm.cpuset import CpuSet
from tests.rolled_out import ABSENT, RolledOut

DOWN = {"success": False, "stderr": "ssh: the host went away"}
EFFECTIVE = "def swappiness_lines"  # in the script that reads what is in force
# Texts of the commands that only read: what a fake host answers to without having been changed
FACTS = ("section format", "def state_of", "def runtime_is_whole", "SliceReload", EFFECTIVE)


def nothing(host: RolledOut) -> RolledOut:
    return host


def sysctl_reverted(host: RolledOut) -> RolledOut:
    return host.in_force(swappiness=60)


def threads_moved(host: RolledOut) -> RolledOut:
    return host.threaded(1, cpus=CpuSet.parse("0-3"))


def entrypoint_edited(host: RolledOut) -> RolledOut:
    return host.lying(f"{host.desired.release_directory}/entrypoint.sh", sha256="0" * 64)


@pytest.fixture(scope="module")
def drifted(new_fleet: Callable[[], Any]) -> Any:
    """One audit of hosts in order, of drifted ones, and of one that was never rolled out to."""
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    fleet.add("i5-01", "x86_64", since=nothing)
    fleet.add("sysctl-01", since=sysctl_reverted)
    fleet.add("sysctl-02", since=sysctl_reverted)
    fleet.add("threads", since=threads_moved)
    fleet.add("edited", since=entrypoint_edited)
    fleet.add("stopped", since=lambda host: host.served(active=False, running_release=None))
    fleet.add("new")
    return fleet.run("audit", "--debug")


@pytest.fixture(scope="module")
def doubtful(new_fleet: Callable[[], Any]) -> Any:
    """One audit in which nothing can be told of some hosts, and of one that not all of it can."""
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    fleet.add("drifted", since=sysctl_reverted)
    fleet.add("mute", since=nothing, responses={EFFECTIVE: DOWN})
    fleet.add("odd", since=nothing, responses={EFFECTIVE: "Killed"})
    fleet.add("half", since=lambda host: host.running(program=None))
    fleet.add_unreachable("off-01")
    return fleet.run("audit")


def test_hosts_in_order_are_ok_and_the_exit_code_is_0(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    fleet.add("i5-01", "x86_64", since=nothing)
    ended = fleet.run("audit")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"pi5-01": "ok", "i5-01": "ok"}
    assert "2 hosts: 2 ok" in ended.output


def test_drifted_hosts_are_told_from_those_in_order(drifted: Any) -> None:
    assert drifted.returncode == 2, drifted.output
    in_order = {name for name, status in drifted.statuses.items() if status == "ok"}
    assert in_order == {"pi5-01", "i5-01"}
    others = {status for name, status in drifted.statuses.items() if name not in in_order}
    assert others == {"drifted"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sysctl-01", "swappiness: 60 now"),
        ("threads", "cpus: 1 of 3 threads, such as engine-1 (813), may run on 0-3, not 1-3"),
        ("edited", "entrypoint.sh: other content"),
        ("stopped", "service: not active"),
        ("new", "never rolled out to"),
    ],
)
def test_the_reason_names_the_knob_and_what_puts_it_right(
    drifted: Any, name: str, reason: str
) -> None:
    found = drifted.host(name)["reason"]
    assert found.startswith(reason)
    assert "fix: " in found
    assert "deploys/qwen.py" in found


def test_the_report_has_the_four_states_of_a_drifted_knob(drifted: Any) -> None:
    (knob,) = [k for k in drifted.host("sysctl-01")["knobs"] if k["verdict"] == "drifted"]
    assert knob == {
        "knob": "swappiness",
        "desired": "10",
        "configured": "10",
        "configured_by": layout.SYSCTL_CONF,
        "effective": "60",
        "verdict": "drifted",
        "reason": "60 now",
    }


def test_the_report_has_every_knob_of_a_host_in_order_too(drifted: Any) -> None:
    knobs = {knob["knob"]: knob["verdict"] for knob in drifted.host("pi5-01")["knobs"]}
    assert set(knobs.values()) == {"in order", "left alone"}
    expected = {"swappiness", "cpus", "scheduling", "nofile", "release", "service", "model"}
    assert expected <= knobs.keys()


def test_an_audit_changes_nothing(drifted: Any) -> None:
    assert {tuple(host["changed"]) for host in drifted.report["hosts"]} == {()}
    assert "Starting operation" not in drifted.output
    assert drifted.report["deploy"] == "audit"


def test_an_audit_asks_no_command_that_is_not_a_fact(drifted: Any) -> None:
    said = drifted.output.split("[fake] simulating command on ")[1:]
    # All facts at once go by standard input to one shell, which a fake host does not answer
    assert len(said) > 20
    assert [text for text in said if not any(fact in text for fact in (": sh -s", *FACTS))] == []
    # The scripts that receive and unpack files can tell what is whole as well
    assert [text for text in said if "def fail(kind" in text] == []


def test_a_host_that_does_not_answer_makes_the_exit_code_1_whatever_else_drifted(
    doubtful: Any,
) -> None:
    assert doubtful.returncode == 1, doubtful.output
    assert doubtful.statuses == {
        "pi5-01": "ok",
        "drifted": "drifted",
        "mute": "failed",
        "odd": "failed",
        "half": "failed",
        "off-01": "unreachable",
    }
    assert "Traceback" not in doubtful.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mute", "reading Effective"),
        ("odd", "not the script's JSON object: 'Killed'"),
        ("half", "could not tell: program: /proc/<pid>/exe of no process could be read"),
    ],
)
def test_the_reason_says_what_could_not_be_told(doubtful: Any, name: str, reason: str) -> None:
    found = doubtful.host(name)["reason"]
    assert reason in found
    assert "fix: " in found


def test_an_audit_that_reaches_no_host_exits_3(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add_unreachable("off-01")
    ended = fleet.run("audit")
    assert ended.returncode == 3, ended.output
    assert ended.statuses == {"off-01": "unreachable"}


def test_an_audit_of_some_hosts_is_about_these_alone(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", since=nothing)
    fleet.add("drifted", since=sysctl_reverted)
    ended = fleet.run("audit", "--limit", "@fake/pi5-01")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"pi5-01": "ok"}


def test_a_host_that_lost_all_of_ours_but_its_record_has_drifted(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()

    def emptied(host: RolledOut) -> RolledOut:
        gone = dict.fromkeys(host.observed.paths, ABSENT)
        return host.found(paths=gone).served(
            active=False, enabled=False, running_release=None, current_release=None
        )

    fleet.add("emptied", since=emptied)
    ended = fleet.run("audit")
    assert ended.returncode == 2, ended.output
    reason = ended.host("emptied")["reason"]
    assert "never rolled out" not in reason
    assert "not there" in reason


def test_the_table_shows_each_drifted_knob_once_for_hosts_that_are_alike(drifted: Any) -> None:
    table = drifted.output.partition("8 hosts: 2 ok, 6 drifted")[2]
    rows = [line.split("│")[1:-1] for line in table.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    at = cells.index(
        ["@fake/sysctl-01, @fake/sysctl-02", "swappiness", "drifted", "desired     10"]
    )
    assert [row[3] for row in cells[at + 1 : at + 4]] == [
        f"configured  10 by {layout.SYSCTL_CONF}",
        "effective   60",
        "why         60 now",
    ]


def test_a_host_that_was_never_rolled_out_to_is_one_line_of_the_tables(drifted: Any) -> None:
    table = drifted.output.partition("8 hosts: 2 ok, 6 drifted")[2]
    assert sum("@fake/new" in line for line in table.splitlines() if "│" in line) == 1


def test_the_release_that_runs_is_in_the_report(drifted: Any) -> None:
    assert len(drifted.host("pi5-01")["release"]) == 16
    assert drifted.host("new")["release"] is None
