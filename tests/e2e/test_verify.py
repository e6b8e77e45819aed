"""deploys/verify.py on real hosts: proves them as they are, and leaves no trace."""

from __future__ import annotations

from .conftest import FirstRollOut
from .support import THREE, CommandLine, Ssh, differences, snapshot


def test_a_verification_from_both_sides_changes_nothing_on_any_host(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    before = {host: (snapshot(ssh, host), ssh.main_pid(host)) for host in THREE}
    run = roll_out("--data", "verify_from=control", deploy="verify").assert_ok(*THREE)
    run.assert_changed_nothing()
    for host in THREE:
        things, pid = before[host]
        assert differences(things, snapshot(ssh, host)) == []
        assert ssh.main_pid(host) == pid
        record = run.host(host)
        assert record["release"] == first.release(host)
        assert record["smoke"]["n"] == record["from_control"]["n"] == 5
        assert record["from_control"]["failures"] == []
        seen = record["from_control"]
        assert seen["median_ttft_ms"] > 0
        assert seen["host"] is None  # the state of this machine explains nothing of that one
        on_host = f"{record['smoke']['median_ttft_ms']:.0f} / "
        run.assert_told(host, on_host, f"{seen['median_ttft_ms']:.0f} / {seen['p95_ttft_ms']:.0f}")
    run.assert_told("TTFT ms median / p95", "as seen from here")


def test_a_host_whose_service_is_stopped_is_failed_and_stays_stopped(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    ssh(host, "systemctl stop edgellm.service")
    try:
        run = roll_out("--limit", host, deploy="verify")
        run.assert_bad(host, "failed", "not active", "deploys/qwen.py")
        assert ssh.service(host, "ActiveState")["ActiveState"] == "inactive"
    finally:
        ssh(host, "systemctl start edgellm.service")
