"""The host measures which knobs win on it."""

from __future__ import annotations

from pyinfra import host

from edgellm.measured import MeasuredResult, candidates
from edgellm.operations import trials
from edgellm.operations.trials import Tuning
from edgellm.prepare import Context
from edgellm.steps.step import step
from edgellm.steps.trials import trials_of


@step("Tune")
def measure_candidates(ctx: Context) -> None:
    key, model = ctx.measured_key, ctx.model
    if key is None or model is None:
        host.log("engine=forward holds no model of ours: nothing to measure")
        return
    tried = candidates(ctx.planned, ctx.profile, ctx.settings)
    trials.measured(
        name="Result of trials on this host stored",
        tuning=Tuning(
            key=key,
            candidates=tried,
            run=trials_of(ctx, model, tried, ctx.planned),
            stored=MeasuredResult.parse(ctx.profile.measured_json),
            again=ctx.settings.tune_again,
        ),
    )
