"""deploys/tune.py's operation: when it measures, what it sends, what it makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyinfra.api import FunctionCommand
from pyinfra.context import ctx_host

from edgellm.errors import EdgellmError
from edgellm.measured import Candidate, Choice, MeasuredResult, ResultKey
from edgellm.operations import trials
from edgellm.operations.containment import contained_call, fail
from edgellm.operations.trials import Tuning, measure
from edgellm.trial_job import TrialRun

Commands = Callable[..., list[Any]]
SHA256 = "ab" * 32
KEY = ResultKey(
    kernel="6.1.0", model_sha256=SHA256, runtime_id="rt-1", plan_digest="0123456789abcdef"
)
PLANNED = Candidate.of("planned")
FEWER = Candidate.of("threads 1", threads=1)
MODEL_PATH = f"/opt/edgellm/models/{SHA256}.gguf"
RUNTIME_PATH = "/opt/edgellm/runtimes/rt-1"
JOB = {
    **{"budget_s": 600, "requests": 3},
    "candidates": [{"name": "planned"}, {"name": "threads 1"}],
}
STORED = MeasuredResult(
    key=KEY,
    choice=Choice(candidate="planned", changes=(), why="noise", conclusive=True, standings=()),
    measured_on="2026-12-02",
    duration_s=400.0,
    ended="rounds: 12",
)


RUN = TrialRun(
    model_sha256=SHA256,
    runtime_id="rt-1",
    job=JOB,
    command=("systemd-run", "--unit=edgellm-tune"),
    announcement=None,
    ends_within_s=900,
    silent_within_s=300,
)


def tuning(**changed: Any) -> Tuning:
    values: dict[str, Any] = {
        "key": KEY,
        "candidates": (PLANNED, FEWER),
        "run": RUN,
        "stored": None,
        "again": False,
    }
    return Tuning(**{**values, **changed})


def facts(whole: bool) -> dict[str, Any]:
    question = f"models={{'{MODEL_PATH}': '{SHA256}'}}, runtimes={{'{RUNTIME_PATH}': 'rt-1'}}"
    return {"paths.ArtifactsWhole": {question: {MODEL_PATH: True, RUNTIME_PATH: whole}}}


def event(candidate: str, number: int, time_ms: float, **changed: Any) -> dict[str, Any]:
    return {
        **{"event": "trial", "candidate": candidate, "round": number, "condition": "idle"},
        **{"ttft_ms": time_ms, "tpot_ms": 10.0, "n": 3, "temperature_c": None},
        **{"throttled": False, "disturbed": False, "left_s": 100},
        **changed,
    }


def end(why: str, detail: str = "12 rounds are done") -> dict[str, Any]:
    return {"event": "end", "why": why, "detail": detail, "duration_s": 401.2}


def answer(*events: dict[str, Any]) -> list[str]:
    return [json.dumps(one) for one in events]


def rounds(fewer_ms: tuple[float, ...]) -> list[dict[str, Any]]:
    return [
        one
        for number, time_ms in enumerate(fewer_ms)
        for one in (event("planned", number, 400.0), event("threads 1", number, time_ms))
    ]


# When it measures


def test_a_result_that_holds_is_not_measured_again(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host()
    assert commands_of(trials.measured, host, tuning=tuning(stored=STORED)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"stored": None},
        {"stored": STORED, "again": True},
        {"stored": replace(STORED, key=replace(KEY, kernel="5.10.0"))},
        {"stored": replace(STORED, choice=replace(STORED.choice, conclusive=False))},
    ],
    ids=["none", "asked for", "another kernel", "not conclusive"],
)
def test_without_a_result_that_holds_it_measures(
    changed: dict[str, Any], scripted_host: Any, commands_of: Commands
) -> None:
    (command,) = commands_of(trials.measured, scripted_host(facts(True)), tuning=tuning(**changed))
    assert isinstance(command, FunctionCommand)
    assert command.function is contained_call
    assert command.args[0] is measure


def test_a_host_without_the_runtime_is_told_to_be_rolled_out_first(
    scripted_host: Any, commands_of: Commands
) -> None:
    (command,) = commands_of(trials.measured, scripted_host(facts(False)), tuning=tuning())
    assert command.function is fail
    (error,) = command.args
    assert error.have == f"missing: {RUNTIME_PATH}"
    assert error.fix == "run deploys/qwen.py first"


def test_nothing_to_try_is_no_change(scripted_host: Any, commands_of: Commands) -> None:
    host = scripted_host()
    assert commands_of(trials.measured, host, tuning=tuning(candidates=(PLANNED,))) == []


# What it makes of the answers


def measured(host: Any, given: Tuning) -> None:
    with ctx_host.use(host):
        measure(SimpleNamespace(), host, given, {"_sudo": True})


def stored_by(host: Any) -> MeasuredResult:
    command = host.commands[-1]
    (file,) = json.loads(host.stdin[-1])
    assert "write_files" not in str(command)  # its text is sent, not a path
    assert (file["path"], file["owner"], file["group"], file["mode"]) == (
        "/opt/edgellm/measured.json",
        "root",
        "root",
        "0644",
    )
    result = MeasuredResult.parse(file["content"])
    assert result is not None
    return result


@pytest.fixture
def host_of(scripted_host: Any) -> Callable[..., Any]:
    """host_of(answer, …): one that also remembers what it was given on standard input."""

    def build(*answers: Any) -> Any:
        host = scripted_host(answers=answers)
        host.stdin = []
        run = host.run_shell_command

        def remember(command: Any, **arguments: Any) -> Any:
            host.stdin.append(arguments.get("_stdin"))
            return run(command, **arguments)

        host.run_shell_command = remember
        return host

    return build


def test_a_winner_is_stored_with_its_key_and_the_operator_told_what_to_run(
    host_of: Callable[..., Any],
) -> None:
    fast = rounds((250.0, 255.0, 252.0, 248.0, 251.0, 249.0))
    host = host_of(answer(*fast, end("rounds")), [])
    measured(host, tuning())
    assert str(host.commands[0]) == "systemd-run --unit=edgellm-tune"
    assert json.loads(host.stdin[0]) == JOB
    result = stored_by(host)
    assert result.key == KEY
    assert result.choice.candidate == "threads 1"
    assert result.choice.changes == (("threads", 1),)
    assert result.duration_s == 401.2
    assert host.lines[0] == "up to 600 s of trials: planned, threads 1"
    assert host.lines[1] == (
        "round 1, planned, idle: TTFT 400 ms, then 10.0 ms a token; 100 s left"
    )
    assert "run deploys/qwen.py to use it: nothing has changed yet" in host.lines[-1]


def test_the_plan_that_stands_is_stored_too(host_of: Callable[..., Any]) -> None:
    host = host_of(answer(*rounds((401.0, 399.0)), end("settled", "after 2 rounds")), [])
    measured(host, tuning())
    result = stored_by(host)
    assert result.choice.keeps_the_plan
    assert result.choice.conclusive
    assert result.ended == "settled: after 2 rounds"
    assert host.lines[-1].endswith("and stored; nothing changes")


def test_what_goes_away_for_the_trials_is_announced_before(host_of: Callable[..., Any]) -> None:
    stopped = {"event": "service", "state": "stopped"}
    back = {"event": "service", "state": "started again"}
    lines = answer(stopped, *rounds((401.0, 399.0)), back, end("settled"))
    host = host_of(lines, [])
    measured(
        host,
        tuning(run=replace(RUN, announcement="edgellm.service is stopped while it is measured")),
    )
    assert host.lines[1] == "edgellm.service is stopped while it is measured"
    assert host.lines[2] == "the live service is stopped"
    assert "the live service is started again" in host.lines


@pytest.mark.parametrize(
    ("lines", "have", "fix"),
    [
        (
            answer(end("busy", "the live service has 2 requests at work")),
            "2 requests at work",
            "tune_while_busy=true",
        ),
        (answer(end("failed", "planned itself: not_ready")), "planned itself", "journalctl"),
        (
            ["Failed to start transient service unit: edgellm-tune.service was already loaded"],
            "already loaded",
            "again",
        ),
        (answer(event("planned", 0, 1.0)), "the connection ended", "again"),
        ([], "the connection ended", "again"),
    ],
    ids=["busy", "failed", "under way already", "cut", "silent"],
)
def test_a_run_that_tells_nothing_stores_nothing_and_says_why(
    lines: list[str], have: str, fix: str, host_of: Callable[..., Any]
) -> None:
    host = host_of(lines)
    with pytest.raises(EdgellmError) as error:
        measured(host, tuning())
    assert have in error.value.have
    assert fix in error.value.fix
    assert len(host.commands) == 1
