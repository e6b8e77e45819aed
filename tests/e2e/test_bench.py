"""deploys/bench.py on a real host: the plan against a plain start, and nothing of it is left."""

from __future__ import annotations

import json

from .conftest import FirstRollOut
from .support import CommandLine, Run, Ssh, differences, snapshot, wait_until
from .test_tune import nothing_left

BUDGET_S = 90


def test_a_bench_compares_the_plan_with_a_plain_start_and_leaves_the_host_as_it_was(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"  # logs in as a user with sudo
    before, pid = snapshot(ssh, host), ssh.main_pid(host)
    run = roll_out("--limit", host, "--data", f"tune_budget_s={BUDGET_S}", deploy="bench")
    run.assert_changed_nothing()
    assert_compared(run, roll_out, ssh, host, first.release(host))
    assert ssh.main_pid(host) == pid
    wait_until("no unit left", lambda: differences(before, snapshot(ssh, host)) == [])
    nothing_left(ssh, host)


def assert_compared(run: Run, roll_out: CommandLine, ssh: Ssh, host: str, release: str) -> None:
    run.assert_ok(host)
    # The trial that is under way when the budget ends is finished
    assert run.duration_s < 2 * BUDGET_S
    run.assert_told(host, "ratio (quartiles)", "rounds", "the plan is")
    run.assert_told(host, "idle", "time per token", " ms")
    assert run.report is not None
    told = json.loads((roll_out.reports / "latest" / "bench.json").read_text())
    assert told["run_id"] == run.report["run_id"]
    found = told["hosts"][host]
    assert found["release"] == release
    assert found["kernel"] == ssh(host, "uname -r").strip()
    idle = {one["metric"]: one for one in found["ratios"] if one["condition"] == "idle"}
    assert set(idle) == {"ttft_ms", "tpot_ms", "request_ms"}
    for one in idle.values():
        assert one["n"] >= 1
        assert one["low"] <= one["ratio"] <= one["high"]
        assert one["plain_ms"] > 0
        assert one["planned_ms"] > 0
