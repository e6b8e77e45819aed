"""pyinfra's @deploy with the types of the function it wraps: its own accept keywords only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from pyinfra.api import deploy
from typing_extensions import ParamSpec

P = ParamSpec("P")
R = TypeVar("R")


def step(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The operations that the function adds are named 'name | …'."""
    return cast("Callable[[Callable[P, R]], Callable[P, R]]", deploy(name))
