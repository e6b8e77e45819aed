"""sysctl, login limits and the clock's governor: at boot by files of our own, and now."""

from __future__ import annotations

from edgellm.operations import kernel, paths
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Kernel")
def tune_kernel(ctx: Context) -> None:
    group = ctx.desired.kernel
    paths.present(
        name="sysctl.d and limits.d files present", files=group.files, absent=group.absent
    )
    kernel.swappiness_in_force(name="vm.swappiness in force", swappiness=ctx.plan.swappiness)
    kernel.governor_in_force(name="Clock governor in force", governor=ctx.plan.cpu_governor)
