"""Operations whose faults fail their own host and no other.

pyinfra ends the whole run on an exception that an operation's generator raises while it executes,
and on those (EOFError of a dropped ssh link) that it does not expect. Every operation of ours is
therefore made by `host_operation`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from functools import wraps
from typing import TYPE_CHECKING, Any

from paramiko import SSHException
from pyinfra import host as current_host
from pyinfra import logger
from pyinfra import state as pyinfra_state
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, ConnectorArguments
from pyinfra.api.arguments_typed import PyinfraOperation
from pyinfra.api.exceptions import PyinfraError
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host
from typing_extensions import ParamSpec

from edgellm import recorder
from edgellm.errors import EdgellmError
from edgellm.facts import reading

if TYPE_CHECKING:
    from pyinfra.api import Host, State

P = ParamSpec("P")

LINK_FAULTS = (EOFError, OSError, SSHException)
SUDO_PASSWORD_VARIABLE = "EDGELLM_SUDO_PASSWORD"  # read by inventories/factory.py


def host_operation() -> Callable[[Callable[P, Generator[Any]]], PyinfraOperation[P]]:
    """`pyinfra.api.operation`, contained. Its commands end what was read of the host before."""

    def decorate(function: Callable[P, Generator[Any]]) -> PyinfraOperation[P]:
        @wraps(function)
        def contained(*args: P.args, **kwargs: P.kwargs) -> Generator[Any]:
            try:
                for command in function(*args, **kwargs):
                    if pyinfra_state.is_executing:  # else only whether there is one is looked at
                        reading.forget(ctx_host.get())
                    yield _contained(command)
            except Exception as error:
                yield FunctionCommand(fail, (as_edgellm_error(error),), {})

        return operation()(contained)

    return decorate


class ContainedCommand(StringCommand):
    """Fails its host alone where the link ends just before it: pyinfra ends the run for all."""

    def execute(
        self, state: State, host: Host, connector_arguments: ConnectorArguments
    ) -> tuple[bool, CommandOutput]:
        try:
            done: tuple[bool, CommandOutput] = super().execute(state, host, connector_arguments)
        except LINK_FAULTS as error:
            return fail(state, host, as_edgellm_error(error)), CommandOutput([])
        return done


def _contained(command: Any) -> Any:
    if isinstance(command, str):
        return ContainedCommand(command.strip())
    if type(command) is StringCommand:
        return ContainedCommand(
            *command.bits, _separator=command.separator, **command.connector_arguments
        )
    return command


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
    except Exception as error:
        return fail(state, host, as_edgellm_error(error))
    return True


def as_edgellm_error(error: Exception) -> EdgellmError:
    """Any exception as the one kind that names what to do. Tracebacks go to --debug only."""
    if isinstance(error, EdgellmError):
        return error
    logger.debug("contained: %s", "".join(traceback.format_exception(error)))
    have = str(error) or type(error).__name__
    if isinstance(error, EOFError):
        # Also how pyinfra's question for a sudo password ends where nobody is there to type it
        return EdgellmError(
            host=current_host.name,
            what="the connection",
            want="a working ssh session, and sudo where the login is not root",
            have=str(error)
            or "it ended, or sudo asked for a password that was not given or not right",
            fix=f"check `ssh {current_host.name} sudo true`; where sudo asks for a password, "
            f"export the right one as {SUDO_PASSWORD_VARIABLE}",
        )
    if isinstance(error, LINK_FAULTS):
        return EdgellmError(
            host=current_host.name,
            what="the connection",
            want="a working ssh session",
            have=have,
            fix="check the host's network and power, then run again with "
            f"--limit {current_host.name}",
        )
    if isinstance(error, PyinfraError):
        return EdgellmError(
            host=current_host.name,
            what="pyinfra",
            want="the operation carried out",
            have=have,
            fix=f"see the lines above, then run again with --limit {current_host.name}",
        )
    return EdgellmError(
        host=current_host.name,
        what="edgellm itself",
        want="no fault of its own",
        have=f"{type(error).__name__}: {have}",
        fix="report it, with the output of the same run with --debug; other hosts go on",
    )


def connector_arguments(host: Host) -> dict[str, Any]:
    """How the operation at hand runs commands on its host: sudo, its password, and the like."""
    arguments: dict[str, Any] = dict(host.current_op_global_arguments or {})
    return {key: arguments[key] for key in CONNECTOR_ARGUMENT_KEYS if key in arguments}
