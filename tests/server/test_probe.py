"""The probe against a real server, and against servers that fail in each of the ways it knows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgellm_server import probe
from edgellm_server.probe import Options, Stream

from .conftest import API_KEY, REPO, RunningServer, free_port

# Against the real server

# Numbers that the small model answers each question to at length: to others it may say all that it
# has to say in fewer tokens than a test asks for.
TALKATIVE_NONCES = ("00011668", "0001eef1")


def always_ask_with(nonce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.secrets, "token_hex", lambda _n_bytes: nonce)


def test_a_healthy_server_gives_figures_and_no_failures(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ask_with(TALKATIVE_NONCES[0], monkeypatch)
    report = probe.probe(Options(url=server.url, model="small", n=4, max_tokens=12))
    assert report["failures"] == []
    assert report["schema"] == 1
    assert report["ready"] is True
    assert report["n"] == report["n_requested"] == 4
    for key in ("ttft_ms", "tpot_ms", "e2el_ms", "output_tokens"):
        assert len(report[key]) == 4
        assert all(value > 0 for value in report[key])
    assert report["output_tokens"] == [12] * 4
    assert all(ttft < e2el for ttft, e2el in zip(report["ttft_ms"], report["e2el_ms"], strict=True))
    assert report["p95_ttft_ms"] == max(report["ttft_ms"])
    assert report["cold_ttft_ms"] > 0
    assert report["output_throughput"] > 1
    assert report["answer_sample"]


def test_its_ttft_agrees_with_the_servers_own(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ask_with(TALKATIVE_NONCES[1], monkeypatch)
    n_tokens = 7  # by which they are told from a request that another test left behind
    earlier = {event["id"] for event in server.events("request")}
    report = probe.probe(Options(url=server.url, model="small", n=3, max_tokens=n_tokens))

    def own_ttft_ms() -> list[float]:
        return [
            event["ttft_ms"]
            for event in server.events("request")
            if event["id"] not in earlier and event["completion_tokens"] == n_tokens
        ]

    # The server writes its line after the last byte: the probe can be here first.
    deadline = time.monotonic() + 5
    while len(own_ttft_ms()) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    own_ms = own_ttft_ms()[1:]  # the first was the cold one
    # Beside the server's: a loopback round trip and the parsing of HTTP at both ends. The least
    # of them, since another process may hold the probe up.
    more_ms = [probed - own for probed, own in zip(report["ttft_ms"], own_ms, strict=True)]
    assert all(more > 0 for more in more_ms)
    assert min(more_ms) < 50


def test_it_needs_nothing_but_the_standard_library(server: RunningServer, tmp_path: Path) -> None:
    alone = shutil.copy(REPO / "edgellm_server" / "probe.py", tmp_path / "probe.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", alone, "--url", server.url, "--model", "small", "--n", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["failures"] == []


def test_it_reads_the_key_from_a_file(keyed_server: RunningServer, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(API_KEY + "\n")
    arguments = ["--url", keyed_server.url, "--model", "small", "--n", "1"]
    with_key = probe.probe(probe.parse_options([*arguments, "--api-key-file", str(key_file)]))
    assert with_key["failures"] == []
    without = probe.probe(probe.parse_options(arguments))
    assert [failure["kind"] for failure in without["failures"]] == ["http_status", "http_status"]
    assert "401" in without["failures"][0]["detail"]


def test_a_model_of_another_name_is_an_http_status(server: RunningServer) -> None:
    report = probe.probe(Options(url=server.url, model="other", n=1))
    assert report["failures"][0]["kind"] == "http_status"
    assert "404" in report["failures"][0]["detail"]
    assert "'small'" in report["failures"][0]["detail"]
    assert report["median_ttft_ms"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "http://127.0.0.1:1"],
        ["--url", "ftp://127.0.0.1", "--model", "m"],
        ["--url", "127.0.0.1:8000", "--model", "m"],
        ["--url", "http://h:99999", "--model", "m"],
        ["--url", "http://h", "--model", "m", "--n", "0"],
        ["--url", "http://h", "--model", "m", "--request-deadline-s", "-1"],
        ["--url", "http://h", "--model", "m", "--load-deadline-s", "nan"],
        ["--url", "http://h", "--model", "m", "--api-key-file", "/nonexistent"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.parse_options(arguments)
    assert ended.value.code == 2


# Against servers that fail

Behaviour = Callable[[BaseHTTPRequestHandler], None]


def event(content: Any, finish_reason: str | None = None) -> bytes:
    delta = {} if content is None else {"content": content}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


END = event(None, "stop") + b"data: [DONE]\n\n"


def head(handler: BaseHTTPRequestHandler, content_type: str = "text/event-stream") -> None:
    handler.send_response(200)
    handler.send_header("content-type", content_type)
    handler.end_headers()


def sends(*pieces: bytes | float, content_type: str = "text/event-stream") -> Behaviour:
    """Answers with the bytes; a number is a pause in seconds."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        head(handler, content_type)
        for piece in pieces:
            if isinstance(piece, bytes):
                handler.wfile.write(piece)
            else:
                time.sleep(piece)

    return behave


