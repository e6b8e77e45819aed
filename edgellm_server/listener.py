"""The listening socket: systemd's where it passes one (LISTEN_FDS, sd_listen_fds(3)), else our own.

systemd's stays open while the service restarts: who connects meanwhile waits in its backlog and is
answered by the next process, instead of being refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Final

FIRST_PASSED_FD: Final = 3  # SD_LISTEN_FDS_START
BACKLOG: Final = 256
# A peer that does not acknowledge, or does not read, for this long is gone. The kernel watches it:
# uvicorn has no deadline for what it writes.
UNREAD_DEADLINE_S: Final = 60
KEEPALIVE_IDLE_S: Final = 60


class ListenerError(Exception):
    """There is no socket to serve on. One sentence, with what to do."""


def listening_socket(environ: MutableMapping[str, str], host: str, port: int) -> socket.socket:
    """A socket that listens. Takes LISTEN_* out of `environ`: they are not for children.

    Raises ListenerError.
    """
    sock = _passed(environ) or _bound(host, port)
    sock.setblocking(False)
    # Accepted connections inherit these. A unix socket, which systemd may pass too, has none.
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_DEADLINE_S * 1000)
    return sock


def _passed(environ: MutableMapping[str, str]) -> socket.socket | None:
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    environ.pop("LISTEN_FDNAMES", None)
    if not count or pid != str(os.getpid()):
        return None
    if count != "1":
        raise ListenerError(f"LISTEN_FDS: want 1 socket from systemd, have {count}")
    try:
        sock = socket.socket(fileno=FIRST_PASSED_FD)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenerError(f"LISTEN_FDS: want a listening socket, have: {error}") from None
    if not listens:
        raise ListenerError("LISTEN_FDS: want a listening socket (Accept=no), have a connection")
    os.set_inheritable(sock.fileno(), False)
    return sock


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenerError(f"EDGELLM_HOST: want an IP address, have {host!r} ({error})") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" is IPv4 too, as it is for the sockets that systemd makes.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenerError(
            f"want to listen on {host} port {port}, have: {error.strerror}"
        ) from None
    return sock
