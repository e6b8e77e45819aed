"""The model file."""

from __future__ import annotations

from pyinfra.api.operation import OperationMeta

from edgellm.operations import model
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Model")
def place_model(ctx: Context) -> OperationMeta:
    return model.present(name="Model file present and verified", transfer=ctx.model_transfer)