def status(code: int, body: bytes) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def resets(*pieces: bytes) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        head(handler)
        for piece in pieces:
            handler.wfile.write(piece)
        time.sleep(0.05)
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 s: close() resets
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()

    return behave


def breaks_a_chunk(handler: BaseHTTPRequestHandler) -> None:
    """Chunked transfer that ends in the middle of a chunk."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"40\r\n" + event("Hello")[:20])
    handler.close_connection = True


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """A header line that never ends, a byte at a time: never silent, never there."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    for _ in range(100):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def says_nothing(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(4)


READY = status(200, b'{"state": "ready"}')


@contextmanager
def serving(chat: Behaviour, health: Behaviour = READY) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            health(self)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            try:
                chat(self)
            except OSError:
                self.close_connection = True  # the probe hung up

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}"
        finally:
            httpd.shutdown()
            thread.join()


def options(url: str, **changes: Any) -> Options:
    chosen: dict[str, Any] = {
        "n": 1,
        "load_deadline_s": 1.0,
        "first_token_deadline_s": 1.0,
        "stall_deadline_s": 1.0,
        "request_deadline_s": 2.0,
    }
    return Options(url=url, model="m", **(chosen | changes))


def slowly(*contents: Any, pause_s: float = 0.01) -> list[bytes | float]:
    return [piece for content in contents for piece in (event(content), pause_s)]


WORDS = ["the", "sea", "is", "wide", "and", "blue", "and", "very", "deep", "indeed"]

FAILING: list[tuple[str, str, Behaviour, str]] = [
    (
        "sends all at the end",
        "buffered_stream",
        sends(0.2, b"".join(event(word + " ") for word in WORDS) + END),
        "10 chunks came in 1 burst,",
    ),
    (
        "sends in two bursts",
        "buffered_stream",
        sends(*(p for _ in "ab" for p in (0.1, b"".join(map(event, WORDS)))), END),
        "20 chunks came in 2 bursts,",
    ),
    (
        "answers in one piece",
        "buffered_stream",
        sends(b'{"choices": [{"message": {}}]}', content_type="application/json"),
        "in one piece",
    ),
    ("ends without content", "empty_answer", sends(event(None), event(""), END), "without any"),
    ("sends only spaces", "empty_answer", sends(*slowly(" ", "\n", " "), END), "white space"),
    ("sends empty chunks for ever", "no_token", sends(*slowly(*[""] * 400)), "no content within"),
    ("says nothing at all", "no_token", says_nothing, "no content within"),
    ("sends a role and then nothing", "no_token", sends(event(None), 4.0), "no content within"),
    (
        "puts an error in the stream",
        "error_body",
        sends(*slowly("Hello"), b'data: {"error": {"message": "out of memory"}}\n\n'),
        "out of memory",
    ),
    (
        "puts an error in a 200 body",
        "error_body",
        sends(b'{"error": {"message": "no model"}}', content_type="application/json"),
        "no model",
    ),
    (
        "is a captive portal",
        "error_body",
        sends(b"<html>Log in</html>", content_type="text/html"),
        "text/html",
    ),
    ("sends events that are not JSON", "error_body", sends(b"data: {oops\n\n"), "not JSON"),
    ("sends events of another shape", "error_body", sends(b'data: {"choices": [7]}\n\n'), "shape"),
    ("stops after the first token", "stalled", sends(*slowly("Hello"), 4.0), "1 chunks, then none"),
    (
        "never comes to an end",
        "timeout",
        sends(*slowly(*WORDS * 30, pause_s=0.02)),
        "not complete within 2.",
    ),
    ("trickles its head", "no_token", trickles, "no content within"),
    (
        "sends bytes that are no text",
        "garbled_answer",
        sends(*slowly("\ufffd\ufffd", "a"), END),
        "2 of 3",
    ),
    ("repeats one character", "garbled_answer", sends(*slowly(*"GGGGGGGGGG"), END), "'G' 10 times"),
    ("breaks off in the answer", "connection", sends(*slowly("Hello", " you")), "after 2 chunks"),
    ("breaks off before it", "connection", sends(event(None)), "after 0 chunks"),
    ("breaks off in a chunk", "connection", breaks_a_chunk, ""),
    ("resets the connection", "connection", resets(event("Hello")), "after 1 chunks"),
    ("is overloaded", "http_status", status(503, b'{"error": {"message": "full"}}'), "503: full"),
    ("is not there", "http_status", status(404, b"<h1>Not Found</h1>"), "404"),
]


