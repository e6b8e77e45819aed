"""deploys/diagnose.py on real hosts: what is in a bundle, and what never is."""

from __future__ import annotations

import tarfile
from pathlib import Path

import httpx

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import FAST, SPARE, CommandLine, Ssh, differences, snapshot

QUESTION = "Where is the spare key of hall B?"


def files_of(reports: Path, host: str) -> dict[str, str]:
    with tarfile.open(reports / "latest" / "diagnose" / f"{host}.tar.gz") as archive:
        found = {m.name.rpartition("/")[2]: archive.extractfile(m) for m in archive.getmembers()}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_a_bundle_of_a_host_that_runs_has_its_threads_and_none_of_its_secrets(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"  # logs in as a user with sudo
    before = snapshot(ssh, host)
    pid = ssh.main_pid(host)
    roll_out("--limit", host, deploy="diagnose").assert_ok(host).assert_changed_nothing()
    assert differences(before, snapshot(ssh, host)) == []
    files = files_of(roll_out.reports, host)
    threads = [line.split() for line in files["threads.txt"].splitlines()[1:]]
    assert str(pid) in {thread[0] for thread in threads}
    assert "batch" in {thread[3] for thread in threads}
    assert {"plan.json", "profile.json", "knobs.json", "journal.txt"} <= files.keys()
    assert first.release(host) in files["README.txt"]


def test_prompts_that_the_journal_holds_are_not_in_the_bundle(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    roll_out("--limit", host, *FAST, "--data", "log_prompts=true").assert_ok(host)
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": QUESTION}]}
    url = f"http://127.0.0.1:{fleet.host(host).http_port}/v1/chat/completions"
    httpx.post(url, json=body, timeout=60).raise_for_status()
    try:
        assert QUESTION in ssh(host, "journalctl --no-pager -u edgellm.service -n 50")
        roll_out("--limit", host, "--data", "log_prompts=true", deploy="diagnose").assert_ok(host)
        files = files_of(roll_out.reports, host)
        assert '"event": "request"' in files["journal.txt"]
        assert [name for name, text in files.items() if QUESTION in text] == []
    finally:
        roll_out("--limit", host, *FAST).assert_ok(host)


def test_a_host_that_nothing_of_ours_is_on_has_a_bundle_too(
    roll_out: CommandLine, first: FirstRollOut
) -> None:
    inventory = roll_out.inventory("spare", [SPARE])
    roll_out(inventory=inventory, deploy="uninstall").assert_ok(SPARE)  # other tests use it as well
    roll_out(inventory=inventory, deploy="diagnose").assert_ok(SPARE)
    files = files_of(roll_out.reports, SPARE)
    assert "nothing of ours in /opt/edgellm" in files["README.txt"]
    assert "MemTotal:" in files["memory.txt"]
