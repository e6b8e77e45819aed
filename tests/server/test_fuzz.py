"""Everything a client should not send, while another client keeps asking.

The promise: no crash, no hang, no 5xx and no traceback; a 4xx that says what is wrong; and the
other client gets its answers all the while.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
import websockets.exceptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import ClientConnection, connect

from .conftest import RunningServer, StartServer
from .test_request import VALUES, fields_of

MAX_BODY_BYTES = 1024 * 1024
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
STORY = [{"role": "user", "content": "Write a very long story about a lighthouse."}]
# How long anything may take here; answers are of 32 tokens at most.
PATIENCE_S = 15.0
# The server's own deadlines (connections.py, answering.py), and some room on a busy machine.
HEAD_DEADLINE_S, BODY_DEADLINE_S, ROOM_S = 10.0, 30.0, 8.0

BOUNDED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Neighbour:
    """A client that means well and asks again and again, in a thread."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._answered = threading.Condition()
        self._thread = threading.Thread(target=self._ask_again_and_again)
        self.n_answers = 0
        self.slowest_s = 0.0
        self.faults: list[str] = []

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def assert_is_answered(self) -> None:
        """From now on too: one more whole answer, that began after this call."""
        with self._answered:
            wanted = self.n_answers + 2
            self._answered.wait_for(lambda: self.n_answers >= wanted or self.faults, 2 * PATIENCE_S)
            assert self.faults == []
            assert self.n_answers >= wanted
            assert self.slowest_s < PATIENCE_S

    def _ask_again_and_again(self) -> None:
        with self._server.client() as client:
            while not self._stop.is_set():
                began = time.monotonic()
                try:
                    body = {"messages": HI, "max_tokens": 2}
                    response = client.post("/v1/chat/completions", json=body)
                    fault = None if response.status_code == 200 else response.text
                except httpx.HTTPError as error:
                    fault = repr(error)
                with self._answered:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                    if fault is None:
                        self.n_answers += 1
                    else:
                        self.faults.append(fault)
                    self._answered.notify_all()
                # Leaves the machine to what is tested.
                self._stop.wait(0.2)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    server = start_server(
        EDGELLM_N_PARALLEL="2",
        EDGELLM_N_CTX="1024",
        EDGELLM_MAX_TOKENS="32",
        EDGELLM_MAX_QUEUE="16",
        EDGELLM_MAX_BODY_BYTES=str(MAX_BODY_BYTES),
    )
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module")
def n_files_at_rest(server: RunningServer) -> int:
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
    return n_files(server)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: edge\r\n"
HALF_OPEN = {
    "nothing at all": b"",
    "one byte": b"P",
    "half a head": HEAD + b"Content-Le",
    "a head without its end": HEAD + b"X-A: b\r\n",
    "half a body": HEAD + b'Content-Length: 500\r\n\r\n{"messages": [',
    "noise": random.Random(1).randbytes(5000).replace(b"\n", b""),
    "half a huge chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    "half a chunk": HEAD + b'Transfer-Encoding: chunked\r\n\r\n40\r\n{"mess',
    "no body": HEAD + b"Content-Length: 500\r\n\r\n",
}


@pytest.fixture(scope="module")
def half_open(
    server: RunningServer, n_files_at_rest: int
) -> Iterator[dict[str, list[tuple[socket.socket, float]]]]:
    """Ten connections of each kind, open all through this file's tests."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, list[tuple[socket.socket, float]]] = {name: [] for name in HALF_OPEN}
        for name, start in HALF_OPEN.items():
            for _ in range(10):
                sock = stack.enter_context(dial(server))
                sock.sendall(start)
                opened[name].append((sock, time.monotonic()))
        yield opened


@pytest.fixture(scope="module")
def tireless(
    server: RunningServer, half_open: dict[str, list[tuple[socket.socket, float]]]
) -> Iterator[Neighbour]:
    with Neighbour(server) as neighbour:
        yield neighbour


@pytest.fixture(autouse=True)
def neighbour(tireless: Neighbour) -> Iterator[Neighbour]:
    """Answered during each test, and after it."""
    yield tireless
    tireless.assert_is_answered()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def dial(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def n_files(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def read_to_end(sock: socket.socket) -> bytes:
    """Until the server closes. TimeoutError where it does not."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            received += piece
    return received


