"""deploys/bench.py on a real host: the plan against a plain start, and nothing of it is left."""

from __future__ import annotations

import json

from .conftest import FirstRollOut
from .support import CommandLine, Run, Ssh, differences, snapshot, wait_until
from .test_tune import nothing_left

BUDGET_S = 75


def test_a_bench_compares_the_plan_with_a_plain_start_and_leaves_the_host_as_it_was(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"  # logs in as a user with sudo
    before, pid = snapshot(ssh, host), ssh.main_pid(host)
    run = roll_out("--limit", host, "--data", f"tune_budget_s={BUDGET_S}", deploy="bench")
    run.assert_changed_nothing()
    if run.exit_code == 0:
        assert_compared(run, roll_out, ssh, host, first.release(host))
    else:  # on a busy machine the budget ends before both had their turn, and it says so
        used_up = f"budget: the {BUDGET_S} s are used up"
        run.assert_bad(host, "failed", "both were measured", used_up, "a larger tune_budget_s")
    assert ssh.main_pid(host) == pid
    wait_until("no unit left", lambda: differences(before, snapshot(ssh, host)) == [])
    nothing_left(ssh, host)


def assert_compared(run: Run, roll_out: CommandLine, ssh: Ssh, host: str, release: str) -> None:
    run.assert_ok(host)
    assert run.duration_s < BUDGET_S + 30
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
