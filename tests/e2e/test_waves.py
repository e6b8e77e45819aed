"""What differs between hosts: waves that hold a release back, CPUs and workers of a host's own."""

from __future__ import annotations

import os

import pytest

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import FAST, SOME_CHANGE, THREE, CommandLine, Ssh, wait_ready

CANARY, OTHERS = "edge-1", ("edge-2", "edge-3")


def thread_cpus(ssh: Ssh, host: str) -> list[str]:
    """Cpus_allowed_list of every thread of the server, by process id."""
    said = ssh(
        host,
        "for task in $(cat /sys/fs/cgroup/edgellm.slice/edgellm.service/cgroup.threads); do "
        "sed -n 's/^Cpus_allowed_list:\\t//p' /proc/$task/status; done",
    )
    return said.split()


def test_release_that_the_canary_does_not_prove_reaches_no_other_host(
    served: None, roll_out: CommandLine, ssh: Ssh, first: FirstRollOut
) -> None:
    waves = roll_out.inventory(
        "waves",
        per_host={CANARY: {"wave": 0, "ttft_budget_ms": 1}, **{h: {"wave": 1} for h in OTHERS}},
    )
    run = roll_out(*SOME_CHANGE, inventory=waves)
    run.assert_bad(CANARY, "failed", "slow: median TTFT")
    for host in OTHERS:
        run.assert_bad(host, "pending", "wave 1", "edge-1 got it and did not become healthy")
        assert run.changed()[host] == []
        assert ssh(host, "readlink /opt/edgellm/current").strip().endswith(first.release(host))


def test_later_wave_follows_the_canary_that_proved_it(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    per_host = {CANARY: {"wave": 0}, **{host: {"wave": 1} for host in OTHERS}}
    waves = roll_out.inventory("waves", per_host=per_host)
    run = roll_out(*SOME_CHANGE, *FAST, inventory=waves).assert_ok(*THREE)
    assert run.output.index("Wave 0 may begin") < run.output.index("Wave 1 may begin")
    releases = {run.host(host)["release"] for host in THREE}
    assert len(releases) == 1
    roll_out(*FAST).assert_ok(*THREE)  # back to the release of all tests


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to keep one free")
def test_host_with_cpus_of_its_own_keeps_every_thread_there(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    cpu = str(max(os.sched_getaffinity(0)))
    inventory = roll_out.inventory("pinned", ("edge-3",), per_host={"edge-3": {"cpus": cpu}})
    run = roll_out(*FAST, inventory=inventory).assert_ok("edge-3")
    assert run.host("edge-3")["plan"]["cpus"] == cpu
    assert set(thread_cpus(ssh, "edge-3")) == {cpu}
    roll_out(*FAST, inventory=inventory).assert_ok("edge-3").assert_changed_nothing()
    roll_out(*FAST, "--limit", "edge-3").assert_ok("edge-3")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need a CPU each")
def test_two_workers_serve_one_port_each_on_its_own_cpu(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    inventory = roll_out.inventory("workers", ("edge-2",), per_host={"edge-2": {"workers": 2}})
    run = roll_out(*FAST, inventory=inventory).assert_ok("edge-2")
    places = run.host("edge-2")["plan"]["worker_cpus"]
    assert len(places) == 2
    assert places[0] != places[1]
    # beside the threads of the workers, uvicorn's supervisor and its resource tracker, anywhere
    assert set(places) <= set(thread_cpus(ssh, "edge-2"))
    engines = ssh(
        "edge-2",
        "for pid in $(cat /sys/fs/cgroup/edgellm.slice/edgellm.service/cgroup.procs); do "
        "grep -q xllamacpp /proc/$pid/maps && "
        "sed -n 's/^Cpus_allowed_list:\\t//p' /proc/$pid/task/*/status | sort -u; done; true",
    )
    assert sorted(engines.split()) == sorted(places)
    roll_out(*FAST, "--limit", "edge-2").assert_ok("edge-2")


def test_swappiness_that_is_asked_for_is_in_force_now_and_after_a_boot(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    inventory = roll_out.inventory("swappy", ("edge-2",), per_host={"edge-2": {"swappiness": 10}})
    roll_out(*FAST, inventory=inventory).assert_ok("edge-2")
    assert ssh("edge-2", "cat /proc/sys/vm/swappiness").strip() == "10"
    assert "vm.swappiness = 10\n" in ssh("edge-2", "cat /etc/sysctl.d/90-edgellm.conf")
    fleet.reboot("edge-2")
    wait_ready(fleet, "edge-2")
    assert ssh("edge-2", "cat /proc/sys/vm/swappiness").strip() == "10"
    roll_out(*FAST, inventory=inventory).assert_ok("edge-2").assert_changed_nothing()
