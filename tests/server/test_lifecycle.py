"""Start, readiness, failure and end of a server process; and which sockets it listens on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import pytest

from edgellm_server.config import ConfigError, ServerConfig
from edgellm_server.selfcheck import missing_cpu_flags

from .conftest import REPO, RunningServer, StartServer

MINIMAL = {
    "EDGELLM_MODEL_PATH": "/models/m.gguf",
    "EDGELLM_MODEL_NAME": "m",
    "EDGELLM_N_THREADS": "3",
}


def test_health_is_503_while_loading_and_says_why_a_load_failed(
    start_server: StartServer, tmp_path: Path
) -> None:
    """The model is a pipe: loading lasts until something is written into it."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    server = start_server(EDGELLM_MODEL_PATH=str(pipe), EDGELLM_MAX_QUEUE="0")
    server.wait_until_open()
    with server.client() as client:
        loading = client.get("/health")
        assert loading.status_code == 503
        assert loading.json() == {"state": "loading"}
        assert client.get("/health/ready").status_code == 503
        assert client.get("/health/live").status_code == 200
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        with ThreadPoolExecutor(2) as pool:
            # The one waits for the model, as it would for a slot; one more than may wait does not.
            early = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(2)]
            refused = next(as_completed(early)).result()
            assert refused.status_code == 503
            assert "as many requests wait as may" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert sum(request.done() for request in early) == 1
            pipe.write_bytes(b"<!DOCTYPE html>")
            assert {request.result().status_code for request in early} == {503}
        server.wait_for_event("failed", lambda _: True)
        failed = client.get("/health")
        assert failed.status_code == 503
        assert failed.json()["state"] == "failed"
        assert "want a GGUF model" in failed.json()["why"]
        assert "<!DO" in failed.json()["why"]
    assert server.process.wait(20) == 70
    assert "Traceback" not in server.log_text()


def test_a_server_told_to_stop_while_it_loads_stops(
    start_server: StartServer, tmp_path: Path
) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    server = start_server(EDGELLM_MODEL_PATH=str(pipe))
    server.wait_until_open()
    assert server.stop() == 0


def test_a_broken_model_ends_the_process_so_that_systemd_restarts_it(
    start_server: StartServer, model_path: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    with model_path.open("rb") as file:
        broken.write_bytes(file.read(1_000_000))
    server = start_server(EDGELLM_MODEL_PATH=str(broken))
    assert server.process.wait(30) == 70
    (failed,) = server.events("failed")
    assert str(broken) in failed["why"]


BREAKING_APP = """
import edgellm_server.app
from edgellm_server.app import app

class Breaking(edgellm_server.app.LlamaEngine):
    async def load(self):
        await super().load()
        self.whole, self._server = self._server, self

    def handle_chat_completions(self, body, reader):
        if str(body["messages"]).count({fault!r}):
            raise RuntimeError("ggml: out of memory")
        self.whole.handle_chat_completions(body, reader)

    def handle_completions(self, body, reader):
        self.whole.handle_completions(body, reader)

    async def stop(self):
        self._server = self.whole
        del self.whole
        await super().stop()

edgellm_server.app.LlamaEngine = Breaking
"""


def test_an_engine_that_dies_ends_the_process_after_one_clear_line(
    start_server: StartServer, tmp_path: Path
) -> None:
    """The real engine, made to raise from now on: llama.cpp gives no way to break it."""
    (tmp_path / "breaking.py").write_text(BREAKING_APP.format(fault=""))
    server = start_server(app="breaking:app", path=tmp_path)
    server.wait_until_ready()
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with server.client() as client:
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "ggml" not in response.text
        server.wait_for_event("failed", lambda _: True)
        assert client.get("/health").json()["state"] == "failed"
    assert server.process.wait(20) == 70
    (failed,) = server.events("failed")
    assert "the engine died" in failed["why"]
    assert "ggml: out of memory" in failed["why"]


def test_one_broken_answer_of_a_sound_engine_does_not_end_the_process(
    start_server: StartServer, tmp_path: Path
) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING_APP.format(fault="unlucky"))
    server = start_server(app="breaking:app", path=tmp_path)
    server.wait_until_ready()
    with server.client() as client:
        for text, status in (("unlucky", 500), ("Hi", 200), ("unlucky", 500), ("Hi", 200)):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).status_code == status
        assert client.get("/health").status_code == 200
    assert server.events("failed") == []
    assert server.stop() in (0, -15)


def test_ready_comes_after_a_real_token(server: RunningServer) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"state": "ready", "model": "small"}
        assert client.get("/health/ready").status_code == 200
        assert client.get("/health/live").json() == {"state": "alive"}
    assert server.events("ready")[0]["load_ms"] > 0


