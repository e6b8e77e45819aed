"""Clients as a server in the field meets them: most stay, many leave at the worst moment.

Each request draws a manner at random. Plain sockets, as http.client knows no half-closed one.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench import prompts
from bench.servers import Server

READ_BYTES = 65536
ANSWER_DEADLINE_S = 180.0
LONG_TOKENS = (300, 900)
MAX_TOKENS = (4, 60)
# Until here the deadline of no client passes: with eight of them, some wait, some compute.
EARLY_S = 2.5

# Manner -> how often, of 100. The first three stay to the end.
MANNERS = {
    "stream": 26,
    "whole": 10,
    "slow_reader": 6,
    "leave_early": 26,  # in the queue or in prefill, whichever it is in by then
    "leave_in_decode": 18,
    "half_closed": 6,  # has sent its FIN, and goes on reading
    "half_a_body": 4,
    "silent": 3,
    "storm": 1,
}
# Of one storm: with eight clients beside it more than 8 slots and a queue of 8 take in.
STORM_CONNECTIONS = 16


class BrokenAnswerError(Exception):
    """An answer that did not end as it should for a client that stayed."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What all clients saw. `broken`: how answers broke for those who stayed."""

    manners: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, manner: str, status: str) -> None:
        with self.lock:
            self.manners[manner] += 1
            self.statuses[status] += 1

    def add_broken(self, manner: str, why: str) -> None:
        with self.lock:
            self.broken.append(f"{manner}: {why}")


class Crowd:
    """So many clients, each in a thread of its own, until told to stop; they can be held."""

    def __init__(self, server: Server, n_clients: int, seed: int) -> None:
        self.counts = Counts()
        self._server = server
        self._go = threading.Event()
        self._stop = threading.Event()
        self._idle = threading.Semaphore(0)
        self._n = n_clients
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(seed + i),), daemon=True)
            for i in range(n_clients)
        ]
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        self._go.set()

    def hold(self) -> None:
        """Returns when no client has a connection open any more."""
        self._go.clear()
        for _ in range(self._n):
            self._idle.acquire()

    def stop(self) -> None:
        """As `hold`, for good. Call while they are held, or at the very end."""
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join()

    def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            if not self._go.is_set():
                self._idle.release()
                self._go.wait()
                continue
            status = visit(self._server, rng, self.counts)
            if status == "503":
                time.sleep(rng.uniform(0.2, 1.0))  # less than Retry-After asks for


def visit(server: Server, rng: random.Random, counts: Counts) -> str:
    """One request in a manner drawn from MANNERS -> what came: a status, "left" or "nothing"."""
    manner = rng.choices(list(MANNERS), weights=list(MANNERS.values()))[0]
    status = "connection error"
    try:
        with socket.create_connection(
            ("127.0.0.1", server.port), timeout=ANSWER_DEADLINE_S
        ) as sock:
            status = _BEHAVE[manner](sock, server, rng)
    except BrokenAnswerError as error:
        counts.add_broken(manner, str(error))
        status = "broken"
    except OSError as error:
        counts.add_broken(manner, f"{type(error).__name__} {error}")
    counts.add(manner, status)
    return status