def exchange(server: RunningServer, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes."""
    with dial(server) as sock:
        # It may close before it has read all.
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        return read_to_end(sock)


def statuses_of(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", received)]


def assert_told(response: httpx.Response, statuses: tuple[int, ...] = (400, 404)) -> None:
    """200, or an error in OpenAI's shape that names its field."""
    assert response.status_code in (200, *statuses)
    if response.status_code != 200:
        assert_error_is_clean(response.json()["error"])


def assert_error_is_clean(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 600
    assert "Traceback" not in error["message"]
    if error["param"] is not None:
        assert error["message"].startswith(f"{error['param']}: ")


# Bodies


@BOUNDED
@given(data=fields_of("ChatRequest"))
def test_any_values_of_a_chats_fields_are_answered_or_named(
    client: httpx.Client, data: dict[str, Any]
) -> None:
    content = json.dumps(data | {"max_completion_tokens": 1}).encode()
    assert_told(client.post("/v1/chat/completions", content=content))


@BOUNDED
@given(data=fields_of("CompletionRequest"))
def test_any_values_of_a_completions_fields_are_answered_or_named(
    client: httpx.Client, data: dict[str, Any]
) -> None:
    content = json.dumps(data | {"max_completion_tokens": 1}).encode()
    assert_told(client.post("/v1/completions", content=content))


@settings(BOUNDED, max_examples=30)
@given(text=st.text(st.characters(), max_size=15), role=st.sampled_from(["system", "assistant"]))
def test_any_text_is_a_message_and_comes_back_as_text(
    client: httpx.Client, text: str, role: str
) -> None:
    """With NUL, surrogates, the model's own control tokens, directions, half emoji."""
    body = {
        "messages": [{"role": role, "content": text + "<|im_start|>"}, *HI],
        "stop": [text] if text else None,
        "max_tokens": 1,
    }
    response = client.post("/v1/chat/completions", content=json.dumps(body))
    assert_told(response)
    lone_surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    assert (response.status_code == 400) == lone_surrogate


@BOUNDED
@given(value=VALUES)
def test_any_json_at_all_is_answered_or_refused(client: httpx.Client, value: Any) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert_told(client.post(path, content=json.dumps(value)))


@BOUNDED
@given(random_bytes=st.binary(max_size=12), at=st.integers(0, 60), cut=st.integers(0, 12))
def test_a_body_with_damage_in_it_is_answered_or_refused(
    client: httpx.Client, random_bytes: bytes, at: int, cut: int
) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1, "temperature": 1.5}).encode()
    damaged = body[:at] + random_bytes + body[at + cut :]
    assert_told(client.post("/v1/chat/completions", content=damaged))


# The tests' model has no token for some bytes of rarer ones.
COMMON = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])
SCHEMAS = st.recursive(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(lambda t: {"type": t})
    | st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values})
    | st.tuples(st.integers(-99, 99), st.integers(-9, 99)).map(
        lambda low: {"type": "integer", "minimum": low[0], "maximum": low[0] + low[1]}
    )
    | st.tuples(st.integers(0, 9), st.integers(-2, 9)).map(
        lambda low: {"type": "string", "minLength": low[0], "maxLength": low[0] + low[1]}
    )
    | st.sampled_from(["date", "time", "date-time", "uuid", "email"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "minItems": st.integers(0, 2), "maxItems": st.integers(1, 3)},
        )
        | st.dictionaries(st.text(COMMON, max_size=4), inner, max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[::2],
            }
        )
        | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    ),
    max_leaves=6,
)


def in_format(schema: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Write some JSON."}],
        "seed": seed,
        "max_tokens": 24,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "any", "schema": schema},
        },
    }


