"""Packages of the distribution that the server needs."""

from __future__ import annotations

from edgellm.operations import packages
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Packages")
def install_packages(ctx: Context) -> None:
    packages.present(
        name="numactl, chrt, libgomp and libstdc++ installed",
        missing=ctx.plan.packages,
        package_manager=ctx.profile.tools.package_manager,
        lock_deadline_s=ctx.settings.package_lock_deadline_s,
    )