def request_bytes(server: Server, rng: random.Random, *, stream: bool, long: bool = False) -> bytes:
    nonce = f"{rng.getrandbits(48):012x}"
    max_tokens = rng.randint(*MAX_TOKENS)
    kind = rng.random()
    if long or kind < 0.2:
        chat = prompts.long_cold(nonce, rng.randint(*LONG_TOKENS), max_tokens)
    elif kind < 0.6:
        chat = prompts.cold(nonce, rng.randrange(100), max_tokens)
    else:
        chat = prompts.known_prefix(rng.randrange(100), max_tokens)
    body = json.dumps(
        {
            "model": server.model,
            "messages": list(chat.messages),
            "max_tokens": chat.max_tokens,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def parse_status(answer: bytes) -> str:
    """b'HTTP/1.1 200 OK…' -> '200'. Raises BrokenAnswerError."""
    words = answer.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise BrokenAnswerError(f"no status line: {answer[:80]!r}")
    return words[1].decode()


def checked(answer: bytes, *, stream: bool) -> str:
    """A whole answer -> its status. Raises BrokenAnswerError where a part of it is missing."""
    status = parse_status(answer)
    if status != "200":
        return status
    if b'"error"' in answer:
        raise BrokenAnswerError(f"an error in the body of a 200: {answer[-300:]!r}")
    ending = b"data: [DONE]" if stream else b'"usage"'
    if ending not in answer:
        raise BrokenAnswerError(f"200, and no {ending.decode()} in it: {answer[-100:]!r}")
    return status


def _stream(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.sendall(request_bytes(server, rng, stream=True))
    return checked(_read_all(sock), stream=True)


def _whole(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.sendall(request_bytes(server, rng, stream=False))
    return checked(_read_all(sock), stream=False)


def _slow_reader(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.sendall(request_bytes(server, rng, stream=True))
    time.sleep(rng.uniform(1, 4))
    return checked(_read_all(sock), stream=True)


def _leave_early(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.sendall(request_bytes(server, rng, stream=rng.random() < 0.8, long=rng.random() < 0.5))
    sock.settimeout(rng.uniform(0, EARLY_S))
    try:
        answer = sock.recv(READ_BYTES)
    except TimeoutError:
        answer = b""
    _leave(sock, rng)
    return parse_status(answer) if answer else "left"


def _leave_in_decode(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.sendall(request_bytes(server, rng, stream=True))
    answer, wanted = b"", rng.randint(1, 20)
    while answer.count(b"data: ") < wanted and (piece := sock.recv(READ_BYTES)):
        answer += piece
    _leave(sock, rng)
    return parse_status(answer)


def _half_closed(sock: socket.socket, server: Server, rng: random.Random) -> str:
    sock.sendall(request_bytes(server, rng, stream=True))
    sock.shutdown(socket.SHUT_WR)
    answer = _read_all(sock)
    # The server may take it for a client that has gone; then nothing more comes, which is fair.
    return parse_status(answer) if answer else "nothing"


def _half_a_body(sock: socket.socket, server: Server, rng: random.Random) -> str:
    request = request_bytes(server, rng, stream=True)
    sock.sendall(request[: len(request) - rng.randint(1, 200)])
    time.sleep(rng.uniform(0, 1))
    _leave(sock, rng)
    return "left"


def _silent(sock: socket.socket, server: Server, rng: random.Random) -> str:
    time.sleep(rng.uniform(0, 2))
    _leave(sock, rng)
    return "left"


def _storm(sock: socket.socket, server: Server, rng: random.Random) -> str:
    """Fills slots and queue at once, takes what comes in a second or two, and leaves everywhere."""
    came = set()
    with contextlib.ExitStack() as opened:
        socks = [sock]
        for _ in range(STORM_CONNECTIONS - 1):
            address = ("127.0.0.1", server.port)
            socks.append(opened.enter_context(socket.create_connection(address, timeout=30)))
        for each in socks:
            each.sendall(request_bytes(server, rng, stream=True))
        until = time.monotonic() + rng.uniform(0.5, 2)
        for each in socks:
            each.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                came.add(parse_status(each.recv(READ_BYTES)))
        for each in socks:
            _leave(each, rng)
    if unfit := [s for s in came if s.startswith("5") and s != "503"]:
        return unfit[0]
    return "503" if "503" in came else "left"


_BEHAVE: dict[str, Callable[[socket.socket, Server, random.Random], str]] = {
    "stream": _stream,
    "whole": _whole,
    "slow_reader": _slow_reader,
    "leave_early": _leave_early,
    "leave_in_decode": _leave_in_decode,
    "half_closed": _half_closed,
    "half_a_body": _half_a_body,
    "silent": _silent,
    "storm": _storm,
}


def _read_all(sock: socket.socket) -> bytes:
    pieces = []
    while piece := sock.recv(READ_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _leave(sock: socket.socket, rng: random.Random) -> None:
    """By FIN as a closed tab does, or by RST as a lost process or a NAT does."""
    if rng.random() < 0.5:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def faults(counts: Counts) -> Sequence[str]:
    """Every 5xx but 503, and everything that broke for a client that stayed."""
    bad = [
        f"status {status}: {n} times"
        for status, n in sorted(counts.statuses.items())
        if status.startswith("5") and status != "503"
    ]
    return [*bad, *counts.broken]