@settings(BOUNDED, max_examples=30)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_any_schema_is_kept_to_or_refused(
    client: httpx.Client, schema: dict[str, Any], seed: int
) -> None:
    response = client.post("/v1/chat/completions", json=in_format(schema, seed))
    assert_told(response)
    if response.status_code == 200:
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))


def test_a_format_the_model_has_no_tokens_for_is_refused(client: httpx.Client) -> None:
    """SmolLM2 lacks a byte of this one; only the engine finds out, in the middle of the answer."""
    body = in_format({"enum": ["\U000ab1c8"]}, seed=1)
    response = client.post("/v1/chat/completions", json=body)
    assert_told(response)
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "response_format"


WORST_BODIES: dict[str, tuple[int, bytes]] = {
    "no byte": (400, b""),
    "deep lists": (400, b'{"messages":' + b"[" * 500_000),
    "deep objects": (400, b'{"a":' * 150_000),
    "deep lists that end": (400, b'{"messages":' + b"[" * 400 + b"]" * 400 + b"}"),
    "deep in a field nobody reads": (
        200,
        b'{"user":' + b"[" * 400 + b"]" * 400 + b',"max_tokens":1,"prompt":"a","messages":'
        b'[{"role":"user","content":"a"}]}',
    ),
    "NaN": (400, b'{"prompt":"a","messages":[],"seed":NaN}'),
    "a number without end": (400, b'{"seed":' + b"1" * 1_000_000 + b"}"),
    "an exponent without end": (400, b'{"temperature":1e' + b"9" * 1_000_000 + b"}"),
    "many keys": (400, b"{" + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}"),
    "one long key": (400, b'{"' + b"k" * 1_000_000 + b'":NaN}'),
    "a long key over many NaN": (
        400,
        b'{"' + b"k" * 500_000 + b'":[' + b"NaN," * 100_000 + b"1]}",
    ),
    "no UTF-8": (400, b'{"messages":[{"role":"user","content":"\xff\xfe\xc0\x80"}]}'),
    "UTF-16": (400, '{"messages":[{"role":"user","content":"a"}]}'.encode("utf-16")),
    "NUL": (400, b'{"messages":\x00}'),
    "lone surrogates": (
        400,
        b'{"prompt":"\\ud83d","messages":[{"role":"user","content":"\\udc00\\ud83d"}]}',
    ),
    "a huge text": (
        400,
        json.dumps(
            {"prompt": "la " * 300_000, "messages": [{"role": "user", "content": "la " * 300_000}]}
        )[:MAX_BODY_BYTES].encode(),
    ),
}


@pytest.mark.parametrize("name", WORST_BODIES)
def test_the_worst_bodies_are_refused_at_once(client: httpx.Client, name: str) -> None:
    status, body = WORST_BODIES[name]
    for path in ("/v1/chat/completions", "/v1/completions"):
        began = time.monotonic()
        response = client.post(path, content=body)
        assert response.status_code == status
        assert_told(response)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_text_a_hundred_times_the_context_is_refused_without_being_read_by_the_model(
    client: httpx.Client, path: str
) -> None:
    text = "word " * 150_000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    began = time.monotonic()
    response = client.post(path, json=body)
    assert time.monotonic() - began < 10
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_ten_megabytes_are_413_whether_declared_chunked_or_sent_regardless(
    server: RunningServer, client: httpx.Client
) -> None:
    megabytes = b"x" * (10 * 1024 * 1024)
    pieces = (megabytes[at : at + 65536] for at in range(0, len(megabytes), 65536))
    # A client that is refused may still be sending: httpx may meet the closed connection.
    for content in (megabytes, pieces):
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            assert client.post("/v1/completions", content=content).status_code == 413
    declared = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(megabytes)
    assert statuses_of(exchange(server, declared)) == [413]  # before a byte of it is sent
    assert statuses_of(exchange(server, declared + megabytes)) in ([413], [])
    assert n_files(server) < 200


# HTTP

