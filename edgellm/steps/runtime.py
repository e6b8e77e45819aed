"""The server and its Python packages."""

from __future__ import annotations

from pyinfra.api.operation import OperationMeta

from edgellm import layout
from edgellm.operations import runtime
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Runtime")
def place_runtime(ctx: Context) -> OperationMeta:
    return runtime.present(
        name="Runtime present and able to run here",
        transfer=ctx.runtime_transfer,
        directory=layout.runtime_directory(ctx.runtime.id),
        runtime_id=ctx.runtime.id,
    )
