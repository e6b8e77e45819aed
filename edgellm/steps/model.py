"""The model file."""

from __future__ import annotations

from pyinfra.api.operation import OperationMeta

from edgellm.operations import model
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Model")
def place_model(ctx: Context) -> OperationMeta | None:
    """None: the host forwards to a server that has a model of its own."""
    transfer = ctx.model_transfer
    if transfer is None:
        return None
    return model.present(name="Model file present and verified", transfer=transfer)