def test_a_running_answer_does_not_keep_the_process_from_stopping(
    start_server: StartServer,
) -> None:
    server = start_server(EDGELLM_MAX_TOKENS="2000", EDGELLM_N_CTX="2048")
    server.wait_until_ready()
    body = {"messages": [{"role": "user", "content": "Write a very long story."}], "stream": True}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as r:
        reading = r.iter_raw()
        next(reading)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 6
    (cut_short,) = server.events("request")
    assert cut_short["completion_tokens"] < 2000
    assert cut_short["finish_reason"] is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"EDGELLM_N_THREADS": None}, ["EDGELLM_N_THREADS: want a whole number", "have nothing"]),
        (
            {"EDGELLM_N_CTX": "lots", "EDGELLM_MLOCK": "yes", "EDGELLM_MODEL_NAME": ""},
            ["EDGELLM_N_CTX", "'lots'", "EDGELLM_MLOCK: want 0 or 1, have 'yes'", "MODEL_NAME"],
        ),
        ({"EDGELLM_API_KEYS_FILE": "/nonexistent/keys"}, ["EDGELLM_API_KEYS_FILE", "No such file"]),
    ],
)
def test_a_wrong_environment_ends_the_process_with_one_line(
    start_server: StartServer, variables: dict[str, str | None], told: list[str]
) -> None:
    server = start_server(**variables)
    assert server.process.wait(30) == 78
    ours = [line for line in server.log_text().splitlines() if not line.startswith("INFO:")]
    assert len(ours) == 1
    assert ours[0].startswith("edgellm_server: ")
    for part in told:
        assert part in ours[0]


def test_a_minimal_environment_makes_a_config_with_defaults() -> None:
    config = ServerConfig.from_environ(MINIMAL)
    assert config.n_threads == config.n_threads_batch == 3
    assert config.n_batch == 64
    assert config.cache_ram_mib == 0
    assert config.max_body_bytes == 1024 * 1024
    assert config.mlock is False
    assert config.system_prompt is None
    assert config.api_key_hashes is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "at least one key hash"),
        ("# none yet\n", "at least one key hash"),
        ("a-plain-key\n", "in line 1"),
        (f"{'A' * 64}\n", "in line 1"),
    ],
)
def test_a_keys_file_without_sound_hashes_is_refused_and_not_quoted(
    tmp_path: Path, text: str, told: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_environ(MINIMAL | {"EDGELLM_API_KEYS_FILE": str(keys)})
    assert told in str(caught.value)
    assert "a-plain-key" not in str(caught.value)


def test_an_answer_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="EDGELLM_MAX_TOKENS: want fewer than EDGELLM_N_CTX"):
        ServerConfig.from_environ(MINIMAL | {"EDGELLM_MAX_TOKENS": "2048", "EDGELLM_N_CTX": "2048"})


def _inodes_of(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def _listening_tcp_ports(pid: int) -> set[int]:
    inodes, ports = _inodes_of(pid), set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_the_process_listens_on_its_own_port_and_no_other(keyed_server: RunningServer) -> None:
    """llama.cpp's own listener is in this process: it must not be reachable without a key."""
    ports = _listening_tcp_ports(keyed_server.process.pid)
    for port in ports:
        response = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)
        assert response.status_code == 401
    assert ports == {keyed_server.port}


def test_no_path_leads_to_a_unix_socket_of_the_process(keyed_server: RunningServer) -> None:
    inodes = _inodes_of(keyed_server.process.pid)
    table = Path(f"/proc/{keyed_server.process.pid}/net/unix").read_text().splitlines()[1:]
    # Fields: Num RefCount Protocol Flags Type St Inode [Path]; flag 0x10000 is "listening".
    listening = [
        fields[7] if len(fields) > 7 else ""
        for fields in map(str.split, table)
        if fields[6] in inodes and int(fields[3], 16) & 0x10000
    ]
    for path in listening:
        assert not path.startswith("@")  # an abstract name is open to every user
        assert not Path(path).exists()
        assert not Path(path).parent.exists()


def test_the_selfcheck_tells_what_it_runs_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgellm_server.selfcheck"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert told["xllamacpp"]
    assert told["python"].count(".") == 2


def test_the_selfcheck_names_what_cannot_be_imported(tmp_path: Path) -> None:
    """A runtime without its wheels: the interpreter alone, and a broken engine."""
    (tmp_path / "xllamacpp.py").write_text(
        "raise ImportError('libgomp.so.1: cannot open shared object file')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "edgellm_server.selfcheck"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["ok"] is False
    assert "libgomp.so.1" in told["error"]


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "missing"),
    [
        ("x86_64", "flags\t\t: fpu sse4_2 avx f16c\n", ("avx2", "bmi2", "fma")),  # Ivy Bridge
        ("x86_64", "flags\t\t: fma avx2 bmi2 f16c\n", ()),
        ("x86_64", "", ()),
        ("aarch64", "Features\t: fp asimd\n", ()),
    ],
)
def test_an_x86_cpu_too_old_for_the_wheel_is_known_before_it_runs(
    machine: str, cpuinfo: str, missing: tuple[str, ...]
) -> None:
    assert missing_cpu_flags(machine, cpuinfo) == missing
