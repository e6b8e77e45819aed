"""zram by the manager that fits the host."""

from __future__ import annotations

from edgellm.operations import paths, zram
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Memory")
def set_up_zram(ctx: Context) -> None:
    group, plan = ctx.desired.zram, ctx.plan.zram
    zram.own_absent(name="No zram swap of ours beside the plan", planned=plan)
    paths.present(name="zram configuration present", files=group.files, absent=group.absent)
    zram.in_force(name="zram swap in force", plan=plan)
