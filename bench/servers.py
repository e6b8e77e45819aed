"""Both servers as processes of this machine, each ended by its own process id, come what may."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.weights import Weights
from edgellm_server.probe import Options, ProbeError, wait_until_ready

REPO = Path(__file__).parents[1]
END_DEADLINE_S = 15.0
LOG_DEADLINE_S = 5.0


class ServerError(Exception):
    """A server did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    name: str
    model: str
    port: int
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self, deadline_s: float) -> float:
        """-> milliseconds waited. Raises ServerError."""
        try:
            return wait_until_ready(
                Options(url=self.url, model=self.model, load_deadline_s=deadline_s)
            )
        except ProbeError as error:
            tail = self.log_path.read_text(errors="replace").splitlines()[-5:]
            raise ServerError(f"{self.name}: {error.detail}\n" + "\n".join(tail)) from error

    def request_lines(self) -> dict[str, dict[str, Any]]:
        """Our server's structured lines of requests, by id; {} for another server."""
        lines = {}
        for text in self.log_path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(text)
                if event["event"] == "request":
                    lines[event["id"]] = event
        return lines

    def request_line(self, request_id: str | None) -> dict[str, Any]:
        """One request's line; it is written just after the answer's last byte. {} if none comes."""
        until = time.monotonic() + LOG_DEADLINE_S
        while request_id is not None and time.monotonic() < until:
            if (line := self.request_lines().get(request_id)) is not None:
                return line
            time.sleep(0.02)
        return {}


def our_command(prefix: Sequence[str] = ()) -> list[str]:
    return [*prefix, sys.executable, "-s", "-B", "-m", "edgellm_server"]


def our_environ(environ: Mapping[str, str], port: int) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not _is_tuning(name)}
    return own | {
        "PYTHONPATH": str(REPO),
        **environ,
        "EDGELLM_PORT": str(port),
        "EDGELLM_DRAIN_DEADLINE_S": "2",
    }


@contextlib.contextmanager
def our_server(
    name: str, weights: Weights, environ: Mapping[str, str], prefix: Sequence[str], directory: Path
) -> Iterator[Server]:
    """Started, not yet ready."""
    port = free_port()
    with running(our_command(prefix), our_environ(environ, port), directory / f"{name}.log") as (
        process,
        log_path,
    ):
        yield Server(name=name, model=weights.name, port=port, process=process, log_path=log_path)


@contextlib.contextmanager
def common_way_server(weights: Weights, venv_python: Path, directory: Path) -> Iterator[Server]:
    """`uvicorn common_way:app` with nothing set but the port. Started, not yet ready."""
    port = free_port()
    own = {name: value for name, value in os.environ.items() if not _is_tuning(name)}
    environ = own | {
        "MODEL_DIR": str(weights.path.parent),
        "GGUF_FILE": weights.path.name,
        "HF_HUB_OFFLINE": "1",  # everything is here
    }
    command = [str(venv_python.with_name("uvicorn")), "common_way:app"]
    command += ["--app-dir", str(Path(__file__).parent), "--port", str(port)]
    with running(command, environ, directory / "common_way.log") as (process, log_path):
        yield Server(
            name="common way", model=weights.name, port=port, process=process, log_path=log_path
        )


@contextlib.contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], log_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in a session of its own, as services are: Ctrl-C reaches us, and we end it."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process, log_path
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, then SIGKILL; returns when it is gone."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except BaseException:  # Ctrl-C once more
            process.kill()
            process.wait()
            raise


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _is_tuning(name: str) -> bool:
    """What a developer's shell may have set, and would tell on the figures."""
    return name.startswith(("EDGELLM_", "OMP_", "MKL_", "GGML_", "LLAMA_", "UVICORN_", "TORCH_"))
