"""sysctl and login limits: at boot by files of our own, and now."""

from __future__ import annotations

from edgellm import layout, render
from edgellm.operations import kernel, paths
from edgellm.operations.paths import HostFile
from edgellm.steps.step import step
from edgellm.tuning import TuningPlan


@step("Kernel")
def tune_kernel(plan: TuningPlan) -> None:
    paths.present(
        name="sysctl.d and limits.d files present",
        files=(
            *_sysctl_files(plan),
            HostFile(
                path=layout.LIMITS_CONF,
                content=render.text("90-edgellm.limits.conf.j2", plan=plan),
            ),
        ),
    )
    kernel.swappiness_in_force(name="vm.swappiness in force", swappiness=plan.swappiness)


def _sysctl_files(plan: TuningPlan) -> tuple[HostFile, ...]:
    if plan.swappiness is None:
        return ()
    content = render.text("90-edgellm.sysctl.conf.j2", plan=plan)
    return (HostFile(path=layout.SYSCTL_CONF, content=content),)
