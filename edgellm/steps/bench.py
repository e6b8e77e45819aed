"""The host measures what its plan is worth."""

from __future__ import annotations

from pyinfra import host

from edgellm.comparison import PLAIN
from edgellm.measured import PLANNED, Candidate, plain_start
from edgellm.operations import bench
from edgellm.operations.bench import BenchRun
from edgellm.prepare import Context
from edgellm.steps.step import step
from edgellm.steps.trials import trials_of


@step("Bench")
def compare_with_plain_start(ctx: Context) -> None:
    model = ctx.model
    if model is None:
        host.log("engine=forward holds no model of ours: nothing to measure")
        return
    tried = (plain_start(ctx.profile, ctx.plan), Candidate.of(PLANNED))
    bench.compared(
        name="Plan measured against a plain start",
        run=BenchRun(
            about={
                "hardware_class": ctx.profile.hardware_class,
                "kernel": ctx.profile.kernel.release,
                "model": model.name,
                "release": ctx.release.id,
            },
            # Also a plan that loses is measured to the end: it is the figure that is asked for
            trials=trials_of(ctx, model, tried, ctx.plan, unplaced=(PLAIN,), keep_all=True),
        ),
    )
