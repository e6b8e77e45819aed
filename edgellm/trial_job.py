"""Candidates as releases of their own -> the job of edgellm_server/trial.py. Pure.

A candidate is rendered by the templates that render a release, so that what is measured is what a
roll-out would start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgellm import layout, render
from edgellm.hardware import Arch, HostProfile
from edgellm.measured import (
    HOT_C,
    Candidate,
    changed_plan,
    conditions,
    fits_beside_the_service,
)
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, visible_cpus

# Beyond the budget: the last trial, the way down, the service's start
SLACK_S = 120
MOST_ROUNDS = 12
REQUESTS = 3  # of one trial under one condition, the last with a long prompt
# Of our own app, or of paths that a candidate does not have
_NOT_FOR_TRIALS = ("EDGELLM_APP", "EDGELLM_SYSTEM_PROMPT_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """One run of edgellm_server/trial.py on a host."""

    model_sha256: str
    runtime_id: str
    job: dict[str, Any]
    command: tuple[str, ...]
    announcement: str | None  # before it begins
    # After the run's own deadlines: only a dead link takes longer, or is silent longer
    ends_within_s: int
    silent_within_s: int


def trial_run(
    job: dict[str, Any],
    plan: TuningPlan,
    settings: Settings,
    *,
    model_sha256: str,
    runtime_id: str,
) -> TrialRun:
    """The run of a job on a host that is planned so."""
    unit_ends_s = job["budget_s"] + settings.load_deadline_s + SLACK_S
    asked_s = (job["requests"] + 1) * settings.request_deadline_s
    return TrialRun(
        model_sha256=model_sha256,
        runtime_id=runtime_id,
        job=job,
        command=tuple(command_bits(runtime_id, plan, ends_within_s=unit_ends_s)),
        announcement=live_units_stopped(job),
        ends_within_s=unit_ends_s + SLACK_S,
        silent_within_s=settings.load_deadline_s + asked_s + SLACK_S,
    )


def trial_job(
    tried: tuple[Candidate, ...],
    plan: TuningPlan,
    profile: HostProfile,
    settings: Settings,
    *,
    model_sha256: str,
    runtime_id: str,
    key_hashes: tuple[str, ...] = (),
    has_probe_key: bool = False,
    unplaced: tuple[str, ...] = (),
    keep_all: bool = False,
) -> dict[str, Any]:
    """What edgellm_server/trial.py reads.

    `unplaced`: names of candidates that get no slice. `keep_all`: one that loses is measured to
    the end as well.
    """
    return {
        "candidates": [
            _candidate(item, plan, profile, settings, model_sha256, key_hashes, unplaced)
            for item in tried
        ],
        "conditions": conditions(plan),
        "model_name": settings.model_name,
        "runtime": layout.runtime_directory(runtime_id),
        "system_prompt": settings.system_prompt,
        "budget_s": settings.tune_budget_s,
        "max_rounds": MOST_ROUNDS,
        "requests": REQUESTS,
        "neighbours": len(visible_cpus(profile)),
        "hot_c": HOT_C[profile.arch or Arch.ARM64],
        "load_deadline_s": settings.load_deadline_s,
        "first_token_deadline_s": settings.first_token_deadline_s,
        "request_deadline_s": settings.request_deadline_s,
        "live_url": render.local_url(settings),
        "stop_service": not fits_beside_the_service(plan, profile),
        "while_busy": settings.tune_while_busy,
        "keep_all": keep_all,
        "api_key_file": layout.PROBE_KEY if has_probe_key else None,
        "user": layout.USER,
        "systemd": True,
    }


def _candidate(
    candidate: Candidate,
    plan: TuningPlan,
    profile: HostProfile,
    settings: Settings,
    model_sha256: str,
    key_hashes: tuple[str, ...],
    unplaced: tuple[str, ...],
) -> dict[str, Any]:
    changed = changed_plan(plan, profile, candidate.changes)
    files = {
        file.name: file.content for file in render.release_files(changed, settings, key_hashes)
    }
    environ = environment(files["server.env"])
    for name in _NOT_FOR_TRIALS:
        environ.pop(name, None)
    environ["EDGELLM_MODEL_PATH"] = layout.model_path(model_sha256)
    placed = candidate.name not in unplaced
    return {
        "name": candidate.name,
        "entrypoint": files["entrypoint.sh"],
        "environ": environ,
        "slice_text": files["edgellm.slice"] if placed else None,
    }


def environment(text: str) -> dict[str, str]:
    """server.env -> its variables. It has no quotes: systemd and we read it alike."""
    lines = (line for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def command_bits(runtime_id: str, plan: TuningPlan, *, ends_within_s: int) -> list[str]:
    """The command that runs a job on a host, as a unit of its own.

    systemd passes our standard streams on to it, and ends it with ExecStopPost= however it ends:
    killed, over its time, or with nobody left to read what it says.
    """
    module = "python3 -s -B -m edgellm_server.trial"
    memlock = plan.limits.memlock_bytes
    properties = {
        "RuntimeDirectory": "edgellm-tune",
        "RuntimeMaxSec": str(ends_within_s),
        "LimitNOFILE": str(plan.limits.nofile),
        "LimitMEMLOCK": "infinity" if memlock is None else str(memlock),
        "ExecStopPost": f'/bin/sh -c "exec {module} clean-up"',
    }
    return [
        *("systemd-run", "--unit=edgellm-tune", "--slice=edgellm_tune.slice"),
        *("--wait", "--pipe", "--collect", "--quiet"),
        f"--setenv=PYTHONPATH={layout.runtime_directory(runtime_id)}",
        *(f"--property={name}={value}" for name, value in properties.items()),
        "--",
        *module.split(),
    ]


def live_units_stopped(job: dict[str, Any]) -> str | None:
    """What to tell the operator before the service goes away, or None where it stays."""
    if not job["stop_service"]:
        return None
    return (
        "no memory for a second server beside the live one: edgellm.service and its socket are "
        f"stopped while it is measured (up to {job['budget_s']} s), and started again afterwards"
    )
