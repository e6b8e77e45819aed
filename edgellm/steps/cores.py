"""Cores for the server alone: other slices are kept off them, where the inventory asks for that."""

from __future__ import annotations

from edgellm.operations import cores, paths
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Cores")
def reserve_cores(ctx: Context) -> None:
    group = ctx.desired.reserve
    paths.present(
        name="Drop-ins of system.slice and user.slice as planned",
        files=group.files,
        absent=group.absent,
    )
    cores.reserved(name="Cores reserved as planned", cpus=ctx.plan.reserved_cpus)
