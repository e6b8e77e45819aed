"""pyinfra's @deploy with the types of the function it wraps: its own accept keywords only."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pyinfra.api import deploy
from typing_extensions import ParamSpec

P = ParamSpec("P")


def step(name: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """The operations that the function adds are named 'name | …'."""
    return cast("Callable[[Callable[P, None]], Callable[P, None]]", deploy(name))
