"""The smoke test's questions once more, asked from the control machine through the ssh connection.

A port of this machine leads to the server's port on the host, for as long as the questions take:
what the operator sees from here, the way to the host included.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paramiko import ChannelException, SSHException

from edgellm.errors import ParseError
from edgellm.health import SmokeResult

if TYPE_CHECKING:
    from pyinfra.api import Host

PROBE = Path(__file__).parents[2] / "edgellm_server" / "probe.py"
OPEN_WITHIN_S = 15.0
ACCEPT_POLL_S = 0.25
PIECE_BYTES = 65536
REFUSED = 1  # RFC 4254, 5.1: "administratively prohibited"


class NotSeenError(Exception):
    """Nothing could be asked from here; the message says why. It says nothing of the server."""


def ask_from_here(
    host: Host, url: str, options: Sequence[str], *, api_key: str | None, within_s: int
) -> SmokeResult:
    """Asks the server at `url` of the host. `options`: for the probe. Raises NotSeenError."""
    client = getattr(host.connector, "client", None)
    if client is None:
        raise NotSeenError("this host is not reached by ssh")
    target = urlsplit(url)
    try:
        transport = client.get_transport()
        with forwarded(transport, (target.hostname or "", target.port or 80)) as port:
            return run_probe(port, options, api_key=api_key, within_s=within_s)
    except ChannelException as error:
        if error.code == REFUSED:
            raise NotSeenError(
                "the host's sshd forwards no ports (AllowTcpForwarding, PermitOpen)"
            ) from None
        raise NotSeenError(f"port {target.port} of the host: {error.text}") from None
    except (OSError, EOFError, SSHException, AttributeError) as error:
        # AttributeError: get_transport() is None once paramiko has noticed that the link is gone
        raise NotSeenError(f"the link was lost ({str(error) or type(error).__name__})") from None


def run_probe(
    port: int, options: Sequence[str], *, api_key: str | None, within_s: int
) -> SmokeResult:
    """The probe as a process of its own: this one has other hosts to see to. Raises NotSeenError.

    The key goes through a pipe: an argument, an environment and a file can be looked at.
    """
    command = [sys.executable, "-I", "-B", str(PROBE), "--url", f"http://127.0.0.1:{port}"]
    command += [*options, "--elsewhere"]
    with contextlib.ExitStack() as opened:
        passed: tuple[int, ...] = ()
        if api_key is not None:
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
            with os.fdopen(writer, "w") as pipe:
                pipe.write(api_key)
            command += ["--api-key-file", f"/dev/fd/{reader}"]
            passed = (reader,)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=within_s,
                pass_fds=passed,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotSeenError(f"the probe did not end within {within_s} s") from None
    lines = done.stdout.splitlines()
    try:
        return SmokeResult.parse(lines[-1] if lines else "")
    except ParseError:
        said = " ".join(done.stderr.splitlines()[-1:])[:200]
        raise NotSeenError(f"the probe said: {said or 'nothing'}") from None


@contextlib.contextmanager
def forwarded(transport: Any, target: tuple[str, int]) -> Iterator[int]:
    """A port on this machine's loopback that leads to `target`, as seen from the host.

    Raises what opening a channel raises where the host refuses it.
    """
    _open(transport, target).close()  # told now, not as a connection that breaks off
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as ways:
        listener.settimeout(ACCEPT_POLL_S)
        over = threading.Event()
        accepting = threading.Thread(
            target=_accept, args=(listener, transport, target, over, ways), daemon=True
        )
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            accepting.join()


def _open(transport: Any, target: tuple[str, int]) -> Any:
    return transport.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=OPEN_WITHIN_S)


def _accept(
    listener: socket.socket,
    transport: Any,
    target: tuple[str, int],
    over: threading.Event,
    ways: contextlib.ExitStack,
) -> None:
    while not over.is_set():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        try:
            channel = _open(transport, target)
        except (OSError, EOFError, SSHException):
            connection.close()  # which the probe sees, and names
            continue
        ways.callback(connection.close)
        ways.callback(channel.close)
        for source, sink in ((connection, channel), (channel, connection)):
            threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: Any, sink: Any) -> None:
    """One direction, until its source ends; then the sink is told so."""
    with contextlib.suppress(OSError, EOFError, SSHException):
        while piece := source.recv(PIECE_BYTES):
            sink.sendall(piece)
    with contextlib.suppress(OSError, EOFError, SSHException):
        if isinstance(sink, socket.socket):
            sink.shutdown(socket.SHUT_WR)
        else:
            sink.shutdown_write()
