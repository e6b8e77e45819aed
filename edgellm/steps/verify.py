"""The proof on the host itself, and the way back where it fails."""

from __future__ import annotations

from edgellm.operations import record, service, smoke
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Verify")
def verify(ctx: Context) -> None:
    """The same proof of a host as it is, without anything that follows from it."""
    smoke.asked(
        name="Time to first token within budget, threads as planned",
        test=ctx.smoke_test,
        desired=ctx.desired,
    )


@step("Verify")
def verify_or_roll_back(ctx: Context) -> None:
    # pyinfra runs nothing more on a failed host, so the failure is held back until the roll-back
    # is done, and given then.
    verified = smoke.verified(
        name="Time to first token within budget",
        test=ctx.smoke_test,
        desired=ctx.desired,
        _ignore_errors=True,
    )
    service.rolled_back(
        name="Previous release back",
        required=False,
        _if=verified.did_error,
        _ignore_errors=True,
    )
    smoke.given_up(name="Unhealthy host failed", _if=verified.did_error)
    smoke.in_order(name="Effective state as planned", release_id=ctx.release.id)
    record.confirmed(
        name="Verified host recorded",
        release_id=ctx.release.id,
        plan=ctx.plan,
        profile=ctx.profile,
    )
    service.releases_pruned(name="Old releases pruned", keep=ctx.settings.keep_releases)
