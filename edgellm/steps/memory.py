"""zram by the manager that fits the host."""

from __future__ import annotations

from edgellm import layout, render
from edgellm.operations import paths, zram
from edgellm.operations.paths import HostFile
from edgellm.steps.step import step
from edgellm.tuning import ZramPlan

# ZramPlan.manager -> (where its file lies, the template it is rendered from)
FILES = {
    "own-unit": (layout.ZRAM_UNIT, "edgellm-zram.service.j2"),
    "zram-generator": (layout.ZRAM_GENERATOR_CONF, "zram-generator.conf.j2"),
}


@step("Memory")
def set_up_zram(plan: ZramPlan) -> None:
    path, template = FILES.get(plan.manager, (None, None))
    paths.present(
        name="zram configuration present",
        files=()
        if path is None or template is None
        else (HostFile(path=path, content=render.text(template, plan=plan)),),
    )
    zram.in_force(name="zram swap in force", plan=plan)
