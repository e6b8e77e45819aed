"""The host measures what its plan is worth."""

from __future__ import annotations

from pyinfra import host

from edgellm.comparison import PLAIN
from edgellm.measured import PLANNED, Candidate, plain_start
from edgellm.operations import bench
from edgellm.operations.bench import BenchRun
from edgellm.prepare import Context
from edgellm.steps.step import step
from edgellm.steps.tune import SLACK_S
from edgellm.trial_job import command_bits, live_units_stopped, trial_job


@step("Bench")
def compare_with_plain_start(ctx: Context) -> None:
    model = ctx.model
    if model is None:
        host.log("engine=forward holds no model of ours: nothing to measure")
        return
    job = trial_job(
        (plain_start(ctx.profile, ctx.plan), Candidate.of(PLANNED)),
        ctx.plan,
        ctx.profile,
        ctx.settings,
        model_sha256=model.sha256,
        runtime_id=ctx.runtime.id,
        key_hashes=ctx.api_key_hashes,
        has_probe_key=ctx.probe_key is not None,
        unplaced=(PLAIN,),
    )
    # Also a plan that loses is measured to the end: it is the figure that is asked for
    job["keep_all"] = True
    load_s, request_s = ctx.settings.load_deadline_s, ctx.settings.request_deadline_s
    unit_ends_s = ctx.settings.tune_budget_s + load_s + SLACK_S
    bench.compared(
        name="Plan measured against a plain start",
        run=BenchRun(
            about={
                "hardware_class": ctx.profile.hardware_class,
                "kernel": ctx.profile.kernel.release,
                "model": model.name,
                "release": ctx.release.id,
            },
            model_sha256=model.sha256,
            runtime_id=ctx.runtime.id,
            job=job,
            command=tuple(command_bits(ctx.runtime.id, ctx.plan, ends_within_s=unit_ends_s)),
            announcement=live_units_stopped(job),
            ends_within_s=unit_ends_s + SLACK_S,
            silent_within_s=load_s + (job["requests"] + 1) * request_s + SLACK_S,
        ),
    )
