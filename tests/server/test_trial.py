"""The trials on a host: the order of turns, when they stop, and real servers with a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm_server import trial
from edgellm_server.trial import (
    Bench,
    Candidate,
    Figures,
    Job,
    StopError,
    TrialError,
    counters,
    run,
    throttle_reason,
    turn_order,
    worth_another_round,
)

from .conftest import ONE_SLOT, REPO

NAMES = ("planned", "a", "b", "c")
ENTRYPOINT = f'#!/bin/sh\nPYTHONPATH={REPO} exec "{sys.executable}" -s -B -m edgellm_server\n'


def figures(candidate: str, number: int, time_ms: float, condition: str = "idle") -> Figures:
    return Figures(
        candidate=candidate,
        round=number,
        condition=condition,
        ttft_ms=time_ms,
        tpot_ms=0.0,
        n=3,
        temperature_c=None,
        cpu_freq_khz=None,
        why_throttled=None,
        disturbed=False,
    )


def job(*candidates: Candidate, **changed: Any) -> Job:
    values: dict[str, Any] = {
        "candidates": candidates or tuple(Candidate(n, "", {}, None) for n in NAMES),
        "conditions": ("idle", "crowded", "loaded"),
        "model_name": "small",
        "runtime": "/nowhere",
        "system_prompt": None,
        "budget_s": 600.0,
        "max_rounds": 12,
        "requests": 2,
        "neighbours": 1,
        "hot_c": 95.0,
        "load_deadline_s": 60.0,
        "first_token_deadline_s": 60.0,
        "request_deadline_s": 60.0,
        "live_url": None,
        "stop_service": False,
        "while_busy": False,
        "api_key_file": None,
        "user": None,
        "systemd": False,
    }
    return Job(**{**values, **changed})


# Pure


def test_each_round_another_one_begins_and_neighbours_change_sides() -> None:
    orders = [turn_order(NAMES, number) for number in range(8)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert {order[0] for order in orders} == set(NAMES)
    # What slowly gets slower must not always find the same one after the baseline
    later = [order.index("a") > order.index("planned") for order in orders]
    assert sum(later) == 4


def keep(
    found: list[Figures], rounds_done: int, *, turn_s: float = 1.0, left_s: float = 1e6
) -> tuple[str, ...]:
    return worth_another_round(
        NAMES,
        found,
        baseline="planned",
        rounds_done=rounds_done,
        turn_s=turn_s,
        left_s=left_s,
    )


def rounds_of(number: int, **times_ms: float) -> list[Figures]:
    return [figures(name, n, t) for n in range(number) for name, t in times_ms.items()]


def test_after_two_rounds_those_that_were_faster_nowhere_are_let_go() -> None:
    times = {"planned": 100.0, "a": 95.0, "b": 103.0, "c": 200.0}
    assert keep(rounds_of(1, **times), 1) == NAMES
    assert keep(rounds_of(2, **times), 2) == ("planned", "a")


def test_one_that_is_far_slower_under_one_condition_is_let_go() -> None:
    found = rounds_of(2, planned=100, a=50, b=50, c=50)
    for number in range(2):
        found += [figures("planned", number, 100, "loaded"), figures("a", number, 130, "loaded")]
    assert keep(found, 2) == ("planned", "b", "c")


def test_no_more_are_kept_than_the_time_left_can_measure_five_times() -> None:
    times = {"planned": 100.0, "a": 99.0, "b": 90.0, "c": 95.0}
    found = rounds_of(1, **times)
    # 4 rounds are missing: 3 turns of 10 s each
    assert keep(found, 1, turn_s=10, left_s=125) == ("planned", "b", "c")
    assert keep(found, 1, turn_s=10, left_s=79) == ("planned",)
    # Once there are enough rounds, all of them may go on
    assert keep(rounds_of(5, **times), 5, turn_s=10, left_s=20) == NAMES


def test_a_disturbed_baseline_lets_nobody_go() -> None:
    found = rounds_of(2, planned=100, a=200, b=200, c=200)
    disturbed = [replace(f, disturbed=f.candidate == "planned") for f in found]
    assert keep(disturbed, 2) == NAMES


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        ({"flags": "0x50005"}, "the firmware says 0x50005"),
        ({"temperature_c": 80.2}, "80 C"),
        ({"clocks_khz": (2_400_000, 1_500_000)}, "from 2400 to 1500 MHz"),
        ({"flags": "0x50000", "temperature_c": 79.0}, None),  # history, and not yet hot
        ({"clocks_khz": (2_400_000, 2_200_000)}, None),
        ({"clocks_khz": (None, 1_500_000)}, None),
    ],
)
def test_heat_a_falling_clock_and_the_firmwares_flags_are_throttling(
    seen: dict[str, Any], word: str | None
) -> None:
    unseen = {"flags": None, "temperature_c": None, "clocks_khz": (None, None)}
    reason = throttle_reason(hot_c=80.0, **{**unseen, **seen})
    assert (reason is None) == (word is None)
    assert word is None or word in str(reason)


def test_requests_at_work_are_counted_over_all_workers() -> None:
    text = (
        '# TYPE edgellm_slots_busy gauge\nedgellm_slots_busy{worker="0"} 2.0\n'
        'edgellm_slots_busy{worker="1"} 1.0\nedgellm_slots{worker="0"} 8.0\n'
        'edgellm_queue_depth{worker="0"} 3.0\n'
    )
    assert counters(text, "edgellm_slots_busy", "edgellm_queue_depth") == 6.0
    assert counters("", "edgellm_slots_busy") == 0.0


# The run, with scripted turns


class ScriptedBench(Bench):
    """Turns from a table of times, or a TrialError; no process is started."""

    def __init__(self, times_ms: dict[str, float], hot_in_round: int | None = None) -> None:
        self.times_ms, self.hot_in_round = times_ms, hot_in_round

    def turn(self, candidate: Candidate, number: int) -> Iterator[Figures]:
        time_ms = self.times_ms.get(candidate.name)
        if time_ms is None:
            raise TrialError("not_ready: it ended")
        time.sleep(0.002)
        why = "hot" if number == self.hot_in_round else None
        yield replace(figures(candidate.name, number, time_ms), why_throttled=why)


def run_scripted(bench: Bench, **changed: Any) -> tuple[StopError, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    with pytest.raises(StopError) as stopped:
        run(job(**changed), bench, events.append)
    return stopped.value, events


def turns(events: list[dict[str, Any]], name: str) -> int:
    return sum(e["event"] == "trial" and e["candidate"] == name for e in events)


def test_run_ends_after_its_rounds_and_those_that_cannot_win_end_sooner() -> None:
    bench = ScriptedBench({"planned": 100, "a": 90, "b": 120, "c": 101})
    stop, events = run_scripted(bench, max_rounds=6)
    assert stop.why == "rounds"
    assert [turns(events, name) for name in NAMES] == [6, 6, 2, 2]


def test_run_ends_when_nothing_is_left_that_could_win() -> None:
    stop, events = run_scripted(ScriptedBench({"planned": 100, "a": 110, "b": 120, "c": 101}))
    assert stop.why == "settled"
    assert turns(events, "planned") == 2


def test_where_all_are_to_be_kept_one_that_cannot_win_is_measured_to_the_end() -> None:
    bench = ScriptedBench({"planned": 100, "a": 110, "b": 120, "c": 101})
    stop, events = run_scripted(bench, max_rounds=6, keep_all=True)
    assert stop.why == "rounds"
    assert [turns(events, name) for name in NAMES] == [6, 6, 6, 6]


def test_run_ends_at_once_when_the_host_throttles() -> None:
    bench = ScriptedBench({"planned": 100, "a": 90, "b": 90, "c": 90}, hot_in_round=3)
    stop, events = run_scripted(bench)
    assert (stop.why, stop.detail) == ("throttled", "hot")
    assert events[-1]["throttled"] is True
    assert events[-1]["round"] == 3


def test_run_ends_within_its_budget_and_says_when_that_is_too_small() -> None:
    began = time.monotonic()
    bench = ScriptedBench({"planned": 100, "a": 90, "b": 90, "c": 90})
    stop, _ = run_scripted(bench, budget_s=0.02, max_rounds=1000)
    assert stop.why == "budget"
    assert time.monotonic() - began < 0.5


def test_candidate_that_fails_twice_is_let_go_and_a_baseline_that_does_ends_the_run() -> None:
    stop, events = run_scripted(ScriptedBench({"planned": 100, "a": 90, "b": 90}), max_rounds=5)
    assert stop.why == "rounds"
    assert sum(e["event"] == "failed" for e in events) == 2
    stop, _ = run_scripted(ScriptedBench({"a": 90, "b": 90, "c": 90}))
    assert stop.why == "failed"
    assert "planned itself" in stop.detail


def test_busy_service_is_not_measured_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "live_metrics", lambda url: 'edgellm_slots_busy{worker="0"} 2.0\n')
    with pytest.raises(StopError, match="2 requests at work"):
        trial.refuse_if_busy("http://127.0.0.1:8000")


# Real servers


@pytest.fixture
def candidate(model_path: Path) -> Candidate:
    environ = {
        **ONE_SLOT,
        "EDGELLM_N_PARALLEL": "2",
        "EDGELLM_MODEL_PATH": str(model_path),
        "EDGELLM_MODEL_NAME": "small",
        "EDGELLM_N_THREADS": "1",
        "HOME": os.environ.get("HOME", "/"),
    }
    return Candidate("planned", ENTRYPOINT, environ, None)


Start = Callable[[Job], "subprocess.Popen[str]"]
END_DEADLINE_S = 300  # some 15 s on a quiet machine


@pytest.fixture
def start() -> Iterator[Start]:
    """start(job): `python3 -m edgellm_server.trial` with this job; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run_trials(given: Job) -> subprocess.Popen[str]:
        values = {**vars(given), "candidates": [vars(c) for c in given.candidates]}
        process = subprocess.Popen(
            [sys.executable, "-s", "-B", "-m", "edgellm_server.trial"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(values))
        process.stdin.close()
        process.stdin = None
        return process

    yield run_trials
    for process in started:
        if process.poll() is None:
            process.terminate()  # it ends its server first
            process.communicate()


def children(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for task in tasks for child in task.read_text().split()]


def test_real_candidates_take_turns_under_each_condition_and_leave_nothing(
    start: Start, candidate: Candidate
) -> None:
    other = replace(
        candidate, name="n_batch 32", environ={**candidate.environ, "EDGELLM_N_BATCH": "32"}
    )
    process = start(job(candidate, other, max_rounds=1))
    out, err = process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    done = [(e["candidate"], e["condition"]) for e in events if e["event"] == "trial"]
    assert done == [
        (name, condition)
        for name in ("planned", "n_batch 32")
        for condition in ("idle", "crowded", "loaded")
    ], events
    assert all(e["ttft_ms"] > 0 and e["tpot_ms"] > 0 for e in events if e["event"] == "trial")
    assert (events[-1]["event"], events[-1]["why"]) == ("end", "rounds")


def test_server_that_does_not_start_is_said_with_its_own_words(
    start: Start, candidate: Candidate
) -> None:
    broken = replace(candidate, environ={**candidate.environ, "EDGELLM_N_THREADS": "none"})
    process = start(job(broken, replace(candidate, name="other"), conditions=("idle",)))
    out, _ = process.communicate(timeout=END_DEADLINE_S)
    events = [json.loads(line) for line in out.splitlines()]
    failed = [e for e in events if e["event"] == "failed"]
    assert "EDGELLM_N_THREADS" in failed[0]["why"]
    assert (events[-1]["event"], events[-1]["why"]) == ("end", "failed")


def test_ended_run_ends_its_server_and_says_so(start: Start, candidate: Candidate) -> None:
    process = start(job(candidate, replace(candidate, name="other")))
    assert process.stdout is not None
    process.stdout.readline()  # the first trial is done, and its server still up
    (server, *_) = children(process.pid)
    process.terminate()
    out, _ = process.communicate(timeout=END_DEADLINE_S)
    assert json.loads(out.splitlines()[-1])["event"] == "end"
    assert not Path(f"/proc/{server}").exists()
