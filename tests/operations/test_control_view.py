"""Asking from the control machine: a real ssh transport in this process, and a real probe."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import paramiko
import pytest

from edgellm.operations.control_view import NotSeenError, ask_from_here

KEY = "the-probes-own-key"
OPTIONS = ("--model", "m", "--n", "2", "--load-deadline-s", "5", "--max-tokens", "4")
TOKEN_EVERY_S = 0.01


class Model(BaseHTTPRequestHandler):
    """Streams four words; wants the key."""

    protocol_version = "HTTP/1.1"
    counted = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        right = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if right else 401)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        type(self).counted += 1
        for word in ("Answer", f"number{self.counted}", "is", "here") if right else ():
            time.sleep(TOKEN_EVERY_S)
            self.event({"choices": [{"index": 0, "delta": {"content": f"{word} "}}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[int]:
    """The port of a server that is, for these tests, on the host."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


class Sshd(paramiko.ServerInterface):
    """Lets anybody in, and forwards ports where it `forwards`."""

    def __init__(self, forwards: bool) -> None:
        self.forwards = forwards
        self.asked: list[tuple[str, int]] = []
        self.transport: Any = None

    def check_auth_none(self, username: str) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "none"

    def check_channel_direct_tcpip_request(self, chanid: int, origin: Any, destination: Any) -> int:
        self.asked.append(destination)
        if not self.forwards:
            return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        try:
            server = socket.create_connection(destination, timeout=5)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        threading.Thread(target=self._serve, args=(chanid, server), daemon=True).start()
        return paramiko.OPEN_SUCCEEDED

    def _serve(self, chanid: int, server: socket.socket) -> None:
        channel = None
        while channel is None or channel.get_id() != chanid:
            channel = self.transport.accept(5)
            if channel is None:
                return

        def up() -> None:
            with contextlib.suppress(OSError, EOFError):
                while piece := channel.recv(65536):
                    server.sendall(piece)
                server.shutdown(socket.SHUT_WR)

        threading.Thread(target=up, daemon=True).start()
        with contextlib.suppress(OSError, EOFError):
            while piece := server.recv(65536):
                channel.sendall(piece)
        channel.close()


@contextlib.contextmanager
def reached(sshd: Sshd) -> Iterator[Any]:
    """A host whose connector has a connection to this sshd."""
    here, there = socket.socketpair()
    server = paramiko.Transport(there)
    server.add_server_key(paramiko.RSAKey.generate(2048))
    sshd.transport = server
    started = threading.Event()
    server.start_server(event=started, server=sshd)
    client = paramiko.Transport(here)
    try:
        client.connect(username="root")
        client.auth_none("root")
        yield SimpleNamespace(
            connector=SimpleNamespace(client=SimpleNamespace(get_transport=lambda: client))
        )
    finally:
        client.close()
        server.close()


def ask(host: Any, port: int, key: str | None = KEY) -> Any:
    url = f"http://127.0.0.1:{port}"
    return ask_from_here(host, url, OPTIONS, api_key=key, within_s=30)


def test_the_servers_answers_come_through_the_ssh_connection_alone(model: int) -> None:
    sshd = Sshd(forwards=True)
    with reached(sshd) as host:
        result = ask(host, model)
    assert result.failures == ()
    assert result.n == 2
    assert result.median_ttft_ms is not None
    assert result.median_ttft_ms >= TOKEN_EVERY_S * 1000
    assert set(sshd.asked) == {("127.0.0.1", model)}
    assert len(sshd.asked) > 2
    # This machine's own load explains nothing of the host
    assert result.host is None
    assert result.host_before is None


def test_without_the_key_the_server_says_so_and_that_is_data(model: int) -> None:
    with reached(Sshd(forwards=True)) as host:
        result = ask(host, model, key=None)
    assert {failure.kind for failure in result.failures} == {"http_status"}


def test_an_sshd_that_forwards_nothing_is_named(model: int) -> None:
    with (
        reached(Sshd(forwards=False)) as host,
        pytest.raises(NotSeenError, match="AllowTcpForwarding"),
    ):
        ask(host, model)


def test_a_port_that_nobody_listens_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with reached(Sshd(forwards=True)) as host, pytest.raises(NotSeenError, match=f"port {port}"):
        ask(host, port)


def test_a_link_that_is_gone_is_named(model: int) -> None:
    gone = SimpleNamespace(client=SimpleNamespace(get_transport=lambda: None))
    with pytest.raises(NotSeenError, match="the link was lost"):
        ask(SimpleNamespace(connector=gone), model)


def test_a_host_without_ssh_is_named(model: int) -> None:
    with pytest.raises(NotSeenError, match="not reached by ssh"):
        ask(SimpleNamespace(connector=SimpleNamespace()), model)