CLOSE = b"Connection: close\r\n"
BODY = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}'
NO_HTTP: dict[str, bytes] = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "no method": b" / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a head without end": b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 10_000 + b"\r\n",
    "one endless header": b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "an endless path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n" + CLOSE + b"\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: ten\r\n\r\n",
    "a length below nothing": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length in superscript": HEAD + "Content-Length: ²\r\n\r\n".encode(),
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n123456",
    "an unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + bytes(10),
    "a chunk size that is none": HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "an endless chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 50_000,
    "a chunk that is too long": HEAD
    + CLOSE
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}{}{}\r\n0\r\n\r\n",
    "more body than said": HEAD + b"Content-Length: 2\r\n\r\n{}" + b"\x00" * 100,
    "half a WebSocket": b"GET /ws/chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n"
    + CLOSE
    + b"\r\n",
    "a WebSocket of another version": b"GET /ws/chat HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 99\r\nSec-WebSocket-Key: YQ==\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_4xx_and_the_connection_closed(server: RunningServer, name: str) -> None:
    received = exchange(server, NO_HTTP[name])
    assert b"Traceback" not in received
    assert len(received) < 2000
    statuses = statuses_of(received)
    assert statuses
    assert all(400 <= status < 500 for status in statuses)


def test_chunks_of_one_byte_and_headers_of_one_byte_are_put_together(
    server: RunningServer,
) -> None:
    chunks = (
        b"".join(b"1;x=y\r\n" + bytes([byte]) + b"\r\n" for byte in BODY) + b"0\r\nT: r\r\n\r\n"
    )
    request = HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    with dial(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request:
            sock.send(bytes([byte]))
        assert statuses_of(read_to_end(sock)) == [200]


def test_pipelined_requests_are_all_answered_in_order(server: RunningServer) -> None:
    get = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
    ask = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    lost = b"GET /none HTTP/1.1\r\nHost: a\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    received = exchange(server, get * 5 + ask + lost + ask + get + last)
    assert statuses_of(received) == [200] * 5 + [200, 404, 200, 200, 200]


@BOUNDED
@given(
    path=st.binary(max_size=30),
    method=st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"OPTIONS", b"PURGE", b"get"]),
)
def test_any_path_is_answered_with_less_than_500(
    server: RunningServer, path: bytes, method: bytes
) -> None:
    request = b"%s /%s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % (method, path)
    (status, *_) = statuses_of(exchange(server, request))
    assert status < 500


def test_a_client_that_closes_its_side_after_asking_holds_nothing(server: RunningServer) -> None:
    for stream in (b"true", b"false"):
        body = BODY[:-1] + b',"stream":%s}' % stream
        with dial(server) as sock:
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            sock.shutdown(socket.SHUT_WR)
            read_to_end(sock)


def test_a_client_that_never_reads_or_resets_holds_nothing(server: RunningServer) -> None:
    """Eight at a time over two slots; what they hold, the neighbour would have to wait for."""
    body = json.dumps({"messages": STORY, "stream": True}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    deaf = [dial(server) for _ in range(8)]
    for sock in deaf:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request)
    for sock in deaf[::2]:
        sock.recv(100)
        # A reset, not a polite end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
    for sock in deaf[1::2]:
        sock.close()


# WebSocket


def ws(server: RunningServer, **options: Any) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/ws/chat"
    return connect(url, proxy=None, open_timeout=PATIENCE_S, close_timeout=2, **options)


