"""sd_notify(3): tells systemd when the service is ready, what it does, and that it lives."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """notify("READY=1", "STATUS=…"). Without effect where no systemd listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or address[0] not in "/@":
        return
    if address[0] == "@":  # an abstract socket
        address = "\0" + address[1:]
    # What cannot be told is no reason to stop serving: systemd then acts on its own deadline.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
    ):
        sock.connect(address)
        sock.sendall("\n".join(assignments).encode())


def watchdog_interval_s() -> float | None:
    """A third of what systemd allows between two signs of life; None where it asks for none."""
    try:
        allowed_us = int(os.environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return allowed_us / 3e6 if allowed_us > 0 else None