@pytest.mark.parametrize(
    ("kind", "chat", "detail"),
    [case[1:] for case in FAILING],
    ids=[case[0] for case in FAILING],
)
def test_a_server_that(kind: str, chat: Behaviour, detail: str) -> None:
    with serving(chat) as url:
        try:
            _, failures = probe.split_buffered({1: probe.ask(options(url), "Hi")})
            found = [(failure.kind, failure.detail) for failure in failures]
        except probe.ProbeError as error:
            found = [(error.kind, error.detail)]
    assert [kind for kind, _ in found] == [kind], found
    assert detail in found[0][1]


def test_every_kind_but_those_of_readiness_has_a_server_that_shows_it() -> None:
    shown = {kind for _, kind, _, _ in FAILING}
    assert shown | {"not_ready", "load_failed"} == set(probe.Kind.__args__)  # type: ignore[attr-defined]


def test_a_failed_request_gives_no_figures_and_its_number() -> None:
    with serving(sends(0.1, b"".join(map(event, WORDS)) + END)) as url:
        report = probe.probe(options(url, n=2))
    assert [failure["request"] for failure in report["failures"]] == [0, 1, 2]
    assert report["ready"] is True
    assert report["n"] == 0
    assert report["ttft_ms"] == []
    assert report["median_ttft_ms"] is None
    assert report["p95_ttft_ms"] is None
    assert report["output_throughput"] is None


def test_it_gives_up_after_three_failures_in_a_row() -> None:
    with serving(status(500, b"{}")) as url:
        report = probe.probe(options(url, n=9))
    assert [failure["request"] for failure in report["failures"]] == [0, 1, 2]


def test_ttft_is_the_first_content_and_not_the_first_byte() -> None:
    chat = sends(event(None), event(""), b": ping\n\n", 0.3, *slowly(*WORDS, pause_s=0.02), END)
    with serving(chat) as url:
        stream = probe.ask(options(url), "Hi")
    assert 300 <= stream.ttft_ms < 900
    assert stream.output_tokens == 10
    assert (stream.tpot_ms or 0) > 15


def test_an_event_split_over_reads_is_one_event() -> None:
    whole = event("Hello") + event(" you") + END
    with serving(sends(whole[:9], 0.05, whole[9:70], 0.05, whole[70:])) as url:
        assert probe.ask(options(url), "Hi").answer == "Hello you"


def test_nobody_there_is_not_ready_yet() -> None:
    report = probe.probe(options(f"http://127.0.0.1:{free_port()}", load_deadline_s=0.6))
    assert report["ready"] is False
    assert report["ready_after_ms"] is None
    (failure,) = report["failures"]
    assert failure["kind"] == "not_ready"
    assert "Connection refused" in failure["detail"]
    assert failure["request"] is None


def test_a_server_that_keeps_loading_is_not_ready() -> None:
    with serving(says_nothing, health=status(503, b'{"state": "loading"}')) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=0.6))["failures"]
    assert failure["kind"] == "not_ready"
    assert '503 {"state": "loading"}' in failure["detail"]


