"""Limits on connections and heads, who may ask from a browser, and what /metrics tells."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgellm_server import connections

from .conftest import API_KEY, RunningServer, StartServer

HI = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}


def read_all(sock: socket.socket, deadline_s: float) -> bytes:
    sock.settimeout(deadline_s)
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_is_408_and_closed(server: RunningServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(sent)
        began = time.monotonic()
        data = read_all(sock, connections.HEAD_DEADLINE_S + 10)
        waited_s = time.monotonic() - began
    assert data.startswith(b"HTTP/1.1 408 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_timeout"
    assert connections.HEAD_DEADLINE_S - 1 < waited_s < connections.HEAD_DEADLINE_S + 5


def test_a_second_head_that_stays_incomplete_is_closed_too(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /health/live HTT")
        data = read_all(sock, connections.HEAD_DEADLINE_S + 10)
    assert b"HTTP/1.1 408 " in data


def test_a_slow_request_is_not_taken_for_a_slow_head(server: RunningServer) -> None:
    """An answer may take longer than a head: the deadline is over once the head is there."""
    body = json.dumps(HI | {"max_tokens": 1}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(head.encode() + body[:10])
        time.sleep(connections.HEAD_DEADLINE_S + 1)
        sock.sendall(body[10:])
        assert read_all(sock, 20).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_http_is_400_in_the_common_shape(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        data = read_all(sock, 10)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_connections_beyond_the_limit_are_503_and_others_go_on(start_server: StartServer) -> None:
    server = start_server()
    server.wait_until_ready()
    with contextlib.ExitStack() as stack:
        for _ in range(connections.MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        over = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        data = read_all(over, 10)
        assert data.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in data
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=HI).status_code == 200


def test_another_sites_page_is_403_and_needs_no_key_to_be_so(server: RunningServer) -> None:
    with server.client() as client:
        refused = client.post(
            "/v1/chat/completions", json=HI, headers={"origin": "http://evil.example"}
        )
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in refused.headers
        own = client.post("/v1/chat/completions", json=HI, headers={"origin": server.url})
        assert own.status_code == 200


def test_origins_that_are_named_may_ask(start_server: StartServer) -> None:
    server = start_server(EDGELLM_CORS_ORIGINS="https://panel.example")
    server.wait_until_ready()
    origin = {"origin": "https://panel.example"}
    with server.client() as client:
        preflight = client.options(
            "/v1/chat/completions",
            headers=origin
            | {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            },
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin["origin"]
        asked = client.post("/v1/chat/completions", json=HI, headers=origin)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == origin["origin"]
        other = client.post(
            "/v1/chat/completions", json=HI, headers={"origin": "https://b.example"}
        )
        assert other.status_code == 403


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f" {v}" for k, v in sorted(sample.labels.items()) if k != "worker"): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(start_server: StartServer) -> None:
    server = start_server(EDGELLM_N_PARALLEL="1", EDGELLM_MAX_QUEUE="0", EDGELLM_MAX_TOKENS="400")
    server.wait_until_ready()
    with server.client() as client:
        before = samples(client.get("/metrics").text)
        assert client.post("/v1/chat/completions", json=HI).status_code == 200
        assert client.post("/v1/chat/completions", json={}).status_code == 400
        story = {"messages": [{"role": "user", "content": "Write a long story."}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=story) as response:
            lines = response.iter_lines()
            next(lines)
            with server.client() as other:
                assert other.post("/v1/chat/completions", json=HI).status_code == 503
                busy = samples(other.get("/metrics").text)
        server.wait_for_event("request", lambda event: event["status"] == 499)
        after = samples(client.get("/metrics").text)
    assert busy["edgellm_slots_busy"] == 1
    assert after["edgellm_slots_busy"] == 0
    assert after["edgellm_slots"] == 1
    assert after["edgellm_ready"] == 1

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grew("edgellm_requests_total 200 chat") == 1
    assert grew("edgellm_requests_total 400 chat") == 1
    assert grew("edgellm_requests_total 503 chat") == 1
    assert grew("edgellm_cancelled_total") == 1
    assert grew("edgellm_rejected_total overloaded") == 1
    assert grew("edgellm_ttft_seconds_count") >= 1
    assert grew("edgellm_tpot_seconds_count") == 1
    assert 0 < grew("edgellm_ttft_seconds_sum") < 30
    assert grew("edgellm_generation_tokens_total") >= 4
    assert grew("edgellm_prompt_tokens_total") > 4
    assert after["edgellm_resident_memory_bytes"] > 50e6
    assert grew("edgellm_cpu_seconds_total") > 0
    assert after["edgellm_run_queue_seconds_total"] >= 0


def test_metrics_need_the_key(keyed_server: RunningServer) -> None:
    with keyed_server.client() as client:
        assert client.get("/metrics").status_code == 401
        allowed = client.get("/metrics", headers={"authorization": f"Bearer {API_KEY}"})
        assert allowed.status_code == 200
        assert allowed.headers["content-type"].startswith("text/plain; version=")


def test_prompts_are_in_the_log_only_where_asked_for(start_server: StartServer) -> None:
    secret = "the code of the vault is 4711"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    quiet, telling = start_server(), start_server(EDGELLM_LOG_PROMPTS="1")
    for server in (quiet, telling):
        server.wait_until_ready()
        httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
        server.wait_for_event("request", lambda event: event["status"] == 200)
    assert secret not in quiet.log_text()
    assert secret in telling.log_text()
