"""The host measures which knobs win on it."""

from __future__ import annotations

from pyinfra import host

from edgellm.measured import MeasuredResult, candidates
from edgellm.operations import trials
from edgellm.operations.trials import Tuning
from edgellm.prepare import Context
from edgellm.steps.step import step
from edgellm.trial_job import command_bits, live_units_stopped, trial_job

# Beyond the budget: the last trial, the way down, the service's start
SLACK_S = 120


@step("Tune")
def measure_candidates(ctx: Context) -> None:
    key, model = ctx.measured_key, ctx.model
    if key is None or model is None:
        host.log("engine=forward holds no model of ours: nothing to measure")
        return
    tried = candidates(ctx.planned, ctx.profile, ctx.settings)
    job = trial_job(
        tried,
        ctx.planned,
        ctx.profile,
        ctx.settings,
        model_sha256=model.sha256,
        runtime_id=ctx.runtime.id,
        key_hashes=ctx.api_key_hashes,
        has_probe_key=ctx.probe_key is not None,
    )
    load_s, request_s = ctx.settings.load_deadline_s, ctx.settings.request_deadline_s
    unit_ends_s = ctx.settings.tune_budget_s + load_s + SLACK_S
    trials.measured(
        name="Result of trials on this host stored",
        tuning=Tuning(
            key=key,
            candidates=tried,
            job=job,
            command=tuple(command_bits(ctx.runtime.id, ctx.planned, ends_within_s=unit_ends_s)),
            announcement=live_units_stopped(job),
            stored=MeasuredResult.parse(ctx.profile.measured_json),
            again=ctx.settings.tune_again,
            ends_within_s=unit_ends_s + SLACK_S,
            silent_within_s=load_s + (job["requests"] + 1) * request_s + SLACK_S,
        ),
    )
