"""Answers of a real server: streamed, whole, cancelled, refused for want of room."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from .conftest import API_KEY, RunningServer

STORY = "Write a very long story about a lighthouse, with many details."


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **fields}


def chunks_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def running_stream(server: RunningServer, **fields: Any) -> Iterator[str]:
    """A stream whose first token has come: its id. Closed, and so cancelled, at the end."""
    body = ask(STORY, stream=True, temperature=0, **fields)
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as r:
        assert r.status_code == 200
        chunks = chunks_of(r)  # kept: httpx hangs up when its iterator is dropped
        while not next(chunks)["choices"][0]["delta"].get("content"):
            pass
        yield r.headers["x-request-id"]


def test_a_whole_answer_has_text_and_usage(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=ask("What is rain?", max_tokens=12))
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["model"] == "small"
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].strip()
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] > 5
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 12


def test_a_streamed_answer_is_the_whole_answer_in_pieces(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "seed": 7}
    whole = client.post("/v1/chat/completions", json=ask("What is snow?", **fields)).json()
    body = ask("What is snow?", stream=True, stream_options={"include_usage": True}, **fields)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *content, last, usage = chunks[1:]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in content)
    assert text == whole["choices"][0]["message"]["content"]
    assert len(content) > 6
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12


def test_a_stream_without_include_usage_has_no_usage_chunk(client: httpx.Client) -> None:
    body = ask("What is hail?", stream=True, max_tokens=3)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert all(chunk["choices"] for chunk in chunks_of(response))


def test_tokens_arrive_while_later_ones_are_still_being_made(client: httpx.Client) -> None:
    body = ask(STORY, stream=True, max_tokens=60)
    began = time.monotonic()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        at_s = [time.monotonic() - began for _ in chunks_of(response)]
    assert at_s[1] < at_s[-1] / 2


def test_max_tokens_above_the_cap_is_the_cap(keyed_server: RunningServer) -> None:
    body = ask(STORY, max_tokens=10**9, temperature=0)
    with keyed_server.client(headers={"authorization": f"Bearer {API_KEY}"}) as client:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] <= 256


def test_max_completion_tokens_wins_over_max_tokens(client: httpx.Client) -> None:
    body = ask(STORY, max_completion_tokens=2, max_tokens=9)
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 2


def test_a_stop_string_ends_the_answer_before_it(client: httpx.Client) -> None:
    body = ask("Count from one to ten in digits.", temperature=0, max_tokens=60)
    free = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    stop = free["message"]["content"][10:13]
    held = client.post("/v1/chat/completions", json=body | {"stop": [stop]}).json()["choices"][0]
    assert held["finish_reason"] == "stop"
    assert stop not in held["message"]["content"]
    assert free["message"]["content"].startswith(held["message"]["content"])


def test_the_same_seed_gives_the_same_answer(client: httpx.Client) -> None:
    body = ask("Invent a name for a boat.", temperature=1.5, top_p=0.9, top_k=50, max_tokens=10)
    body |= {"repetition_penalty": 1.1, "seed": 42}
    # The first run fills the cache, which may change the arithmetic a little: compare later ones.
    first, second, third = (
        client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        for _ in range(3)
    )
    assert first
    assert second == third


def test_content_in_text_parts_is_the_text(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " fog?"}]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
    joined = client.post("/v1/chat/completions", json=ask("What is fog?", **fields)).json()
    body = {"messages": [{"role": "user", "content": parts}], **fields}
    split = client.post("/v1/chat/completions", json=body).json()
    assert split["usage"]["prompt_tokens"] == joined["usage"]["prompt_tokens"]


def test_emoji_come_through_whole(client: httpx.Client) -> None:
    body = ask("Repeat exactly: 🌦️ 🌊 ☃️", temperature=0, max_tokens=30, stream=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        text = "".join(
            chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks_of(response)
        )
    assert text
    assert "\ufffd" not in text


def test_models_lists_the_one_that_is_served(client: httpx.Client) -> None:
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    assert [entry["id"] for entry in body["data"]] == ["small"]


@pytest.mark.parametrize("model", ["", None])
def test_a_request_that_names_no_model_is_answered(client: httpx.Client, model: Any) -> None:
    body = ask("Hi", max_tokens=1) | {"model": model}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_each_request_leaves_one_line_in_the_log_without_its_text(server: RunningServer) -> None:
    with server.client() as client:
        body = ask("Say the word xylophone.", max_tokens=3)
        response = client.post("/v1/chat/completions", json=body)
    request_id = response.headers["x-request-id"]
    server.wait_for_event("request", lambda event: event["id"] == request_id)
    (line,) = (event for event in server.events("request") if event["id"] == request_id)
    assert line["status"] == 200
    assert line["completion_tokens"] == 3
    assert line["prompt_tokens"] > 0
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert "xylophone" not in server.log_text()


def test_a_client_that_leaves_while_tokens_come_frees_its_slot(server: RunningServer) -> None:
    with running_stream(server, max_tokens=400) as request_id:
        pass
    with server.client() as client:
        after = client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1))
    assert after.status_code == 200
    left = server.wait_for_event("request", lambda event: event["id"] == request_id)
    assert left["status"] == 499
    assert left["completion_tokens"] < 200


def test_a_client_that_leaves_during_a_long_prefill_frees_its_slot(server: RunningServer) -> None:
    """The prompt takes several seconds; n_batch bounds how long it goes on unasked."""
    seen = len(server.events("request"))
    long, short = ask("word " * 900, max_tokens=1), ask("Hi", max_tokens=1)
    with server.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=long, timeout=0.5)
        began = time.monotonic()
        assert client.post("/v1/chat/completions", json=short).status_code == 200
        waited_s = time.monotonic() - began
        # What it would have waited for: 8 batches. It waited for one, and its own answer.
        began = time.monotonic()
        assert client.post("/v1/chat/completions", json=long).status_code == 200
        whole_s = time.monotonic() - began
    assert waited_s < whole_s / 2
    left = server.events("request")[seen]
    assert left["status"] == 499
    assert left["completion_tokens"] == 0


def test_a_client_that_leaves_the_queue_leaves_its_place(server: RunningServer) -> None:
    with running_stream(server, max_tokens=400), server.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1), timeout=0.2)
        # The queue holds one: were the place still taken, this would be a 503 at once.
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1), timeout=0.2)


def test_one_request_too_many_is_told_to_come_back(server: RunningServer) -> None:
    """One slot and a queue of one: the third at a time is refused, the second is not."""
    answers: list[httpx.Response] = []

    def wait_in_line() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1)))

    with running_stream(server, max_tokens=400):
        second = threading.Thread(target=wait_in_line)
        second.start()
        time.sleep(0.8)
        with server.client() as client:
            third = client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1))
            assert client.get("/health").status_code == 200
    second.join()
    assert third.status_code == 503
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert third.json()["error"]["code"] == "overloaded"
    assert answers[0].status_code == 200


def test_clients_that_come_and_go_leave_every_slot_free(keyed_server: RunningServer) -> None:
    """Twelve clients over two slots; each hangs up at another moment, in each state there is."""
    headers = {"authorization": f"Bearer {API_KEY}"}

    def come_and_go(patience_s: float) -> None:
        with (
            keyed_server.client(headers=headers) as client,
            contextlib.suppress(httpx.TimeoutException),
        ):
            for stream in (True, False):
                body = ask(STORY, max_tokens=30, stream=stream)
                client.post("/v1/chat/completions", json=body, timeout=patience_s)

    crowd = [threading.Thread(target=come_and_go, args=(0.01 + 0.06 * n,)) for n in range(12)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()

    def ask_once(answers: list[int]) -> None:
        with keyed_server.client(headers=headers) as client:
            body = ask("Hi", max_tokens=1)
            answers.append(client.post("/v1/chat/completions", json=body).status_code)

    # Two slots and a queue of eight: ten fit at a time. The last of the crowd may still be on
    # their way out; a slot that was lost would be lost for good.
    deadline = time.monotonic() + 30
    answers: list[int] = []
    while answers != [200] * 10 and time.monotonic() < deadline:
        answers = []
        crowd = [threading.Thread(target=ask_once, args=(answers,)) for _ in range(10)]
        for one in crowd:
            one.start()
        for one in crowd:
            one.join()
    assert answers == [200] * 10


def test_two_slots_answer_two_clients_at_a_time(keyed_server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {API_KEY}"}
    body = ask(STORY, max_tokens=100, stream=True, temperature=0)
    with (
        keyed_server.client(headers=headers) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as first,
    ):
        seen = chunks_of(first)
        next(seen)
        second = client.post("/v1/chat/completions", json=ask("Hi", max_tokens=1))
        assert second.status_code == 200
        rest = list(seen)
    assert rest[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_the_system_prompt_is_in_front_and_already_cached(keyed_server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {API_KEY}"}
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    with keyed_server.client(headers=headers) as client:
        ours = client.post("/v1/chat/completions", json=ask("Hello there", max_tokens=1)).json()
        theirs = client.post("/v1/chat/completions", json={"messages": own, "max_tokens": 1}).json()
    # The station's prompt is longer than theirs, so it was added to one and not to the other.
    assert ours["usage"]["prompt_tokens"] > theirs["usage"]["prompt_tokens"]
    assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] >= 15
