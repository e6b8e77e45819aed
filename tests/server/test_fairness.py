"""Real model: short requests beside long prompts; known beginnings; growing conversations."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import RunningServer, StartServer

LONG_WORDS = 900


@pytest.fixture(scope="module")
def wide_server(start_server: StartServer) -> RunningServer:
    """Four slots, room for long prompts."""
    server = start_server(
        EDGELLM_N_PARALLEL="4",
        EDGELLM_N_CTX="2048",
        EDGELLM_MAX_TOKENS="64",
        EDGELLM_N_BATCH="64",
    )
    server.wait_until_ready()
    return server


def ask(
    server: RunningServer, messages: list[dict[str, str]], max_tokens: int = 4
) -> dict[str, Any]:
    """Streams one answer. {"ttft_s", "text", "cached_tokens", "id"}."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    found: dict[str, Any] = {"ttft_s": None, "text": ""}
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200, response.read()
        found["id"] = response.headers["x-request-id"]
        for chunk in chunks_of(response):
            if "usage" in chunk:
                found["cached_tokens"] = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
                found["prompt_tokens"] = chunk["usage"]["prompt_tokens"]
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    if found["ttft_s"] is None:
                        found["ttft_s"] = time.monotonic() - began
                    found["text"] += text
    return found


def chunks_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[len("data: ") :])


def test_short_requests_are_answered_while_a_long_prompt_is_computed(
    wide_server: RunningServer,
) -> None:
    """Wherever the long prompt came first: each of the slots is asked for in turn."""
    long_prompt = [{"role": "user", "content": " ".join(str(n) for n in range(LONG_WORDS // 3))}]
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(ask(wide_server, long_prompt)))
    thread.start()
    time.sleep(0.3)
    shorts = [ask(wide_server, [{"role": "user", "content": f"{n}: hello"}]) for n in range(3)]
    still_running = thread.is_alive()
    thread.join()
    assert results[0]["prompt_tokens"] > 800
    assert still_running, "the long prompt was too short to tell"
    for short in shorts:
        assert short["ttft_s"] < results[0]["ttft_s"] / 3


def test_a_conversation_computes_only_what_is_new(wide_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    first = ask(wide_server, messages, 24)
    messages += [
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And the land?"},
    ]
    # Others in between, which must not take its slot while there are free ones.
    for n in range(2):
        ask(wide_server, [{"role": "user", "content": f"{n} something else"}])
    second = ask(wide_server, messages, 4)
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert second["prompt_tokens"] - second["cached_tokens"] < 30


def test_the_system_prompt_is_known_before_the_first_request(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = tmp_path_factory.mktemp("prompt") / "system"
    prompt.write_text("You answer for the control room of a water works. " * 8)
    server = start_server(
        EDGELLM_N_PARALLEL="3", EDGELLM_N_CTX="512", EDGELLM_SYSTEM_PROMPT_FILE=str(prompt)
    )
    server.wait_until_ready()
    first = ask(server, [{"role": "user", "content": "Is the pump on?"}])
    assert first["cached_tokens"] > 80
    # The other slots learn it while nothing else is to do.
    until = time.monotonic() + 20
    with ThreadPoolExecutor(3) as pool:
        while time.monotonic() < until:
            questions = [[{"role": "user", "content": f"{n}: is it on?"}] for n in range(3)]
            cached = [r["cached_tokens"] for r in pool.map(ask, [server] * 3, questions)]
            if min(cached) > 80:
                return
            time.sleep(0.5)
    raise AssertionError(f"not every slot knows the system prompt: {cached} tokens cached")


def test_the_log_line_has_the_engines_own_clock(wide_server: RunningServer) -> None:
    asked = ask(wide_server, [{"role": "user", "content": "Say hello."}])
    line = wide_server.wait_for_event("request", lambda event: event["id"] == asked["id"])
    assert 0 < line["prompt_ms"] <= line["ttft_ms"]
    assert line["predicted_ms"] > 0
