"""The model on its way to a host: killed, cut and dropped in the middle, and it arrives whole."""

from __future__ import annotations

import re
import signal
import time

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    FAST,
    MODEL,
    MODEL_PATH,
    MODEL_SHA256,
    MODEL_SIZE_BYTES,
    SERVICE,
    CommandLine,
    Run,
    Ssh,
    Started,
    slow_link,
    wait_until,
)

PART = f"/opt/edgellm/models/.{MODEL_SHA256}.gguf.part"
A_GOOD_PART_BYTES = 10_000_000
CUT_S = 12.0  # how long the cable is out
LINK_MBIT_S = 80  # 98 MB take 10 s: time enough to do something to it


def remove_model(ssh: Ssh, host: str) -> None:
    ssh(host, f"rm {MODEL_PATH} {MODEL_PATH}.manifest.json")


def wait_for_part(fleet: Fleet, host: str, run: Started) -> int:
    """Until a good part of the model has arrived; its size. Not over ssh: it would be slow too."""

    def size_bytes() -> int | None:
        assert run.is_running(), run.output()
        said = fleet.exec(host, "stat", "-c", "%s", PART, check=False).stdout.strip()
        return int(said) if said and int(said) > A_GOOD_PART_BYTES else None

    return wait_until(f"{A_GOOD_PART_BYTES} bytes of the model on {host}", size_bytes)


def assert_model_whole(ssh: Ssh, host: str) -> None:
    assert ssh(host, f"sha256sum {MODEL_PATH}").split()[0] == MODEL_SHA256
    assert ssh(host, f"stat -c '%a %U:%G' {MODEL_PATH}").strip() == "644 root:root"
    assert ssh(host, f"ls -A {PART} 2>&1", check=False).count("No such file") == 1


def resumed_at_mb(output: str) -> list[int]:
    return [int(mb) for mb in re.findall(r"resuming at (\d+) MB", output)]


def test_upload_that_was_interrupted_is_reported_and_resumed_by_the_next_run(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    remove_model(ssh, host)
    with slow_link(fleet, host, LINK_MBIT_S), roll_out.start("--limit", host, *FAST) as started:
        part_bytes = wait_for_part(fleet, host, started)
        started.process.send_signal(signal.SIGINT)  # Ctrl-C
        run = started.finish(deadline_s=20)
    run.assert_bad(host, "pending", "the run ended before this host was verified", "run again")
    assert ssh(host, f"ls {MODEL_PATH} 2>/dev/null", check=False) == ""
    assert_resumed(roll_out("--limit", host, *FAST), host, part_bytes)
    assert_model_whole(ssh, host)


def test_upload_that_was_killed_is_resumed_by_the_next_run(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-3"
    remove_model(ssh, host)
    with slow_link(fleet, host, LINK_MBIT_S), roll_out.start("--limit", host, *FAST) as started:
        part_bytes = wait_for_part(fleet, host, started)
        started.process.kill()
        assert started.finish().report is None
    assert ssh(host, f"ls {MODEL_PATH} 2>/dev/null", check=False) == ""
    assert_resumed(roll_out("--limit", host, *FAST), host, part_bytes)
    assert_model_whole(ssh, host)
    # A killed pyinfra leaves its sudo helper behind; the password itself must be in no file
    password = fleet.opspw_password_file.read_text().strip()
    assert ssh(host, f"grep -rlF -e '{password}' /tmp /var/tmp /home /root", check=False) == ""
    ssh(host, "rm -f /tmp/pyinfra-sudo-askpass-*")


def assert_resumed(run: Run, host: str, part_bytes: int) -> None:
    run.assert_ok(host)
    (resumed_mb,) = resumed_at_mb(run.output)
    assert part_bytes // 1_000_000 <= resumed_mb < MODEL_SIZE_BYTES // 1_000_000
    assert run.changed() == {host: [MODEL, SERVICE]}  # as it still mapped the removed file


def test_upload_goes_on_in_the_same_run_after_the_link_was_cut(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"
    remove_model(ssh, host)
    with slow_link(fleet, host, LINK_MBIT_S), roll_out.start("--limit", host, *FAST) as started:
        wait_for_part(fleet, host, started)
        fleet.cut_link(host)
        try:
            time.sleep(CUT_S)
            assert started.is_running(), started.output()
        finally:
            fleet.restore_link(host)
        started.finish().assert_ok(host)
    assert_model_whole(ssh, host)


def test_upload_reconnects_and_resumes_in_the_same_run_when_its_connection_dies(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-3"
    remove_model(ssh, host)
    with slow_link(fleet, host, LINK_MBIT_S), roll_out.start("--limit", host, *FAST) as started:
        wait_for_part(fleet, host, started)
        sessions = fleet.exec(host, "ss", "-Htnp", "state", "established", "sport", "=", "22")
        pids = re.findall(r"pid=(\d+)", sessions.stdout)
        assert pids
        fleet.exec(host, "kill", "-KILL", *set(pids))
        run = started.finish().assert_ok(host)
    run.assert_told(host, "link lost")
    assert resumed_at_mb(run.output)[-1] >= A_GOOD_PART_BYTES // 1_000_000
    assert_model_whole(ssh, host)
