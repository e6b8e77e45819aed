"""deploys/bench.py's operation: what it runs, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import recorder
from edgellm.operations import bench
from edgellm.operations.bench import BenchRun
from edgellm.operations.containment import fail
from tests.operations import test_trials
from tests.operations.test_trials import RUNTIME_PATH, answer, end, event, facts

Commands = Callable[..., list[Any]]
RUN = BenchRun(
    about={"hardware_class": "Raspberry Pi 5", "kernel": "6.6.31"},
    trials=replace(
        test_trials.RUN,
        job={"budget_s": 600, "requests": 3, "candidates": [{"name": "plain start"}]},
        announcement="the service is stopped meanwhile",
    ),
)


@pytest.fixture(autouse=True)
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_REPORTS_DIR", str(tmp_path))
    monkeypatch.setattr(bench, "_measured", {})
    return tmp_path


def compared(commands_of: Commands, host: Any, *, executing: bool = True) -> list[Any]:
    return commands_of(bench.compared, host, executing=executing, run=RUN)


def rounds(count: int) -> list[dict[str, Any]]:
    return [
        event(name, number, ms)
        for number in range(count)
        for name, ms in (("plain start", 400.0), ("planned", 200.0))
    ]


def test_nothing_is_measured_before_the_run_executes(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host()
    assert compared(commands_of, host, executing=False) == []
    assert host.commands == []


def test_a_host_shows_its_table_and_has_its_figures_in_the_runs_bench_json(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run, reports: Path
) -> None:
    host = scripted_host(facts(True), answers=[answer(*rounds(6), end("rounds"))])
    assert compared(commands_of, host) == []
    assert "the service is stopped meanwhile" in host.lines
    (line,) = [line for line in host.lines if line.startswith("idle  TTFT")]
    assert "2.00 (2.00 to 2.00)" in line
    assert line.endswith("faster")
    told = json.loads((reports / notes.id / "bench.json").read_text())
    assert told["run_id"] == notes.id
    found = told["hosts"]["pi5-01"]
    assert (found["hardware_class"], found["ended"]) == (
        "Raspberry Pi 5",
        "rounds: 12 rounds are done",
    )
    assert {ratio["n"] for ratio in found["ratios"]} == {6}


@pytest.mark.parametrize(
    ("lines", "have", "fix"),
    [
        (answer(end("busy", "3 requests at work")), "3 requests at work", "tune_while_busy"),
        (answer(*rounds(6)), "the connection ended", "deploys/bench.py"),
        (answer(event("planned", 0, 1.0), end("budget")), "budget", "tune_budget_s"),
    ],
    ids=["busy", "cut", "no pair"],
)
def test_a_host_without_figures_fails_with_the_reason_and_writes_none(
    scripted_host: Any,
    commands_of: Commands,
    reports: Path,
    lines: list[str],
    have: str,
    fix: str,
) -> None:
    (command,) = compared(commands_of, scripted_host(facts(True), answers=[lines]))
    assert command.function is fail
    (error,) = command.args
    assert error.what == "bench"
    assert have in error.have
    assert fix in error.fix
    assert list(reports.iterdir()) == []


def test_a_host_without_the_runtime_is_told_to_be_rolled_out_first(
    scripted_host: Any, commands_of: Commands
) -> None:
    (command,) = compared(commands_of, scripted_host(facts(False)))
    assert command.args[0].have == f"missing: {RUNTIME_PATH}"