def test_a_health_answer_that_trickles_is_not_ready() -> None:
    began = time.monotonic()
    with serving(says_nothing, health=trickles) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=0.6))["failures"]
    assert failure["kind"] == "not_ready"
    assert time.monotonic() - began < 3


def test_a_failed_load_is_told_at_once_with_its_reason() -> None:
    began = time.monotonic()
    body = b'{"state": "failed", "why": "want a GGUF model"}'
    with serving(says_nothing, health=status(503, body)) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=30.0))["failures"]
    assert time.monotonic() - began < 5
    assert (failure["kind"], failure["detail"]) == ("load_failed", "want a GGUF model")


def test_a_server_that_becomes_ready_is_waited_for() -> None:
    answers = iter([status(503, b"{}"), status(503, b"{}")])
    with serving(
        sends(*slowly(*WORDS), END), health=lambda handler: next(answers, READY)(handler)
    ) as url:
        report = probe.probe(options(url, load_deadline_s=10.0))
    assert report["ready"] is True
    assert report["ready_after_ms"] >= 2 * probe.POLL_S * 1000
    assert report["failures"] == []


# Its pure parts


@pytest.mark.parametrize(
    ("values", "percent", "want"),
    [
        ([], 95, None),
        ([7.0], 95, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 95, 5.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
        ([float(n) for n in range(1, 21)], 95, 19.0),
    ],
)
def test_percentile_is_the_nearest_rank(
    values: list[float], percent: float, want: float | None
) -> None:
    assert probe.percentile(values, percent) == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('data: {"a": 1}', '{"a": 1}'),
        ("data:[DONE]\r", "[DONE]"),
        ("data:  two", " two"),
        ("", None),
        (": ping", None),
        ("event: x", None),
        ("database: x", None),
    ],
)
def test_parse_sse_line(line: str, want: str | None) -> None:
    assert probe.parse_sse_line(line) == want


@pytest.mark.parametrize(
    "text", ["", "Yes.", "42", "1\n2\n3\n4\n5", "haha haha", "Да, снег.", "......", "晴れ"]
)
def test_an_odd_but_sound_answer_is_not_garbled(text: str) -> None:
    assert probe.looks_garbled(text) is None


def test_a_short_answer_in_one_burst_is_not_called_buffered() -> None:
    stream = Stream(content_s=[0.1] * 5, text=["a", "b"], finished_s=0.1, done=True)
    assert probe.classify(stream) is None


def burst_at(*times_s: float) -> Stream:
    text = ["a"] * (8 * len(times_s))
    content_s = [at for at in times_s for _ in range(8)]
    return Stream(content_s=content_s, text=text, finished_s=times_s[-1], done=True)


def steady() -> Stream:
    content_s = [0.1 + 0.01 * index for index in range(24)]
    return Stream(content_s=content_s, text=["a"] * 24, finished_s=0.4, done=True)


def test_bursts_in_one_answer_of_five_are_the_busy_host_and_count() -> None:
    streams = {1: steady(), 2: burst_at(0.6, 0.7, 0.8), 3: steady(), 4: steady(), 5: steady()}
    counted, failures = probe.split_buffered(streams)
    assert failures == []
    assert len(counted) == 5


def test_bursts_in_most_answers_are_a_buffer_and_do_not_count() -> None:
    streams = {0: burst_at(0.5), 1: steady(), 2: burst_at(0.6), 3: burst_at(0.6)}
    counted, failures = probe.split_buffered(streams)
    assert [failure.request for failure in failures] == [0, 2, 3]
    assert {failure.kind for failure in failures} == {"buffered_stream"}
    assert counted == [streams[1]]


def test_no_two_prompts_share_a_beginning() -> None:
    prompts = [probe.prompt_for(n, f"{n:08x}") for n in range(20)]
    assert len({prompt[:10] for prompt in prompts}) == 20


def test_the_host_tells_what_it_has_and_null_for_the_rest() -> None:
    host = probe.host_state()
    assert set(host) == {
        "psi_cpu_some_avg10",
        "loadavg_1",
        "temperature_c",
        "cpu_freq_khz",
        "throttled",
    }
    assert host["loadavg_1"] >= 0
    json.dumps(host)
