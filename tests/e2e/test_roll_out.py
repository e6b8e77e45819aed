"""The roll-out itself: what it puts on a host, that the next one changes nothing, and reboots."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone

import httpx
import pytest

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    ACCOUNT,
    ARCH,
    FAST,
    KERNEL_FILES,
    MODEL,
    MODEL_NAME,
    MODEL_PATH,
    MODEL_SHA256,
    MODEL_SIZE_BYTES,
    RECORD,
    RELEASE_FILES,
    RUNTIME,
    SERVICE,
    SOME_CHANGE,
    THREE,
    UNITS,
    CommandLine,
    Ssh,
    differences,
    snapshot,
    wait_ready,
)

SCHED_BATCH = 3  # sched(7)
on_each_host = pytest.mark.parametrize("host", THREE)


# --- the first roll-out ---------------------------------------------------------------------------


def test_first_roll_out_reports_every_host_ok(first: FirstRollOut) -> None:
    first.run.assert_ok(*THREE)
    report = first.run.report
    assert report is not None
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", report["run_id"])
    started_at = datetime.fromisoformat(report["started_at"])
    assert 0 < (datetime.now(timezone.utc) - started_at).total_seconds() < 3600
    assert report["model"] == {"name": MODEL_NAME, "sha256": MODEL_SHA256}


@on_each_host
def test_first_roll_out_reports_what_it_did_and_measured(first: FirstRollOut, host: str) -> None:
    record = first.run.host(host)
    assert record["address"] == "127.0.0.1"
    assert ARCH in record["groups"]
    assert record["status"] == "ok"
    assert record["reason"] is None
    assert re.fullmatch(r"[0-9a-f]{8,}", record["release"])
    assert first.run.changed()[host] == [
        *(KERNEL_FILES, RUNTIME, MODEL, ACCOUNT, RELEASE_FILES, UNITS, SERVICE, RECORD)
    ]
    ttft_ms = record["ttft_ms"]
    assert ttft_ms["n"] == 5
    assert 0 < ttft_ms["median"] <= ttft_ms["p95"] <= 20000
    assert 0 < record["output_throughput"] < 1000
    assert record["plan"]["scheduling"] == {"policy": "batch", "priority": 0}
    assert record["plan"]["workers"] == 1
    assert record["plan"]["limits"]["nofile"] == 65536
    assert "reasons" not in record["plan"]
    assert all({"knob", "text"} <= reason.keys() for reason in record["reasons"])
    assert {"threads", "scheduling", "cpus"} <= {reason["knob"] for reason in record["reasons"]}


def test_terminal_shows_a_line_for_each_host_and_where_the_report_is(first: FirstRollOut) -> None:
    for host in THREE:
        first.run.assert_told(host, "ok", first.release(host))
    first.run.assert_told("3 hosts: 3 ok")
    assert first.run.report is not None
    first.run.assert_told("Report:", first.run.report["run_id"], "fleet.json")


@on_each_host
def test_service_is_active_enabled_and_runs_the_reported_release(
    served: None, first: FirstRollOut, ssh: Ssh, host: str
) -> None:
    assert ssh(host, "systemctl is-active edgellm; systemctl is-enabled edgellm").split() == [
        "active",
        "enabled",
    ]
    assert ssh.service(
        host, "LimitNOFILE", "LimitNOFILESoft", "Slice", "User", "NeedDaemonReload"
    ) == {
        "LimitNOFILE": "65536",
        "LimitNOFILESoft": "65536",
        "Slice": "edgellm.slice",
        "User": "edgellm",
        "NeedDaemonReload": "no",
    }
    # and in the process itself: systemd stays within what its own hard limit allows, which on these
    # hosts is that of this machine
    column = "grep 'open files' /proc/$pid/limits | tr -s ' ' | cut -d' ' -f"
    own, most = ssh(
        host,
        f"pid=$(systemctl show --property=MainPID --value edgellm); {column}4; pid=1; {column}5",
    ).split()
    assert int(own) == min(65536, int(most))
    assert ssh.current_release(host) == first.release(host)
    assert ssh.running_release(host) == first.release(host)


@on_each_host
def test_every_thread_has_the_planned_policy_cpus_user_and_slice(
    served: None, first: FirstRollOut, ssh: Ssh, host: str
) -> None:
    plan = first.run.host(host)["plan"]
    cgroup = ssh.service(host, "ControlGroup")["ControlGroup"]
    assert cgroup == "/edgellm.slice/edgellm.service"
    user_id = ssh(host, "id -u edgellm").strip()
    assert user_id != "0"
    # policy is the 41st field of stat; the name, field 2, may have spaces and brackets in it
    threads = ssh(
        host,
        f"""for pid in $(cat /sys/fs/cgroup{cgroup}/cgroup.procs); do
            for task in /proc/$pid/task/*; do
                echo "$(sed 's/.*) //' $task/stat | cut -d' ' -f39)" \
                    "$(sed -n 's/^Cpus_allowed_list:\\s*//p' $task/status)" \
                    "$(sed -n 's/^Uid:\\s*//p' $task/status | cut -f1-4 --output-delimiter=,)" \
                    "$(sed -n 's/^0:://p' $task/cgroup)"
            done
        done""",
    ).splitlines()
    cpus = plan["allowed_cpus"] or plan["cpus"]
    expected = f"{SCHED_BATCH} {cpus} {','.join([user_id] * 4)} {cgroup}"
    assert len(threads) > plan["engine"]["n_threads"]
    assert set(threads) == {expected}


@on_each_host
def test_files_have_their_owners_and_modes(
    served: None, first: FirstRollOut, ssh: Ssh, host: str
) -> None:
    release = f"/opt/edgellm/releases/{first.release(host)}"
    expected = {
        "/opt/edgellm": "755 root root directory",
        "/opt/edgellm/models": "755 root root directory",
        "/opt/edgellm/releases": "755 root root directory",
        "/opt/edgellm/runtimes": "755 root root directory",
        MODEL_PATH: "644 root root regular file",
        release: "755 root root directory",
        f"{release}/entrypoint.sh": "755 root root regular file",
        f"{release}/server.env": "644 root root regular file",
        "/etc/systemd/system/edgellm.service": "644 root root regular file",
        "/etc/systemd/system/edgellm.slice": "644 root root regular file",
        "/etc/systemd/system/edgellm.socket": "644 root root regular file",
        "/etc/security/limits.d/90-edgellm.conf": "644 root root regular file",
        "/var/lib/edgellm": "755 edgellm edgellm directory",
    }
    said = ssh(host, f"stat -c '%n|%a %U %G %F' {' '.join(expected)}")
    assert dict(line.split("|") for line in said.splitlines()) == expected
    assert ssh(host, f"readlink -e {release}/model.gguf").strip() == MODEL_PATH
    assert ssh(host, f"stat -c %s {MODEL_PATH}").strip() == str(MODEL_SIZE_BYTES)
    assert ssh(host, f"sha256sum {MODEL_PATH}").split()[0] == MODEL_SHA256


@on_each_host
def test_service_can_change_nothing_that_it_runs(served: None, ssh: Ssh, host: str) -> None:
    theirs = "-user edgellm -o -group edgellm -o ! -type l -perm /022"
    assert ssh(host, f"find /opt/edgellm {theirs}") == ""
    account, password = ssh(host, "getent passwd edgellm; getent shadow edgellm").splitlines()
    assert account.split(":")[5:] == ["/var/lib/edgellm", "/usr/sbin/nologin"]
    assert password.split(":")[1][:1] in ("!", "*")


@on_each_host
def test_no_temporary_file_is_left(served: None, ssh: Ssh, host: str) -> None:
    # systemd makes these at boot (X11, ICE, …) and for units with PrivateTmp=
    by_systemd = "! -name '.*-unix' ! -path '*/systemd-private-*'"
    assert ssh(host, f"find /tmp /var/tmp -mindepth 1 -newer /etc/hostname {by_systemd}") == ""
    ours = "-name '*pyinfra*' -o -name '*askpass*' -o -name '*.part' -o -name '*.unpacking'"
    ours += " -o -name '.edgellm-*' -o -name '*.tar.gz*'"
    assert ssh(host, f"find /opt /etc /home /root /tmp /var/tmp /run {ours}") == ""


@on_each_host
def test_server_listens_on_loopback_only(served: None, ssh: Ssh, host: str) -> None:
    lines = ssh(host, "ss -Hltnup").splitlines()
    by_others = [line for line in lines if '"sshd"' not in line]
    assert [line.split()[4] for line in by_others] == ["127.0.0.1:8000"]


@on_each_host
def test_host_answers_a_chat(served: None, fleet: Fleet, host: str) -> None:
    url = f"http://127.0.0.1:{fleet.host(host).http_port}"
    question = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with httpx.Client(base_url=url, timeout=60) as client:
        listed = client.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == [MODEL_NAME]
        answer = client.post("/v1/chat/completions", json=question)
        assert answer.status_code == 200
        text = answer.json()["choices"][0]["message"]["content"]
        assert text.strip()
        streamed = ""
        chunks = 0
        with client.stream(
            "POST", "/v1/chat/completions", json={**question, "stream": True}
        ) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    content = choices[0]["delta"].get("content") if choices else None
                    streamed += content or ""
                    chunks += bool(content)
    assert streamed.strip()
    assert chunks > 3


# --- the runs after it ----------------------------------------------------------------------------


def test_second_run_changes_nothing(served: None, roll_out: CommandLine, ssh: Ssh) -> None:
    look = f"""systemctl show --property=MainPID,NRestarts,ActiveEnterTimestamp edgellm
        find /opt/edgellm /etc/edgellm /etc/systemd/system /etc/security /etc/sysctl.d \
            -printf '%i %p %T@ %C@ %m %u\n' | sort
        stat -c '%i %Y %Z' {MODEL_PATH}"""
    before = {host: ssh(host, look) for host in THREE}
    run = roll_out().assert_ok(*THREE).assert_changed_nothing()
    assert {host: ssh(host, look) for host in THREE} == before
    # what pyinfra itself says of each operation
    operations = run.output.count("Starting operation: ")
    assert operations > 10
    assert run.output.count("] No changes") == operations * len(THREE)
    assert "] Success" not in run.output
    assert "] Error" not in run.output


def test_dry_run_changes_nothing_and_writes_no_report(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    before = snapshot(ssh, "edge-1")
    run = roll_out("--dry", "--limit", "edge-1", *SOME_CHANGE)
    assert run.exit_code == 0, run.output
    assert run.report is None
    assert "Report:" not in run.output
    assert differences(before, snapshot(ssh, "edge-1")) == []


def test_after_a_reboot_the_host_serves_by_itself_and_the_next_run_changes_nothing(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    fleet.reboot("edge-2")
    wait_ready(fleet, "edge-2")
    assert ssh.running_release("edge-2") == first.release("edge-2")
    roll_out("--limit", "edge-2", *FAST).assert_ok("edge-2").assert_changed_nothing()
