"""Facts that fail as our errors: pyinfra gives None where a fact could not be loaded."""

from __future__ import annotations

from typing import Any, TypeVar

from pyinfra import host
from pyinfra.api import FactBase

from edgellm.errors import EdgellmError

T = TypeVar("T")


def read(fact: type[FactBase[T]], **arguments: Any) -> T:
    """The fact's value on the current host. Raises EdgellmError instead of returning None.

    _ignore_errors: pyinfra would otherwise fail the host at once, and end the whole run where it
    was the last one, before the reason could be noted.
    """
    value: T | None = host.get_fact(fact, **arguments, _ignore_errors=True)
    if value is None:
        raise EdgellmError(
            host=host.name,
            what=f"reading {fact.__name__}",
            want="the script's answer over ssh",
            have="none (the lines above have what ssh and the host said)",
            fix=f"check the host's network and power, then run again with --limit {host.name}",
        )
    return value
