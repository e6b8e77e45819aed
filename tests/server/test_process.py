"""The process around the app: systemd's socket, readiness, watchdog, draining, an operator's app.

systemd's side of each protocol is played here, by its documentation; tests/e2e has the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from .conftest import REPO, RunningServer, StartServer

STREAM = {"messages": [{"role": "user", "content": "Write a long story."}], "stream": True}
# Sets LISTEN_PID as systemd does: in the child, before exec.
AS_SYSTEMD = (
    "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid()); "
    "os.execv(sys.executable, [sys.executable, '-m', 'edgellm_server'])"
)


class Manager:
    """The end of sd_notify that systemd holds."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(0.05)
        self.told: list[str] = []

    def wait_for(self, assignment: str, deadline_s: float = 30) -> None:
        until = time.monotonic() + deadline_s
        while assignment not in self.told:
            assert time.monotonic() < until, f"no {assignment} among {self.told}"
            try:
                self.told += self._socket.recv(4096).decode().splitlines()
            except TimeoutError:
                continue

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.close()


@dataclass
class Activated:
    """A service on a socket that outlives it, as a socket unit's does."""

    listener: socket.socket
    environ: dict[str, str]
    log_path: Path
    started: list[RunningServer] = field(default_factory=list)

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def start(self) -> RunningServer:
        def pass_socket() -> None:
            os.dup2(self.listener.fileno(), 3)

        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", AS_SYSTEMD],
                env=self.environ | {"LISTEN_FDS": "1"},
                stdout=log,
                stderr=log,
                pass_fds=(3,) if self.listener.fileno() == 3 else (),
                close_fds=False,
                preexec_fn=pass_socket,
            )
        server = RunningServer(process, f"http://127.0.0.1:{self.port}", self.port, self.log_path)
        self.started.append(server)
        return server


@pytest.fixture
def activated(model_path: Path, tmp_path: Path) -> Iterator[Activated]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    environ = {key: value for key, value in os.environ.items() if "EDGELLM" not in key}
    environ |= {
        "EDGELLM_MODEL_PATH": str(model_path),
        "EDGELLM_MODEL_NAME": "small",
        "EDGELLM_N_THREADS": "1",
        "EDGELLM_N_PARALLEL": "2",
        "EDGELLM_MAX_TOKENS": "60",
        "EDGELLM_DRAIN_DEADLINE_S": "30",
        "PYTHONPATH": str(REPO),
    }
    activated = Activated(listener, environ, tmp_path / "log")
    yield activated
    for server in activated.started:  # those that a failed test has left
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
    listener.close()


