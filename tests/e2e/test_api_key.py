"""A server that others may reach asks for a key, and the key itself never lies on its host."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import FAST, MODEL_NAME, CommandLine, Ssh

API_KEY = "e2e-correct-horse-battery-staple-42"
OTHER_KEY = "e2e-another-horse-of-the-same-stable"
ENVIRONMENT = {"EDGELLM_API_KEY": API_KEY, "EDGELLM_OTHER_KEY": OTHER_KEY}
HOST = "edge-3"  # where sudo asks for a password: nothing of it may end in the output either
QUESTION = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Say a word."}],
    "max_tokens": 4,
}


def keyed_inventory(roll_out: CommandLine) -> Path:
    return roll_out.inventory(
        "keyed", [HOST], bind_address="0.0.0.0", api_key_env="EDGELLM_API_KEY,EDGELLM_OTHER_KEY"
    )


def test_without_the_key_in_the_environment_the_run_is_refused(
    served: None, roll_out: CommandLine
) -> None:
    run = roll_out(*FAST, inventory=keyed_inventory(roll_out))
    run.assert_bad(HOST, "failed", "environment variable EDGELLM_API_KEY", "have none", "export")
    assert run.changed() == {HOST: []}


def test_open_address_without_a_key_setting_is_refused(served: None, roll_out: CommandLine) -> None:
    run = roll_out("--limit", HOST, "--data", "bind_address=0.0.0.0", *FAST)
    run.assert_bad(HOST, "failed", "bind_address=0.0.0.0 is not loopback", "api_key_env")
    assert run.changed() == {HOST: []}


def test_key_is_asked_for_and_is_in_no_file_output_or_report(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    inventory = keyed_inventory(roll_out)
    env = ENVIRONMENT
    run = roll_out("-vvv", *FAST, inventory=inventory, env=env).assert_ok(HOST)
    try:
        assert_asked_for(fleet, ssh)
        assert_nowhere(run.output, roll_out, ssh)
        assert fleet.opspw_password_file.read_text().strip() not in run.output
        assert_probe_key_is_private(run.output, ssh)
        roll_out(*FAST, inventory=inventory, env=env).assert_ok(HOST).assert_changed_nothing()
        from_here = ("--data", "verify_from=control")
        seen = roll_out(*FAST, *from_here, inventory=inventory, env=env, deploy="verify")
        seen.assert_ok(HOST).assert_changed_nothing()
        assert seen.host(HOST)["from_control"]["failures"] == []
        assert_nowhere(seen.output, roll_out, ssh)
        another = {**ENVIRONMENT, "EDGELLM_API_KEY": API_KEY[::-1]}
        roll_out(*FAST, inventory=inventory, env=another).assert_ok(HOST)
        assert chat(fleet, API_KEY) == 401
        assert chat(fleet, API_KEY[::-1]) == 200
    finally:
        back = roll_out("--limit", HOST, *FAST)
    back.assert_ok(HOST)
    assert ssh.running_release(HOST) == first.release(HOST)
    assert "127.0.0.1:8000" in ssh(HOST, "ss -Hltn")
    assert "0.0.0.0:8000" not in ssh(HOST, "ss -Hltn")
    # Hashes and the probe's key stay for as long as a release to go back to asks for keys
    assert ssh(HOST, "find /etc/edgellm -type f -perm /007") == ""


def chat(fleet: Fleet, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{fleet.host(HOST).http_port}/v1/chat/completions"
    return httpx.post(url, json=QUESTION, headers=headers, timeout=60).status_code


def assert_asked_for(fleet: Fleet, ssh: Ssh) -> None:
    assert chat(fleet, None) == 401
    assert chat(fleet, API_KEY[:-1]) == 401
    assert chat(fleet, API_KEY) == 200
    assert chat(fleet, OTHER_KEY) == 200
    # and from another host of the fleet, over the network
    models = f"http://{fleet.host(HOST).fleet_address}:8000/v1/models"
    script = (
        "import sys, urllib.request as u; "
        f"r = u.Request('{models}', headers={{'Authorization': 'Bearer ' + sys.argv[1]}}); "
        "print(u.urlopen(r, timeout=10).status)"
    )
    assert ssh("edge-1", f'python3 -c "{script}" {API_KEY}').strip() == "200"
    assert ssh("edge-1", f'python3 -c "{script}" wrong 2>&1', check=False).count("401") == 1


def assert_nowhere(output: str, roll_out: CommandLine, ssh: Ssh) -> None:
    everywhere = "/etc /opt/edgellm /var/lib/edgellm /var/log /run /tmp /var/tmp /root /home"
    assert ssh(HOST, f"grep -rlF -e {API_KEY} {everywhere} 2>/dev/null", check=False) == ""
    assert ssh(HOST, f"journalctl --no-pager | grep -cF -e {API_KEY}", check=False).strip() == "0"
    pid = ssh.main_pid(HOST)
    assert ssh(HOST, f"grep -cF -e {API_KEY} /proc/{pid}/environ", check=False).strip() == "0"
    assert API_KEY not in output
    for report in roll_out.reports.rglob("*"):
        if report.is_file():
            assert API_KEY.encode() not in report.read_bytes(), report
    # the server knows the key by its hash
    hashes = ssh(HOST, "cat /etc/edgellm/api_keys").split()
    assert hashlib.sha256(API_KEY.encode()).hexdigest() in hashes


def assert_probe_key_is_private(output: str, ssh: Ssh) -> None:
    modes = ssh(HOST, "stat -c '%n %a %U %G' /etc/edgellm /etc/edgellm/*").splitlines()
    assert modes == [
        "/etc/edgellm 755 root root",
        "/etc/edgellm/api_keys 640 root edgellm",
        "/etc/edgellm/probe.key 600 root root",
    ]
    probe_key = ssh(HOST, "cat /etc/edgellm/probe.key").strip()
    assert len(probe_key) >= 32
    assert probe_key not in output
    assert json.dumps(probe_key) not in output