def replies(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    """Frames up to the one that ends an answer."""
    while True:
        reply = json.loads(socket.recv(PATIENCE_S))
        yield reply
        if "error" in reply or reply.get("type") in ("done", "cancelled"):
            return


def last_reply(socket: ClientConnection, request: Any) -> dict[str, Any]:
    socket.send(request if isinstance(request, str) else json.dumps(request))
    *_, last = replies(socket)
    return last


def assert_answers(socket: ClientConnection) -> None:
    assert last_reply(socket, {"messages": HI, "max_tokens": 2})["type"] == "done"


def assert_closed(socket: ClientConnection, code: int) -> None:
    with pytest.raises(websockets.exceptions.ConnectionClosed) as caught:
        receive_for_ever(socket)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == code


def receive_for_ever(socket: ClientConnection) -> None:
    while True:
        socket.recv(PATIENCE_S)


@BOUNDED
@given(data=st.lists(fields_of("ChatRequest") | VALUES, min_size=1, max_size=3))
def test_any_json_in_frames_is_answered_or_named_and_the_connection_goes_on(
    server: RunningServer, data: list[Any]
) -> None:
    with ws(server) as socket:
        for value in data:
            value = value | {"max_completion_tokens": 1} if isinstance(value, dict) else value
            reply = last_reply(socket, value)
            if "error" in reply:
                assert_error_is_clean(reply["error"])
        assert_answers(socket)


def test_the_worst_frames_are_refused_and_the_connection_goes_on(server: RunningServer) -> None:
    with ws(server) as socket:
        for status, body in WORST_BODIES.values():
            with contextlib.suppress(UnicodeDecodeError):
                if status == 400:
                    reply = last_reply(socket, body.decode())
                    assert_error_is_clean(reply["error"])
        assert last_reply(socket, "")["error"]["message"]
        assert last_reply(socket, {"messages": HI, "temperature": 9})["error"]["param"] == (
            "temperature"
        )
        assert_answers(socket)


def test_a_request_in_fragments_with_pings_between_is_one_request(server: RunningServer) -> None:
    text = json.dumps({"messages": HI, "max_tokens": 2})
    with ws(server) as socket:
        pong = socket.ping()
        socket.send(text[at] for at in range(len(text)))
        *_, last = replies(socket)
        assert last["type"] == "done"
        assert pong.wait(PATIENCE_S)
        socket.send([text[:9], "", text[9:], ""])
        *_, last = replies(socket)
        assert last["type"] == "done"


def test_cancel_without_an_answer_does_nothing(server: RunningServer) -> None:
    with ws(server) as socket:
        for _ in range(20):
            socket.send('{"type": "cancel"}')
        assert_answers(socket)
        socket.send('{"type":"cancel"}')
        assert_answers(socket)


def test_a_second_request_during_the_first_answer_is_answered_after_it(
    server: RunningServer,
) -> None:
    with ws(server) as socket:
        for max_tokens in (20, 1):
            socket.send(json.dumps({"messages": STORY, "max_tokens": max_tokens}))
        counts = []
        for _ in range(2):
            *chunks, last = replies(socket)
            assert last["type"] == "done"
            assert len({chunk["id"] for chunk in chunks}) == 1
            counts.append(chunks[-1]["usage"]["completion_tokens"])
        assert counts == [20, 1]


def test_cancel_in_mid_answer_stops_that_one_and_the_next_is_whole(server: RunningServer) -> None:
    with ws(server) as socket:
        socket.send(json.dumps({"messages": STORY, "max_tokens": 32}))
        socket.recv(PATIENCE_S)
        socket.send('{"type": "cancel"}')
        *chunks, last = replies(socket)
        assert last["type"] == "cancelled"
        assert len(chunks) < 32
        assert_answers(socket)


def test_frames_that_pile_up_without_end_close_the_connection(server: RunningServer) -> None:
    with ws(server) as socket:
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):
            for _ in range(200):
                socket.send(json.dumps({"messages": STORY, "max_tokens": 32}))
        assert_closed(socket, 1008)


def test_a_client_that_closes_in_mid_answer_frees_the_slot(server: RunningServer) -> None:
    for leave in (ClientConnection.close, lambda socket: socket.socket.close()):
        socket = ws(server)
        socket.send(json.dumps({"messages": STORY, "max_tokens": 32}))
        request_id = json.loads(socket.recv(PATIENCE_S))["id"]
        leave(socket)
        left = server.wait_for_event("request", lambda event, id=request_id: event["id"] == id)
        assert left["status"] == 499
        assert left["completion_tokens"] < 32


