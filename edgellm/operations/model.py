"""The model file on a host."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import FunctionCommand

from edgellm.facts.paths import ArtifactsWhole
from edgellm.facts.reading import read
from edgellm.operations.containment import connector_arguments, contained_call, host_operation
from edgellm.operations.transfer import Transfer, send


@host_operation()
def present(transfer: Transfer) -> Generator[FunctionCommand]:
    """The file of `transfer` is at its path, untouched since it was verified there, and unrotten.

    Else it is sent; one that was only touched is verified where it is.
    """
    whole = read(ArtifactsWhole, models={transfer.path: transfer.sha256}, runtimes={})
    if whole[transfer.path]:
        host.noop(f"{transfer.path} already verified")
        return
    yield FunctionCommand(contained_call, (send, (transfer, connector_arguments(host))), {})
