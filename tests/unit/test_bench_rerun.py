"""What bench.rerun reads: Ansible's recap, a host's journal, fleet.json, audit.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.ansible_way import is_unchanged, recap
from bench.drifts import DRIFTS, is_named, not_in_order, rounds
from bench.rerun import Pair, judged
from bench.roll_outs import Finished, RerunError, changed, count_sessions

PLAYBOOK = Path(__file__).parents[2] / "bench" / "ansible" / "roll_out.yml"

# ansible-core 2.19.14
RECAP = """
TASK [Directories] *************************************************************
ok: [edge-1] => (item=/opt/edgellm : ok=1 changed=9)

PLAY RECAP *********************************************************************
edge-1                     : ok=24   changed=0    unreachable=0    failed=0    skipped=4    rescued=0    ignored=0
edge-2                     : ok=24   changed=1    unreachable=0    failed=0    skipped=4    rescued=0    ignored=0
edge-3                     : ok=0    changed=0    unreachable=1    failed=0    skipped=0    rescued=0    ignored=0
"""  # noqa: E501 (as Ansible prints it)


def test_a_recap_gives_each_hosts_counts_and_nothing_from_above_it() -> None:
    found = recap(RECAP)
    assert list(found) == ["edge-1", "edge-2", "edge-3"]
    assert found["edge-2"] == {
        **{"ok": 24, "changed": 1, "unreachable": 0, "failed": 0},
        **{"skipped": 4, "rescued": 0, "ignored": 0},
    }


def test_only_a_host_that_did_its_tasks_without_a_change_is_unchanged() -> None:
    verdicts = {host: is_unchanged(counts) for host, counts in recap(RECAP).items()}
    assert verdicts == {"edge-1": True, "edge-2": False, "edge-3": False}


def test_counts_that_are_not_there_are_not_read_as_unchanged() -> None:
    assert not is_unchanged({"ok": 3, "changed": 0})
    assert recap("no recap: it ended before") == {}


def test_commands_and_subsystems_are_counted_as_sshd_logs_them() -> None:
    # OpenSSH 9.2, LogLevel VERBOSE
    journal = (
        "Accepted key ED25519 SHA256:abc found at /root/.ssh/authorized_keys:1\n"
        "Starting session: command for root from 10.77.0.1 port 40120 id 0\n"
        "Close session: user root from 10.77.0.1 port 40120 id 0\n"
        "Starting session: subsystem 'sftp' for root from 10.77.0.1 port 40120 id 0\n"
        "somebody: Starting session: not by sshd\n"
    )
    assert count_sessions(journal) == 2


def fleet_json(**statuses: str) -> dict[str, Any]:
    return {
        "hosts": [
            {"name": name, "status": status, "reason": None, "changed": [f"{name} | done"]}
            for name, status in statuses.items()
        ]
    }


def test_changes_are_told_of_a_run_in_which_every_host_is_ok() -> None:
    assert changed(fleet_json(a="ok", b="ok"), ["a", "b"]) == {
        "a": ["a | done"],
        "b": ["b | done"],
    }
    for report in (fleet_json(a="ok", b="failed"), fleet_json(a="ok")):
        with pytest.raises(RerunError, match="want a, b ok"):
            changed(report, ["a", "b"])


def finished(wall_s: float) -> Finished:
    return Finished(exit_code=0, output="", wall_s=wall_s, cpu_s=1.0)


def test_the_ratio_is_that_of_neighbouring_runs() -> None:
    pairs = [
        Pair(ours=finished(2), ansible=finished(20), our_trips=5, ansible_trips=40),
        Pair(ours=finished(4), ansible=finished(48), our_trips=6, ansible_trips=40),
        Pair(ours=finished(2), ansible=finished(22), our_trips=5, ansible_trips=40),
    ]
    told = {measure.bar.key: measure.as_json() for measure in judged(pairs)}
    assert told["ansible_ratio"]["value"] == 11
    assert told["ansible_ratio"]["spread"] == [10, 12]
    assert told["unchanged_run_s"]["value"] == 2
    assert (told["round_trips"]["value"], told["round_trips"]["met"]) == (5, True)


def test_every_drift_has_its_turn_and_the_untouched_hosts_have_none() -> None:
    hosts = [f"edge-{number}" for number in range(1, 9)]
    turns = list(rounds(DRIFTS, hosts, untouched=2))
    injected = [drift.what for turn in turns for drift in turn.values()]
    assert injected == [drift.what for drift in DRIFTS]
    assert all(turn.keys() <= set(hosts[:6]) for turn in turns)


def test_a_drift_is_named_by_its_own_knobs_and_no_other() -> None:
    (limits,) = [drift for drift in DRIFTS if drift.what == "limits.d file edited"]
    assert is_named(limits, ["login_limits"])
    assert not is_named(limits, ["login_limits", "swappiness"])
    assert not is_named(limits, ["swappiness"])
    assert not is_named(limits, [])


def test_what_nobody_could_tell_counts_as_not_in_order() -> None:
    def knob(name: str, verdict: str) -> dict[str, str]:
        return {"knob": name, "verdict": verdict}

    audit = {
        "hosts": [
            {
                "name": "a",
                "knobs": [
                    knob("zram", "left alone"),
                    knob("cpuset", "limited"),
                    knob("nofile", "in order"),
                    knob("swappiness", "drifted"),
                    knob("memlock", "unknown"),
                ],
            },
            {"name": "b", "knobs": [knob("zram", "in order")]},
        ]
    }
    assert not_in_order(audit) == {"a": ["memlock", "swappiness"], "b": []}


def test_the_playbook_uses_modules_of_ansible_core_alone_and_names_its_tasks() -> None:
    (play,) = yaml.safe_load(PLAYBOOK.read_text())
    keywords = {"name", "when", "loop", "loop_control", "notify", "register"}
    keywords |= {"changed_when", "failed_when"}
    for task in play["tasks"] + play["handlers"]:
        modules = task.keys() - keywords
        assert task["name"], task
        assert len(modules) == 1, task
        assert modules.pop().startswith("ansible.builtin."), task
