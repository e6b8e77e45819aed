"""Facts that fail as our errors: pyinfra gives None where a fact could not be loaded."""

from __future__ import annotations

from typing import Any, TypeVar

from pyinfra import host
from pyinfra.api import FactBase
from pyinfra.api.exceptions import FactProcessError
from pyinfra.context import ctx_host

from edgellm.errors import EdgellmError

T = TypeVar("T")

# Host name -> why its last fact could not be read: pyinfra logs the exception and drops it.
_faults: dict[str, str] = {}


def unreadable(why: str) -> FactProcessError:
    """For FactBase.process: the exception to raise, the only one that does not end the run."""
    if ctx_host.isset():
        _faults[host.name] = why
    return FactProcessError(why)


def read(fact: type[FactBase[T]], **arguments: Any) -> T:
    """The fact's value on the current host. Raises EdgellmError instead of returning None.

    _ignore_errors: pyinfra would otherwise fail the host at once, and end the whole run where it
    was the last one, before the reason could be noted.
    """
    _faults.pop(host.name, "")
    value: T | None = host.get_fact(fact, **arguments, _ignore_errors=True)
    if value is None:
        raise EdgellmError(
            host=host.name,
            what=f"reading {fact.__name__}",
            want="an answer over ssh that can be read",
            have=_faults.pop(host.name, "") or "none: the connection, sudo or the shell failed",
            fix=f"check the host's network and power, then run again with --limit {host.name}",
        )
    return value
