"""The model file."""

from __future__ import annotations

from edgellm.operations import model
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Model")
def place_model(ctx: Context) -> None:
    model.present(name="Model file present and verified", transfer=ctx.model_transfer)
