"""deploys/bench.py on a real host: the plan against a plain start, and nothing of it is left."""

from __future__ import annotations

import json

from .conftest import FirstRollOut
from .support import CommandLine, Ssh, differences, snapshot, wait_until
from .test_tune import nothing_left

BUDGET_S = 75


def test_a_bench_compares_the_plan_with_a_plain_start_and_leaves_the_host_as_it_was(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"  # logs in as a user with sudo
    before, pid = snapshot(ssh, host), ssh.main_pid(host)
    run = roll_out("--limit", host, "--data", f"tune_budget_s={BUDGET_S}", deploy="bench")
    run.assert_ok(host).assert_changed_nothing()
    assert run.duration_s < BUDGET_S + 30
    run.assert_told(host, "ratio (quartiles)", "rounds", "the plan is")
    run.assert_told(host, "idle", "time per token", " ms")

    told = json.loads((roll_out.reports / "latest" / "bench.json").read_text())
    assert told["run_id"] == run.report["run_id"] if run.report else False
    found = told["hosts"][host]
    assert found["release"] == first.release(host)
    assert found["kernel"] == ssh(host, "uname -r").strip()
    idle = {one["metric"]: one for one in found["ratios"] if one["condition"] == "idle"}
    assert set(idle) == {"ttft_ms", "tpot_ms", "request_ms"}
    for one in idle.values():
        assert one["n"] >= 1
        assert one["low"] <= one["ratio"] <= one["high"]
        assert one["plain_ms"] > 0
        assert one["planned_ms"] > 0

    assert ssh.main_pid(host) == pid
    wait_until("no unit left", lambda: differences(before, snapshot(ssh, host)) == [])
    nothing_left(ssh, host)