def frame(first: int, payload: bytes, *, mask: bool = True, length: bytes | None = None) -> bytes:
    if length is None:
        size = len(payload)
        length = bytes([size]) if size < 126 else b"\x7e" + struct.pack(">H", size)
    head = bytes([first, length[0] | (0x80 if mask else 0)]) + length[1:]
    return head + (b"\x00\x00\x00\x00" if mask else b"") + payload


NO_FRAMES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "binary": (1003, lambda: frame(0x82, b"\x00\x01")),
    "no UTF-8": (1007, lambda: frame(0x81, b"\xff\xfe")),
    "half a surrogate pair": (1007, lambda: frame(0x81, b"\xed\xa0\x80")),
    "not masked": (1002, lambda: frame(0x81, b"{}", mask=False)),
    "reserved bits": (1002, lambda: frame(0xF1, b"{}")),
    "an unknown opcode": (1002, lambda: frame(0x83, b"{}")),
    "a continuation of nothing": (1002, lambda: frame(0x80, b"{}")),
    "a ping in pieces": (1002, lambda: frame(0x09, b"")),
    "a long ping": (1002, lambda: frame(0x89, b"p" * 200)),
    "a close code that is none": (1002, lambda: frame(0x88, b"\x00\x01")),
    "two texts in one": (1002, lambda: frame(0x01, b"{") + frame(0x81, b"}")),
    "a frame of 2^63": (1009, lambda: frame(0x81, b"", length=b"\x7f" + b"\x7f" + b"\xff" * 7)),
    "a huge frame": (
        1009,
        lambda: frame(0x81, b" " * 2_000_000, length=b"\x7f" + struct.pack(">Q", 2_000_000)),
    ),
    "huge in fragments": (
        1009,
        lambda: frame(0x01, b" " * 60_000) + frame(0x00, b" " * 60_000) * 20,
    ),
}


@pytest.mark.parametrize("name", NO_FRAMES)
def test_what_is_no_websocket_frame_closes_with_the_code_that_says_so(
    server: RunningServer, name: str
) -> None:
    code, data = NO_FRAMES[name]
    with ws(server) as socket:
        with contextlib.suppress(OSError):
            socket.socket.sendall(data())
        assert_closed(socket, code)


def test_noise_after_the_handshake_ends_the_connection(server: RunningServer) -> None:
    noise = random.Random(2)
    for _ in range(30):
        with ws(server) as socket:
            with contextlib.suppress(OSError):
                socket.socket.sendall(noise.randbytes(noise.randrange(1, 300)))
                socket.socket.shutdown(1)
            with pytest.raises(websockets.exceptions.ConnectionClosed):
                receive_for_ever(socket)


# Afterwards


def test_half_open_connections_are_told_and_closed_in_time(
    server: RunningServer, half_open: dict[str, list[tuple[socket.socket, float]]]
) -> None:
    for name, connections in half_open.items():
        deadline_s = BODY_DEADLINE_S if "body" in name or "chunk" in name else HEAD_DEADLINE_S
        for sock, began in connections:
            sock.settimeout(max(1.0, began + deadline_s + ROOM_S - time.monotonic()))
            received = sock.recv(65536)
            assert statuses_of(received) == [408], name
            assert b'"error"' in received


def test_after_all_that_the_server_is_as_it_was(
    server: RunningServer, n_files_at_rest: int, half_open: dict[str, Any], neighbour: Neighbour
) -> None:
    for connections in half_open.values():
        for sock, _ in connections:
            sock.close()
    assert server.process.poll() is None
    assert "Traceback" not in server.log_text()
    assert all(event["status"] < 500 for event in server.events("request"))
    assert not server.events("engine_error")
    until = time.monotonic() + PATIENCE_S
    # The neighbour's connection, and the shared client's.
    while n_files(server) > n_files_at_rest + 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert n_files(server) <= n_files_at_rest + 4
    assert neighbour.n_answers > 20
