"""Back to the release before, and to the host as it was before the first one."""

from __future__ import annotations

from .conftest import FirstRollOut
from .support import FAST, SOME_CHANGE, THREE, CommandLine, Ssh, differences, snapshot


def test_rollback_runs_the_previous_release_again(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"
    files = "sha256sum /etc/systemd/system/edgellm.* && systemctl is-enabled edgellm"
    before = ssh(host, files)
    other = roll_out("--limit", host, *FAST, *SOME_CHANGE).assert_ok(host).host(host)["release"]
    assert other != first.release(host)
    assert ssh.running_release(host) == other
    back = roll_out("--limit", host, deploy="rollback").assert_ok(host)
    assert back.host(host)["release"] == first.release(host)
    assert ssh.current_release(host) == first.release(host)
    assert ssh.running_release(host) == first.release(host)
    assert ssh(host, files) == before
    roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()


def test_rollback_without_a_previous_release_is_refused(
    first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    ssh(host, "rm -f /opt/edgellm/previous")
    run = roll_out("--limit", host, deploy="rollback")
    run.assert_bad(host, "failed", "roll-back", "a previous release", "none beside")
    assert ssh.running_release(host) == first.release(host)


def test_uninstall_leaves_each_host_as_it_was_before_the_first_roll_out(
    first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    roll_out(deploy="uninstall").assert_ok(*THREE)
    left = {host: differences(first.before[host], snapshot(ssh, host)) for host in THREE}
    assert left == {host: [] for host in THREE}
    for host in THREE:
        assert ssh(host, "ss -Hltn sport = :8000") == ""
        assert ssh(host, "pgrep -f edgellm_server", check=False) == ""
    roll_out(deploy="uninstall").assert_ok(*THREE).assert_changed_nothing()
