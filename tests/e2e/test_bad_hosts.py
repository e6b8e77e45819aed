"""Bad hosts are named, with reason and fix, and stay as they are; the others are rolled out to."""

from __future__ import annotations

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    FAST,
    MODEL,
    MODEL_PATH,
    MODEL_SHA256,
    SERVICE,
    SPARE,
    THREE,
    WRONG_ARCH,
    CommandLine,
    Ssh,
    differences,
    slow_link,
    snapshot,
    wait_ready,
    wait_until,
)

INSTALL_DIR = "/opt/edgellm"


def test_bad_hosts_are_named_and_untouched_while_the_healthy_one_is_rolled_out_to(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    off, full, misplaced = THREE
    inventory = roll_out.inventory("mixed", (*THREE, SPARE), in_wrong_group=[misplaced])
    # over what is installed there, so that all of it would have to be sent again
    fleet.fill_disk(full, INSTALL_DIR, 20_000_000)
    before = {name: snapshot(ssh, name) for name in (full, misplaced)}
    fleet.power_off(off)
    try:
        run = roll_out(*FAST, inventory=inventory)
        after = {name: snapshot(ssh, name) for name in (full, misplaced)}
        still_there = ssh(full, f"find {INSTALL_DIR} -mindepth 1")
    finally:
        fleet.power_on(off)
        fleet.free_disk(full, INSTALL_DIR)
    port = str(fleet.host(off).ssh_port)
    run.assert_bad(off, "unreachable", "127.0.0.1", port, "check power and network")
    run.assert_bad(full, "failed", "disk space under /opt/edgellm", "MB free", "free some space")
    run.assert_bad(misplaced, "failed", WRONG_ARCH, "move it to group")
    assert run.host(SPARE)["status"] == "ok"
    assert run.host(SPARE)["reason"] is None
    run.assert_told(SPARE, "ok", run.host(SPARE)["release"])
    run.assert_told("4 hosts: 1 ok, 2 failed, 1 unreachable")
    assert ssh.running_release(SPARE) == run.host(SPARE)["release"]
    for bad in THREE:
        assert run.host(bad)["changed"] == []
    for name in (full, misplaced):
        assert differences(before[name], after[name]) == []
    assert still_there == ""
    wait_ready(fleet, off)


def test_with_every_host_off_the_report_is_written_all_the_same(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    for name in THREE:
        fleet.power_off(name)
    try:
        run = roll_out()
    finally:
        fleet.up()
    assert run.statuses() == dict.fromkeys(THREE, "unreachable")
    for name in THREE:
        run.assert_bad(name, "unreachable", str(fleet.host(name).ssh_port))
    assert run.changed() == {name: [] for name in THREE}
    run.assert_told("3 hosts: 3 unreachable")
    # pulled plugs, and nobody there to mend anything: the hosts come back by themselves
    for name in THREE:
        wait_ready(fleet, name)
        assert ssh.running_release(name) == first.release(name)


def test_host_that_loses_power_in_the_middle_of_the_run_fails_alone(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    *others, lost = THREE
    ssh(lost, f"rm {MODEL_PATH} {MODEL_PATH}.manifest.json")
    within = ("--data", "transfer_deadline_s=10")
    with slow_link(fleet, lost, mbit_s=20), roll_out.start(*FAST, *within) as started:
        part = f"test -s /opt/edgellm/models/.{MODEL_SHA256}.gguf.part"
        wait_until(
            "the upload", lambda: not fleet.exec(lost, "sh", "-c", part, check=False).returncode
        )
        fleet.power_off(lost)
        run = started.finish()
    fleet.power_on(lost)
    run.assert_bad(lost, "failed", "model", "the link was lost", "run again")
    for name in others:
        assert run.host(name)["status"] == "ok"
        assert run.changed()[name] == []
    mended = roll_out("--limit", lost, *FAST).assert_ok(lost)
    assert mended.changed()[lost] == [MODEL, SERVICE]
