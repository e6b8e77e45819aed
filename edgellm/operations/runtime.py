"""The server's Python runtime on a host: sent, unpacked, run once, and only then named."""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from pyinfra import host
from pyinfra.api import FunctionCommand

from edgellm.errors import EdgellmError
from edgellm.facts.paths import ArtifactsWhole
from edgellm.facts.reading import read
from edgellm.operations.containment import connector_arguments, contained_call, host_operation
from edgellm.operations.transfer import Transfer, send
from edgellm.remote import json_answer, script_command

if TYPE_CHECKING:
    from pyinfra.api import Host, State

# Unpacking 110 MB and importing the engine: 20 s on a slow SD card, more on an emulated board.
UNPACK_WITHIN_S = 600


@host_operation()
def present(transfer: Transfer, directory: str, runtime_id: str) -> Generator[FunctionCommand]:
    """The runtime `runtime_id` is unpacked in `directory` and has run there once."""
    whole = read(ArtifactsWhole, models={}, runtimes={directory: runtime_id})
    if whole[directory]:
        host.noop(f"{directory} already complete")
        return
    arguments = connector_arguments(host)
    yield FunctionCommand(contained_call, (send, (transfer, arguments)), {})
    yield FunctionCommand(
        contained_call, (unpack, (transfer.path, directory, runtime_id, arguments)), {}
    )


def unpack(
    state: State,
    host: Host,
    archive: str,
    directory: str,
    runtime_id: str,
    arguments: dict[str, Any],
) -> None:
    """Unpacks beside the directory, runs the self check, renames. Raises EdgellmError."""
    job = {"archive": archive, "directory": directory, "id": runtime_id}
    _, output = host.run_shell_command(
        script_command("unpack_runtime", job), **{**arguments, "_timeout": UNPACK_WITHIN_S}
    )
    answer = json_answer(output.stdout_lines)
    if answer is None:
        answer = {"kind": "os", "error": " ".join(output.stderr_lines)[:400]}
    if answer.get("ok") is True:
        return
    kind = answer.get("kind")
    if kind == "signal":
        name = _signal_name(answer["signal"])
        have = f"it died of {name}"
        fix = (
            "this CPU lacks instructions that the build needs: leave the host out"
            if name == "SIGILL"
            else "run it by hand on the host: python3 -m edgellm_server.selfcheck"
        )
    else:
        have = str(answer.get("error") or "no answer")
        fix = (
            "install the library it names (libgomp1, libstdc++6), "
            "or set install_packages=True where that was switched off"
            if kind == "selfcheck"
            else "free space and permissions under /opt/edgellm, then run again"
        )
    raise EdgellmError(
        host=host.name,
        what=f"runtime {runtime_id}",
        want="a self check that passes on this host before anything uses the runtime",
        have=have,
        fix=fix,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
