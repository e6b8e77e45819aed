"""The fleet's only doors: ports of the machine's own 127.0.0.1, forwarded into the fleet.

One process per fleet. It listens in the machine's network namespace, and opens each outgoing
connection in the namespace that the route names. Network namespaces outlive reboots of their
hosts, and are entered anew for each connection, so there is nothing to set up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo import syscalls
from demo.container import join_cgroup
from demo.processes import daemonise, replace_text

# Over a bridge on the same machine a connection takes under 1 ms. With the link cut nothing
# answers at all, and the client deserves to hear so soon.
CONNECT_TIMEOUT_S = 3.0
# Models of hundreds of MB go through here: few, large reads.
CHUNK_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True)
class Route:
    """127.0.0.1:`listen_port` here -> `address`:`port` in the network namespace at this path."""

    listen_port: int
    network_namespace: str
    address: str
    port: int


def write_routes(path: Path, routes: Sequence[Route]) -> None:
    replace_text(path, json.dumps([dataclasses.asdict(route) for route in routes], indent=1))


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(256)
    listener.setblocking(False)
    return listener


def _socket_inside(network_namespace: str) -> socket.socket:
    """A socket belongs for life to the namespace in which its thread was when it was made."""
    syscalls.enter_network_namespace(network_namespace)
    return socket.socket()


class Forwarder:
    def __init__(self) -> None:
        # setns moves a thread; this one wanders from namespace to namespace, the others stay
        self._wanderer = ThreadPoolExecutor(max_workers=1)
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, listeners: Sequence[tuple[socket.socket, Route]]) -> None:
        await asyncio.gather(*(self._accept(listener, route) for listener, route in listeners))

    async def _accept(self, listener: socket.socket, route: Route) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # out of file descriptors, or the client is gone again
                await asyncio.sleep(0.05)
                continue
            task = asyncio.create_task(self._carry(client, route))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _carry(self, client: socket.socket, route: Route) -> None:
        loop = asyncio.get_running_loop()
        client.setblocking(False)
        with client:
            try:
                host = await loop.run_in_executor(
                    self._wanderer, _socket_inside, route.network_namespace
                )
            except OSError as error:
                print(f"{route}: {error}", file=sys.stderr, flush=True)
                _reset_on_close(client)
                return
            with host:
                host.setblocking(False)
                try:
                    target = (route.address, route.port)
                    await asyncio.wait_for(loop.sock_connect(host, target), CONNECT_TIMEOUT_S)
                except (OSError, asyncio.TimeoutError):
                    _reset_on_close(client)
                    return
                for end in (client, host):
                    # single tokens must not wait for each other
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.gather(_pump(client, host), _pump(host, client))


def _reset_on_close(client: socket.socket) -> None:
    """close() then sends RST: 'connection reset', which no client takes for an empty answer."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copies until `source` ends, then ends `sink`'s direction only: the other may still talk."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    try:
        while count_bytes := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(sink, view[:count_bytes])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # broken in one direction is broken in both: wake the other pump
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def main(routes_path: Path, record_path: Path, cgroup: str) -> None:
    """Binds all ports (exit 1 when one is taken), then carries on as a daemon."""
    join_cgroup(cgroup)
    routes = [Route(**fields) for fields in json.loads(routes_path.read_text())]
    listeners = [(_listen(route.listen_port), route) for route in routes]
    daemonise(record_path)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asyncio.run(Forwarder().serve(listeners))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("this is a part of demo/fleet.py; run: sudo python3 demo/fleet.py up")
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
