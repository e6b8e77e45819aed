"""OpenAI's own Python client, unchanged, against a real server: what it is written for works."""

from __future__ import annotations

import asyncio
import enum
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

from .conftest import API_KEY, ONE_SLOT, RunningServer, StartServer

STORY = "Write a very long story about a lighthouse, with many details."
# Greedy, so that two ways of asking can be compared.
SAME: dict[str, Any] = {"temperature": 0, "seed": 7}


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def client_of(server: RunningServer, **options: Any) -> openai.OpenAI:
    chosen = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", **chosen)


def async_client_of(server: RunningServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    )


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """As the session's, of its own: its log and its slot are read here."""
    server = start_server(**ONE_SLOT)
    server.wait_until_ready()
    return server


@pytest.fixture(scope="module")
def ai(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


# Chat


def test_a_chat_is_answered_whole_and_streamed_with_the_same_text(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": said("What is fog?"), "max_tokens": 24}
    whole = ai.chat.completions.create(**asked, **SAME)
    assert whole.object == "chat.completion"
    assert whole.model == "small"
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24

    with ai.chat.completions.create(
        **asked, **SAME, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert text_of(chunks) == choice.message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_without_include_usage_no_chunk_has_any(ai: openai.OpenAI) -> None:
    asked = ai.chat.completions.create(
        model="small", messages=said("Hi"), max_tokens=2, stream=True
    )
    chunks = list(asked)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_async_client_says_the_same_as_the_sync_one(
    ai: openai.OpenAI, server: RunningServer
) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": said("What is rain?"), "max_tokens": 12}
    told: dict[str, Any] = {"model": "small", "prompt": "Rain is", "max_tokens": 12}

    async def ask() -> tuple[str | None, str, str, str]:
        async with async_client_of(server) as client:
            whole = await client.chat.completions.create(**asked, **SAME)
            stream = await client.chat.completions.create(**asked, **SAME, stream=True)
            chunks = [chunk async for chunk in stream]
            text = await client.completions.create(**told, **SAME)
            texts = await client.completions.create(**told, **SAME, stream=True)
            streamed = [chunk.choices[0].text async for chunk in texts]
            await client.models.list()
            return (
                whole.choices[0].message.content,
                text_of(chunks),
                text.choices[0].text,
                "".join(streamed),
            )

    whole, streamed, text, texts = asyncio.run(ask())
    sync = ai.chat.completions.create(**asked, **SAME)
    assert whole == streamed == sync.choices[0].message.content
    assert text == texts == ai.completions.create(**told, **SAME).choices[0].text


def test_both_names_of_the_token_limit_limit(ai: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit: dict[str, Any] = {name: 3}
        answer = ai.chat.completions.create(model="small", messages=said(STORY), **limit)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(ai: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": said("What is fog?"), "max_tokens": 40}
    free = ai.chat.completions.create(**asked, **SAME).choices[0].message.content
    assert free is not None
    stop = free.split()[4]
    answer = ai.chat.completions.create(**asked, **SAME, stop=[stop, "never said"], stream=stream)
    if isinstance(answer, openai.Stream):
        chunks = list(answer)
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text == free[: free.index(stop)]
    assert reason == "stop"


def test_with_a_seed_even_a_hot_answer_is_the_same_twice(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": said(STORY), "max_tokens": 16}

    def answer(**sampling: Any) -> str | None:
        hot = ai.chat.completions.create(**asked, temperature=1.5, top_p=0.95, **sampling)
        return hot.choices[0].message.content

    assert answer(seed=1) == answer(seed=1)
    assert len({answer(seed=seed) for seed in range(2, 6)}) > 1


def test_turns_of_a_conversation_are_all_read(ai: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "My cat is called Miso."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": [{"type": "text", "text": "What is my cat called?"}]},
    ]
    answer = ai.chat.completions.create(model="small", messages=messages, max_tokens=16, **SAME)
    assert "Miso" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    again = ai.chat.completions.create(model="small", messages=messages, max_tokens=1, **SAME)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 20


# Completions


def test_a_completion_is_answered_whole_and_streamed_with_the_same_text(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "The three primary colours are"}
    whole = ai.completions.create(**asked, **SAME)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 16  # the default of this route
    stream = ai.completions.create(
        **asked, **SAME, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_completion_keeps_to_its_stop_and_takes_a_list_of_one(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "max_tokens": 30, **SAME}
    free = ai.completions.create(prompt="One, two, three,", **asked).choices[0].text
    stop = free.split()[2]
    held = ai.completions.create(prompt=["One, two, three,"], stop=stop, **asked).choices[0]
    assert held.text == free[: free.index(stop)]
    assert held.finish_reason == "stop"


# Formats

STATION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sky": {"enum": ["clear", "cloudy", "fog"], "description": "as seen from the station"},
        "wind_knots": {"type": "integer", "minimum": 0, "maximum": 99},
        "gusts": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
    },
    "required": ["sky", "wind_knots", "gusts", "note"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_keeps_to_a_json_schema(ai: openai.OpenAI, stream: bool) -> None:
    """At any temperature: a small model left to itself would not even write JSON."""
    asked: dict[str, Any] = {
        "model": "small",
        "messages": said("Report the weather."),
        "temperature": 1.2,
        "max_tokens": 200,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "station", "schema": STATION, "strict": True},
        },
    }
    for seed in range(3):
        answer = ai.chat.completions.create(**asked, seed=seed, stream=stream)
        if isinstance(answer, openai.Stream):
            text = text_of(list(answer))
        else:
            text = answer.choices[0].message.content or ""
        report = json.loads(text)
        assert set(report) == set(STATION["properties"])
        assert report["sky"] in ("clear", "cloudy", "fog")
        assert 0 <= report["wind_knots"] <= 99
        assert 1 <= len(report["gusts"]) <= 3
        assert report["note"] is None or len(report["note"]) <= 20


class Report(pydantic.BaseModel):
    """What pydantic and the client make of it: title, description, $defs, $ref, default, anyOf."""

    class Sky(enum.Enum):
        CLEAR = "clear"
        FOG = "fog"

    sky: Sky
    wind_knots: int = pydantic.Field(ge=0, le=99, description="over ten minutes")
    visible: bool | None
    gusts: list[int] = pydantic.Field(max_length=2)


def test_the_clients_own_helpers_fill_a_pydantic_model(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "small",
        "messages": said("Report the weather."),
        "max_tokens": 200,
        "response_format": Report,
    }
    whole = ai.chat.completions.parse(**asked, **SAME)
    assert isinstance(whole.choices[0].message.parsed, Report)
    with ai.chat.completions.stream(**asked, **SAME) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion()
    assert len(texts) > 5
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


def test_an_answer_in_json_object_format_is_one(ai: openai.OpenAI) -> None:
    """Cut short by max_tokens it is a piece of one, as at OpenAI: this prompt ends by itself."""
    answer = ai.chat.completions.create(
        model="small",
        messages=said('Answer with this JSON and nothing else: {"sky": "clear"}'),
        max_tokens=200,
        response_format={"type": "json_object"},
        **SAME,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_a_schema_that_cannot_be_kept_is_a_bad_request_that_names_the_keyword(
    ai: openai.OpenAI,
) -> None:
    # llama.cpp would loop on this one for ever, and with it everybody's answers.
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 5, "maxItems": 2}
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(
            model="small",
            messages=said("Hi"),
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
        )
    assert caught.value.param == "response_format.json_schema.schema.minItems"


# Models, errors


def test_the_one_model_is_listed_and_retrieved(ai: openai.OpenAI) -> None:
    (listed,) = ai.models.list().data
    assert listed.id == "small"
    assert ai.models.retrieve("small") == listed
    with pytest.raises(openai.NotFoundError) as caught:
        ai.models.retrieve("gpt-9/large")
    assert caught.value.code == "model_not_found"


def test_what_is_wrong_is_raised_as_openais_errors_with_the_field(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ai.chat.completions.create(model="small", messages=said("Hi"), temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as bad:
        ai.completions.create(model="small", prompt=[[1, 2, 3]])
    assert bad.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        ai.completions.create(model="gpt-9", prompt="Hi")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as long:
        ai.chat.completions.create(model="small", messages=said("word " * 3000), stream=True)
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as long:
        ai.completions.create(model="small", prompt="word " * 3000)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.APIStatusError) as large:
        ai.completions.create(model="small", prompt="x" * 70_000)
    assert large.value.status_code == 413


def test_a_wrong_key_is_an_authentication_error_and_the_right_one_none(
    keyed_server: RunningServer,
) -> None:
    with client_of(keyed_server, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with client_of(keyed_server, api_key=API_KEY) as client:
        assert client.models.list().data
        answer = client.chat.completions.create(model="small", messages=said("Hi"), max_tokens=1)
        assert answer.choices


# Room


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@contextmanager
def busy(server: RunningServer) -> Iterator[str]:
    """The one slot taken, by a stream whose first token has come: its id. Closed at the end."""
    with (
        client_of(server) as client,
        client.chat.completions.create(
            model="small", messages=said(STORY), max_tokens=400, stream=True, **SAME
        ) as stream,
    ):
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        yield chunk.id


def test_a_stream_that_is_closed_frees_its_slot(ai: openai.OpenAI, server: RunningServer) -> None:
    with busy(server) as request_id:
        pass
    began = time.monotonic()
    ai.chat.completions.create(model="small", messages=said("Hi"), max_tokens=1)
    assert time.monotonic() - began < 5
    left = server.wait_for_event("request", lambda event: event["id"] == request_id)
    assert left["status"] == 499
    assert left["completion_tokens"] < 200


def test_an_async_task_that_is_cancelled_frees_its_slot(
    ai: openai.OpenAI, server: RunningServer
) -> None:
    seen = len(server.events("request"))

    async def leave() -> None:
        async with async_client_of(server) as client:
            stream = await client.chat.completions.create(
                model="small", messages=said(STORY), max_tokens=400, stream=True
            )

            async def read() -> None:
                async for _ in stream:
                    first.set()

            first = asyncio.Event()
            reading = asyncio.create_task(read())
            await first.wait()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.close()

    asyncio.run(leave())
    ai.chat.completions.create(model="small", messages=said("Hi"), max_tokens=1)
    assert server.events("request")[seen]["status"] == 499


def test_overload_is_an_error_of_the_server_that_says_when_to_come_back(
    server: RunningServer,
) -> None:
    """One slot, a queue of one: the third is refused, and retried by the client by itself."""
    patient: list[str | None] = []

    def wait_in_line() -> None:
        with client_of(server) as client:
            answer = client.chat.completions.create(
                model="small", messages=said("Hi"), max_tokens=1
            )
            patient.append(answer.choices[0].finish_reason)

    second = threading.Thread(target=wait_in_line)
    with busy(server):
        second.start()
        wait_until_one_waits(server)
        with client_of(server) as client, pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="small", messages=said("Hi"), max_tokens=1)
    second.join()
    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert patient == ["length"]


def test_the_clients_own_retries_get_it_through_an_overload(server: RunningServer) -> None:
    rejected: list[int] = []
    answers: list[str | None] = []

    def wait_in_line() -> None:
        with client_of(server) as client:
            client.chat.completions.create(model="small", messages=said("Hi"), max_tokens=1)

    def retry() -> None:
        with client_of(server, max_retries=4) as client:
            raw = client.chat.completions.with_raw_response.create(
                model="small", messages=said("Hi"), max_tokens=1
            )
            rejected.append(raw.retries_taken)
            answers.append(raw.parse().choices[0].finish_reason)

    second, third = threading.Thread(target=wait_in_line), threading.Thread(target=retry)
    seen = len([event for event in server.events("request") if event["status"] == 503])
    with busy(server):
        second.start()
        wait_until_one_waits(server)
        third.start()
        until = time.monotonic() + 20
        while time.monotonic() < until and seen >= len(
            [event for event in server.events("request") if event["status"] == 503]
        ):
            time.sleep(0.02)
    second.join()
    third.join()
    assert rejected[0] >= 1
    assert answers == ["length"]


def wait_until_one_waits(server: RunningServer) -> None:
    """By the server's own count of its queue."""
    until = time.monotonic() + 20
    with server.client() as client:
        while time.monotonic() < until:
            lines = client.get("/metrics").text.splitlines()
            if any(re.fullmatch(r"edgellm_queue_depth({.*})? 1\.0", line) for line in lines):
                return
            time.sleep(0.02)
    raise AssertionError("nobody waited in the queue")