def test_a_restart_on_systemds_socket_drops_no_request(activated: Activated) -> None:
    """Clients keep asking, each on a new connection, over two restarts under load."""
    server = activated.start()
    server.wait_until_ready()
    faults: list[str] = []
    answered = 0
    over = threading.Event()

    def keep_asking(stream: bool) -> None:
        nonlocal answered
        body = {"messages": [{"role": "user", "content": "Count to ten."}], "stream": stream}
        while not over.is_set():
            try:
                with server.client() as client:
                    response = client.post("/v1/chat/completions", json=body)
            except httpx.HTTPError as error:
                faults.append(repr(error))
                return
            if response.status_code != 200:
                faults.append(f"{response.status_code}: {response.text}")
            elif stream and not response.text.endswith("data: [DONE]\n\n"):
                faults.append(f"cut short: {response.text[-200:]}")
            else:
                answered += 1

    threads = [threading.Thread(target=keep_asking, args=(n % 2 == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            time.sleep(1)
            server.stop()
            server = activated.start()
            server.wait_until_ready()
        time.sleep(1)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        server.stop()
    assert faults == []
    assert answered >= 8


def test_sigterm_lets_running_streams_finish_and_ends_the_process(activated: Activated) -> None:
    server = activated.start()
    server.wait_until_ready()
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=STREAM) as r:
        lines = r.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert server.process.wait(20) in (0, -signal.SIGTERM)
    (line,) = server.events("request")
    assert line["finish_reason"] in ("stop", "length")


def test_a_drain_that_takes_too_long_is_cut_at_its_deadline(activated: Activated) -> None:
    activated.environ |= {"EDGELLM_DRAIN_DEADLINE_S": "1", "EDGELLM_MAX_TOKENS": "2000"}
    server = activated.start()
    server.wait_until_ready()
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=STREAM) as r:
        lines = r.iter_lines()
        next(lines)
        began = time.monotonic()
        server.stop()
        assert 0.5 < time.monotonic() - began < 10


def test_ready_is_told_after_a_real_token_and_signs_of_life_follow(
    start_server: StartServer, manager: Manager
) -> None:
    server = start_server(NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="600000")
    manager.wait_for("READY=1")
    with server.client() as client:
        assert client.get("/health/ready").status_code == 200
    manager.wait_for("WATCHDOG=1")
    server.process.send_signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")


def test_a_failed_load_tells_why_and_never_ready(
    start_server: StartServer, manager: Manager, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"<html>")
    server = start_server(NOTIFY_SOCKET=str(manager.path), EDGELLM_MODEL_PATH=str(broken))
    assert server.process.wait(30) == 70
    with pytest.raises(AssertionError):
        manager.wait_for("READY=1", deadline_s=0.5)
    assert any(line.startswith("STATUS=failed: ") and "GGUF" in line for line in manager.told)


HANGING_APP = """
import threading
import edgellm_server.app
from edgellm_server.app import app

class Hanging(edgellm_server.app.LlamaEngine):
    def _run(self, body, reader, handle):
        if "hang" in str(body.get("messages")):
            threading.Event().wait()
        super()._run(body, reader, handle)

edgellm_server.app.LlamaEngine = Hanging
"""


def test_an_engine_that_hangs_ends_the_process(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING_APP)
    server = start_server(
        app="hanging:app", path=tmp_path, EDGELLM_ENGINE_STALL_S="2", WATCHDOG_USEC="900000"
    )
    server.wait_until_ready()
    body = {"messages": [{"role": "user", "content": "hang"}]}
    with server.client() as client, pytest.raises(httpx.HTTPError):
        client.post("/v1/chat/completions", json=body)
    assert server.process.wait(20) == 70
    (hung,) = server.events("hung")
    assert "the engine made no progress" in hung["why"]


def test_an_idle_engine_is_not_taken_for_a_hung_one(start_server: StartServer) -> None:
    server = start_server(EDGELLM_ENGINE_STALL_S="1", WATCHDOG_USEC="300000")
    server.wait_until_ready()
    time.sleep(3)
    assert server.process.poll() is None
    with server.client() as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert server.events("hung") == []


BLOCKED_APP = """
import time

async def app(scope, receive, send):
    assert scope["type"] == "http"
    if scope["path"] == "/block":
        time.sleep(60)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"mine"})
"""


def test_an_operators_own_app_is_served_ready_and_watched(
    start_server: StartServer, manager: Manager, tmp_path: Path
) -> None:
    """One that has no lifespan and knows nothing of systemd."""
    (tmp_path / "mine.py").write_text(BLOCKED_APP)
    server = start_server(
        app="mine:app", path=tmp_path, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="300000"
    )
    manager.wait_for("READY=1")
    with server.client() as client:
        assert client.get("/").text == "mine"
    manager.wait_for("WATCHDOG=1")
    assert server.stop() in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"EDGELLM_PORT": "http"}, "EDGELLM_PORT: want a whole number from 1 to 65535"),
        ({"EDGELLM_HOST": "no such host"}, "EDGELLM_HOST: want an IP address"),
        ({"EDGELLM_APP": "no_such_module:app"}, "EDGELLM_APP: want an ASGI app"),
        ({"EDGELLM_WORKERS": "0"}, "EDGELLM_WORKERS: want a whole number from 1 to 64"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_code_78(variables: dict[str, str], told: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(REPO)} | variables
    done = subprocess.run(
        [sys.executable, "-m", "edgellm_server"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith("edgellm_server: ")
    assert told in line


def test_a_taken_port_is_told(start_server: StartServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "edgellm_server"],
            env=os.environ | {"PYTHONPATH": str(REPO), "EDGELLM_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 78
    assert f"port {port}, have: Address already in use" in done.stderr


def test_a_token_stream_is_not_held_back_by_nagle(activated: Activated) -> None:
    """Of every accepted connection the kernel says that TCP_NODELAY is set."""
    server = activated.start()
    server.wait_until_ready()
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=STREAM) as r:
        lines = r.iter_lines()  # kept: dropped, it would close the connection
        next(lines)
        seen = list(_nodelay_of_connections(server.process.pid))
    server.stop()
    assert seen
    assert all(seen)


def _nodelay_of_connections(pid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=_pidfd_getfd(pidfd, int(name))) as sock:
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if sock.family == socket.AF_INET and not listens:
                    yield sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    os.close(pidfd)


def _pidfd_getfd(pidfd: int, descriptor: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    found = libc.syscall(438, pidfd, descriptor, 0)  # pidfd_getfd(2), on x86-64 and aarch64
    assert found >= 0, os.strerror(ctypes.get_errno())
    return int(found)


def test_two_workers_report_themselves_in_the_metrics_of_either(
    start_server: StartServer, tmp_path: Path
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    places = f"{cpus[0]}/{cpus[-1]}"
    server = start_server(
        EDGELLM_WORKERS="2", EDGELLM_WORKER_CPUS=places, RUNTIME_DIRECTORY=str(tmp_path)
    )
    server.wait_until_ready()
    until = time.monotonic() + 20
    with server.client() as client:
        while time.monotonic() < until:
            text = client.get("/metrics").text
            if all(f'edgellm_ready{{worker="{n}"}} 1.0' in text for n in (0, 1)):
                break
            time.sleep(0.2)
    assert 'edgellm_ready{worker="0"} 1.0' in text
    assert 'edgellm_ready{worker="1"} 1.0' in text
