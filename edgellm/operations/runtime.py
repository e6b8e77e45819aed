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
    yield FunctionCommand(
        contained_call, (place, (transfer, directory, runtime_id, connector_arguments(host))), {}
    )


def place(
    state: State,
    host: Host,
    transfer: Transfer,
    directory: str,
    runtime_id: str,
    arguments: dict[str, Any],
) -> None:
    """Sends it, unpacks it and runs it once. Raises EdgellmError.

    Where only the host's Python was updated it is there already, and is run once more.
    """
    job: dict[str, Any] = {"archive": None, "directory": directory, "id": runtime_id}
    if run_once(host, job, arguments):
        return
    send(state, host, transfer, arguments)
    if not run_once(host, {**job, "archive": transfer.path}, arguments):
        raise _unable(host, runtime_id, {"error": f"{transfer.path} was not unpacked"})


def run_once(host: Host, job: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """unpack_runtime's `job`; False where there is nothing to run yet. Raises EdgellmError."""
    _, output = host.run_shell_command(
        script_command("unpack_runtime", job), **{**arguments, "_timeout": UNPACK_WITHIN_S}
    )
    answer = json_answer(output.stdout_lines)
    if answer is None:
        answer = {"kind": "os", "error": " ".join(output.stderr_lines)[:400]}
    if answer.get("ok") is not True and answer.get("kind") != "bytes":
        raise _unable(host, job["id"], answer)
    return answer.get("ok") is True


def _unable(host: Host, runtime_id: str, answer: dict[str, Any]) -> EdgellmError:
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
    return EdgellmError(
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
