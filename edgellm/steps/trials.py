"""What a host measures on itself, for the steps that have it measure."""

from __future__ import annotations

from edgellm.measured import Candidate
from edgellm.prepare import Context
from edgellm.release import ModelArtifact
from edgellm.trial_job import TrialRun, trial_job, trial_run
from edgellm.tuning import TuningPlan


def trials_of(
    ctx: Context,
    model: ModelArtifact,
    tried: tuple[Candidate, ...],
    plan: TuningPlan,
    *,
    unplaced: tuple[str, ...] = (),
    keep_all: bool = False,
) -> TrialRun:
    """The run that tries these candidates against `plan`; trial_job.trial_job has the rest."""
    job = trial_job(
        tried,
        plan,
        ctx.profile,
        ctx.settings,
        model_sha256=model.sha256,
        runtime_id=ctx.runtime.id,
        key_hashes=ctx.api_key_hashes,
        has_probe_key=ctx.probe_key is not None,
        unplaced=unplaced,
        keep_all=keep_all,
    )
    return trial_run(job, plan, ctx.settings, model_sha256=model.sha256, runtime_id=ctx.runtime.id)
