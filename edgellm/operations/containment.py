"""Operations whose faults fail their own host and no other.

pyinfra ends the whole run on an exception that an operation's generator raises while it executes,
and on those (EOFError of a dropped ssh link) that it does not expect. Every operation of ours is
therefore made by `host_operation`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any

from paramiko import SSHException
from pyinfra import host as current_host
from pyinfra import logger
from pyinfra.api import FunctionCommand, operation
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.arguments_typed import PyinfraOperation
from pyinfra.api.exceptions import PyinfraError
from typing_extensions import ParamSpec

from edgellm import recorder
from edgellm.errors import EdgellmError

if TYPE_CHECKING:
    from pyinfra.api import Host, State

P = ParamSpec("P")

# What a host can cause: its own faults, its link's, and facts that came back empty (None), without
# what was asked for, or with another kind of value.
HOST_FAULTS = (
    EdgellmError,
    PyinfraError,
    EOFError,
    OSError,
    SSHException,
    TypeError,
    AttributeError,
    LookupError,
    ValueError,
)


def host_operation() -> Callable[[Callable[P, Generator[Any]]], PyinfraOperation[P]]:
    """`pyinfra.api.operation`, contained."""

    def decorate(function: Callable[P, Generator[Any]]) -> PyinfraOperation[P]:
        @wraps(function)
        def contained(*args: P.args, **kwargs: P.kwargs) -> Generator[Any]:
            try:
                yield from function(*args, **kwargs)
            except HOST_FAULTS as error:
                yield FunctionCommand(fail, (as_edgellm_error(error),), {})

        return operation()(contained)

    return decorate


def fail(state: State, host: Host, error: EdgellmError) -> bool:
    """For a FunctionCommand: fails this host with its reason, without a traceback."""
    recorder.note_failure(host, error)
    host.log_styled(str(error), fg="red", log_func=logger.error)
    return False


def contained_call(
    state: State, host: Host, function: Callable[..., None], args: tuple[Any, ...]
) -> bool:
    """For a FunctionCommand: runs function(state, host, *args); what it raises fails this host."""
    try:
        function(state, host, *args)
    except HOST_FAULTS as error:
        return fail(state, host, as_edgellm_error(error))
    return True


def as_edgellm_error(error: BaseException) -> EdgellmError:
    """Any host fault as the one kind that names what to do."""
    if isinstance(error, EdgellmError):
        return error
    link = isinstance(error, (EOFError, OSError, SSHException))
    return EdgellmError(
        host=current_host.name,
        what="the connection" if link else "the host's answer",
        want="a working ssh session" if link else "what the operation asked for",
        have=str(error) or type(error).__name__,
        fix=f"check the host's network and power, then run again with --limit {current_host.name}",
    )


def connector_arguments(host: Host) -> dict[str, Any]:
    """How the operation at hand runs commands on its host: sudo, its password, and the like."""
    arguments: dict[str, Any] = dict(host.current_op_global_arguments or {})
    return {key: arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in arguments}
