"""/ws/chat with a real client and a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin, Subprotocol

from .conftest import API_KEY, RunningServer, StartServer

HI = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
STORY = {"messages": [{"role": "user", "content": "Write a very long story."}], "max_tokens": 400}


def url_of(server: RunningServer) -> str:
    return f"ws://127.0.0.1:{server.port}/ws/chat"


@pytest.fixture
def socket(server: RunningServer) -> Iterator[ClientConnection]:
    with connect(url_of(server), proxy=None) as connection:
        yield connection


def ask(socket: ClientConnection, body: object) -> list[dict[str, Any]]:
    """All frames up to the one that ends the answer."""
    socket.send(body if isinstance(body, str) else json.dumps(body))
    return rest_of(socket)


def rest_of(socket: ClientConnection) -> list[dict[str, Any]]:
    frames = []
    while True:
        frame = json.loads(socket.recv(timeout=60))
        frames.append(frame)
        if "error" in frame or frame.get("type") in ("done", "cancelled"):
            return frames


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for frame in frames
        for choice in frame.get("choices", ())
    )


def test_an_answer_comes_in_chunks_and_ends_with_done(socket: ClientConnection) -> None:
    frames = ask(socket, HI)
    assert text_of(frames)
    assert frames[-1]["type"] == "done"
    assert frames[-2]["usage"]["completion_tokens"] >= 1
    assert frames[-3]["choices"][0]["finish_reason"] in ("stop", "length")
    assert all(frame["object"] == "chat.completion.chunk" for frame in frames[:-1])


def test_one_connection_carries_a_conversation(socket: ClientConnection) -> None:
    first = text_of(ask(socket, HI))
    messages = [
        *HI["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And goodbye."},
    ]
    frames = ask(socket, {"messages": messages, "max_tokens": 8})
    usage = frames[-2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ("{", None, "not valid JSON"),
        ("[]", None, "want a JSON object"),
        ({"messages": []}, "messages", "at least one message"),
        (HI | {"temperature": "hot"}, "temperature", "want a number from 0 to 2"),
        (HI | {"model": "other"}, "model", "is not served here"),
    ],
)
def test_a_fault_is_told_and_the_connection_stays(
    socket: ClientConnection, body: object, param: str | None, told: str
) -> None:
    (frame,) = ask(socket, body)
    assert frame["error"]["param"] == param
    assert told in frame["error"]["message"]
    assert ask(socket, HI)[-1]["type"] == "done"


def test_cancel_stops_the_answer_and_frees_the_slot(
    server: RunningServer, socket: ClientConnection
) -> None:
    socket.send(json.dumps(STORY))
    socket.recv(timeout=60)
    socket.send('{"type": "cancel"}')
    frames = rest_of(socket)
    assert frames[-1]["type"] == "cancelled"
    line = server.wait_for_event("request", lambda event: event["id"] == frames[-1]["id"])
    assert line["status"] == 499
    assert line["completion_tokens"] < 400
    assert ask(socket, HI)[-1]["type"] == "done"


def test_a_cancel_without_an_answer_is_no_fault(socket: ClientConnection) -> None:
    socket.send('{"type": "cancel"}')
    assert ask(socket, HI)[-1]["type"] == "done"


def test_a_client_that_leaves_in_mid_answer_frees_the_slot(server: RunningServer) -> None:
    before = len(server.events("request"))
    with connect(url_of(server), proxy=None) as leaving:
        leaving.send(json.dumps(STORY))
        leaving.recv(timeout=60)
    server.wait_for_event(
        "request",
        lambda event: event in server.events("request")[before:] and event["status"] == 499,
    )
    with connect(url_of(server), proxy=None) as next_one:
        assert ask(next_one, HI)[-1]["type"] == "done"


def test_bytes_are_refused_by_closing(socket: ClientConnection) -> None:
    socket.send(b"\x00\x01")
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=10)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1003


def test_a_frame_beyond_the_body_limit_is_refused(server: RunningServer) -> None:
    with connect(url_of(server), proxy=None) as socket:
        socket.send(json.dumps({"messages": [{"role": "user", "content": "x" * 70_000}]}))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


def test_a_key_is_asked_for(keyed_server: RunningServer) -> None:
    for refused in ({}, {"additional_headers": {"Authorization": "Bearer wrong"}}):
        with pytest.raises(InvalidStatus) as caught:
            connect(url_of(keyed_server), proxy=None, **refused)  # type: ignore[arg-type]
        assert caught.value.response.status_code == 401
    with connect(
        url_of(keyed_server),
        proxy=None,
        additional_headers={"Authorization": f"Bearer {API_KEY}"},
    ) as device:
        assert ask(device, HI)[-1]["type"] == "done"
    protocols = [Subprotocol("edgellm.chat"), Subprotocol(f"edgellm.key.{API_KEY}")]
    with connect(url_of(keyed_server), proxy=None, subprotocols=protocols) as browser:
        assert browser.subprotocol == "edgellm.chat"  # the key is not echoed
        assert ask(browser, HI)[-1]["type"] == "done"
    assert API_KEY not in keyed_server.log_text()


def test_another_sites_page_is_refused_even_without_keys(server: RunningServer) -> None:
    with pytest.raises(InvalidStatus) as caught:
        connect(url_of(server), proxy=None, origin=Origin("http://evil.example"))
    assert caught.value.response.status_code == 403
    own = Origin(f"http://127.0.0.1:{server.port}")
    with connect(url_of(server), proxy=None, origin=own) as socket:
        assert ask(socket, HI)[-1]["type"] == "done"


def test_a_restart_lets_an_answer_finish_and_then_closes(start_server: StartServer) -> None:
    server = start_server(EDGELLM_DRAIN_DEADLINE_S="20", EDGELLM_MAX_TOKENS="80")
    server.wait_until_ready()
    with connect(url_of(server), proxy=None) as busy, connect(url_of(server), proxy=None) as idle:
        busy.send(json.dumps(STORY | {"max_tokens": 80}))
        busy.recv(timeout=60)
        server.process.terminate()
        with pytest.raises(ConnectionClosed) as caught:
            idle.recv(timeout=10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        assert rest_of(busy)[-1]["type"] == "done"
        with pytest.raises(ConnectionClosed) as caught:
            busy.recv(timeout=10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
    assert server.process.wait(20) in (0, -15)
