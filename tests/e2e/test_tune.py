"""deploys/tune.py on a real host: it measures, stores, and leaves the service as it was."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from demo.fleet import Fleet
from edgellm.facts.host_profile import probe_command
from edgellm.measured import MeasuredResult, candidates
from edgellm.parse import parse_profile
from edgellm.settings import Settings
from edgellm.trial_job import command_bits, trial_job
from edgellm.tuning import plan_tuning

from .conftest import FirstRollOut
from .support import (
    FAST,
    MODEL_SHA256,
    SERVICE,
    SETTINGS,
    CommandLine,
    Ssh,
    wait_ready,
    wait_until,
)

MEASURED = "/opt/edgellm/measured.json"
STORED = "Result of trials on this host stored"
BUDGET_S = 60
# All that a run may leave behind: units, their files, processes
LEFT = (
    "systemctl list-units --all --plain --no-legend "
    "'edgellm-tune*' 'edgellm_t*' 'edgellm-trial*' 'edgellm-neighbour*'; "
    "ls -d /run/systemd/system/edgellm_t* /run/edgellm-tune 2>/dev/null; "
    "pgrep -f '[e]dgellm_server.trial' || true"
)
# Asks for one long answer after another, for as long as its parent lives
CLIENT = """
import json, os, urllib.request
parent = os.getppid()
body = json.dumps({"max_tokens": 500, "messages": [{"role": "user", "content": "Count to 1000."}]})
url = "http://127.0.0.1:8000/v1/chat/completions"
while os.getppid() == parent:
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request).read()
"""


def stored(ssh: Ssh, host: str) -> dict[str, Any]:
    return dict(json.loads(ssh(host, f"cat {MEASURED}")))


def store(ssh: Ssh, host: str, values: dict[str, Any]) -> None:
    assert MeasuredResult.parse(json.dumps(values)) is not None
    ssh(host, f"cat >{MEASURED} <<'EOF'\n{json.dumps(values)}\nEOF")


def nothing_left(ssh: Ssh, host: str) -> None:
    wait_until("nothing of the trials left", lambda: ssh(host, LEFT).strip() == "")


def test_tune_measures_within_its_budget_and_the_roll_out_uses_what_it_stored(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"  # logs in as a user with sudo
    pid = ssh.main_pid(host)
    run = roll_out("--limit", host, "--data", f"tune_budget_s={BUDGET_S}", deploy="tune")
    run.assert_ok(host)
    assert run.duration_s < BUDGET_S + 30
    assert run.changed()[host] == [STORED]
    run.assert_told(host, "round 1, planned, idle: TTFT", "s left")
    run.assert_told(host, "round 1, planned, loaded: TTFT", "s left")
    # The service was not touched, and nothing else is there
    assert ssh.main_pid(host) == pid
    nothing_left(ssh, host)

    values = stored(ssh, host)
    assert values["key"]["kernel"] == ssh(host, "uname -r").strip()
    assert values["key"]["model_sha256"] == MODEL_SHA256
    choice = values["choice"]
    if choice["standings"]:
        assert {s["condition"] for s in choice["standings"]} == {"idle", "crowded", "loaded"}
    else:  # on a busy machine the budget ends before a second candidate's turn, and it says so
        assert (choice["candidate"], choice["conclusive"]) == ("planned", False)
        assert choice["why"].startswith("0 rounds of the 5 ")
    assert ssh(host, f"stat -c '%U:%G %a' {MEASURED}").strip() == "root:root 644"

    # A result that keeps the plan changes nothing
    plan_stands = values | {
        "choice": values["choice"]
        | {"candidate": "planned", "changes": {}, "why": "no candidate was faster"}
        | {"conclusive": True}
    }
    store(ssh, host, plan_stands)
    again = roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()
    again.assert_told(host, "measured choice: the plan stands, as measured here")
    # and is not measured anew
    roll_out("--limit", host, deploy="tune").assert_ok(host).assert_changed_nothing()

    # A winner makes another release
    winner = {"candidate": "n_batch 32", "changes": {"n_batch": 32}}
    store(ssh, host, plan_stands | {"choice": plan_stands["choice"] | winner})
    tuned = roll_out("--limit", host, *FAST).assert_ok(host)
    tuned.assert_told(host, "measured choice: n_batch 32, measured on this host on")
    assert SERVICE in tuned.changed()[host]
    assert ssh(host, "grep N_BATCH /opt/edgellm/current/server.env").strip().endswith("=32")
    assert ssh.running_release(host) == tuned.host(host)["release"] != first.release(host)

    # Measured under another kernel: not used, and the plan is back
    store(
        ssh,
        host,
        plan_stands
        | {"choice": plan_stands["choice"] | winner, "key": values["key"] | {"kernel": "5.10.0"}},
    )
    other = roll_out("--limit", host, *FAST).assert_ok(host)
    other.assert_told(host, "is not used (kernel 5.10.0 -> ", "deploys/tune.py measures anew")
    assert ssh.running_release(host) == first.release(host)
    ssh(host, f"rm {MEASURED}")


def test_a_service_that_made_room_comes_back_when_the_trials_are_killed(
    served: None, fleet: Fleet, ssh: Ssh
) -> None:
    host = "edge-1"
    profile = parse_profile(ssh(host, probe_command()), control_time_s=None)
    settings = Settings.from_host_data(SETTINGS | {"tune_budget_s": 120}, host=host)
    plan = plan_tuning(profile, settings)
    runtime_id = ssh(host, "basename $(readlink -f /opt/edgellm/current/runtime)").strip()
    job = trial_job(
        candidates(plan, profile, settings),
        plan,
        profile,
        settings,
        model_sha256=MODEL_SHA256,
        runtime_id=runtime_id,
    )
    job |= {"stop_service": True, "while_busy": True}
    bits = command_bits(runtime_id, plan, ends_within_s=180)
    command = " ".join(f"'{bit}'" for bit in bits)
    process = subprocess.Popen(
        [*fleet.ssh_command(host), command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        assert json.loads(process.stdout.readline()) == {"event": "service", "state": "stopped"}
        assert json.loads(process.stdout.readline())["event"] == "trial"
        assert ssh.service(host, "ActiveState")["ActiveState"] == "inactive"
        ssh(host, "systemctl kill --kill-who=main --signal=KILL edgellm-tune.service")
        wait_ready(fleet, host)
        assert ssh.service(host, "ActiveState")["ActiveState"] == "active"
        nothing_left(ssh, host)
    finally:
        process.kill()
        process.wait()


def test_a_busy_service_is_not_measured_beside_unless_asked(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    client = subprocess.Popen(
        [*fleet.ssh_command(host), "python3 -"], stdin=subprocess.PIPE, text=True
    )
    assert client.stdin is not None
    client.stdin.write(CLIENT)
    client.stdin.close()
    try:
        run = roll_out("--limit", host, deploy="tune")
        run.assert_bad(host, "failed", "tune", "requests at work", "tune_while_busy=true")
        assert ssh(host, f"ls {MEASURED}", check=False) == ""
        nothing_left(ssh, host)
    finally:
        client.kill()
        client.wait()
