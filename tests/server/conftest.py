"""A real server with a real small model, in a process of its own, on a free loopback port."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.model import SMALL_MODEL
from edgellm.model_source import fetch_model
from edgellm.settings import Settings

REPO = Path(__file__).parents[2]

API_KEY = "correct-horse-battery-staple"
SYSTEM_PROMPT = "You are the voice of a weather station. You answer in one short sentence."
START_DEADLINE_S = 60.0
# One slot, a queue of one, no key
ONE_SLOT = {
    "EDGELLM_N_PARALLEL": "1",
    "EDGELLM_N_CTX": "2048",
    "EDGELLM_MAX_TOKENS": "400",
    "EDGELLM_MAX_QUEUE": "1",
    "EDGELLM_MAX_BODY_BYTES": "65536",
}


@pytest.fixture(scope="session")
def model_path() -> Path:
    """$EDGELLM_TEST_MODEL, else the demo's model, fetched once into the clone's cache."""
    if chosen := os.environ.get("EDGELLM_TEST_MODEL"):
        return Path(chosen)
    settings = Settings.from_host_data(SMALL_MODEL, host="tests")
    return fetch_model(settings, REPO / ".cache").path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    url: str
    port: int
    log_path: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def log_text(self) -> str:
        return self.log_path.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The structured lines of the log called `name`, oldest first."""
        lines = (line for line in self.log_text().splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for_event(
        self, name: str, fits: Callable[[dict[str, Any]], bool], deadline_s: float = 20
    ) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            for event in self.events(name):
                if fits(event):
                    return event
            time.sleep(0.02)
        raise AssertionError(f"no such {name!r} event in the log:\n{self.log_text()}")

    def wait_until_ready(self) -> None:
        until = time.monotonic() + START_DEADLINE_S
        with self.client() as client:
            while time.monotonic() < until and self.process.poll() is None:
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise AssertionError(f"the server did not become ready:\n{self.log_text()}")

    def wait_until_open(self) -> None:
        until = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < until and self.process.poll() is None:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"the port did not open:\n{self.log_text()}")

    def stop(self) -> int:
        """SIGTERM -> the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def start_server(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """start_server(EDGELLM_N_PARALLEL="2", …) -> RunningServer, which may not be ready yet."""
    started: list[RunningServer] = []

    def start(
        app: str = "edgellm_server.app:app", path: Path = REPO, **variables: str | None
    ) -> RunningServer:
        port = free_port()
        log_path = tmp_path_factory.mktemp("server") / "log"
        environ = {key: value for key, value in os.environ.items() if "EDGELLM" not in key}
        chosen = {
            "EDGELLM_MODEL_PATH": str(model_path),
            "EDGELLM_MODEL_NAME": "small",
            # One: two on two cores wait for each other whenever anything else runs here.
            "EDGELLM_N_THREADS": "1",
            "EDGELLM_DRAIN_DEADLINE_S": "1",
            "EDGELLM_APP": app,
            "EDGELLM_PORT": str(port),
        } | variables
        environ |= {key: value for key, value in chosen.items() if value is not None}
        environ["PYTHONPATH"] = f"{path}:{REPO}"
        command = [sys.executable, "-m", "edgellm_server"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        server = RunningServer(process, f"http://127.0.0.1:{port}", port, log_path)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: StartServer) -> RunningServer:
    """One slot, a queue of one, no key."""
    server = start_server(**ONE_SLOT)
    server.wait_until_ready()
    return server


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def keyed_server(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> RunningServer:
    """Two slots, a key, a system prompt."""
    directory = tmp_path_factory.mktemp("keyed")
    keys, prompt = directory / "keys", directory / "prompt"
    digest = hashlib.sha256(API_KEY.encode()).hexdigest()
    keys.write_text(f"# who may ask\n{'0' * 64}\n{digest}  # the tests\n")
    prompt.write_text(SYSTEM_PROMPT + "\n")
    server = start_server(
        EDGELLM_N_PARALLEL="2",
        EDGELLM_N_CTX="512",
        EDGELLM_API_KEYS_FILE=str(keys),
        EDGELLM_SYSTEM_PROMPT_FILE=str(prompt),
    )
    server.wait_until_ready()
    return server
