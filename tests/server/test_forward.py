"""The forwarding engine, before real servers, and before what real servers elsewhere send.

Real: llama.cpp's own llama-server (it is inside the pinned xllamacpp) and our own server. What only
vLLM, TGI, Ollama or a broken server sends comes from a scripted one, word for word.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from edgellm_server.config import ServerConfig
from edgellm_server.engine import (
    Accepted,
    BusyError,
    EngineError,
    Event,
    Finished,
    Generation,
    PromptTooLongError,
    RefusedError,
    Token,
)
from edgellm_server.forward import EventReader, ForwardEngine
from edgellm_server.request import ChatRequest, CompletionRequest, Message

from .conftest import API_KEY, SYSTEM_PROMPT, RunningServer, StartServer, free_port

KEY = "llama-servers-own-key"
T = TypeVar("T")

LLAMA_SERVER = """
import json, signal, sys
import xllamacpp

asked = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = asked["model"]
params.n_parallel = 2
params.n_ctx = 512 * 2
params.n_batch = params.n_ubatch = 64
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_ram_mib = 0
params.fit_params = False
params.warmup = False
params.verbosity = 1
params.hostnames = ["127.0.0.1"]
params.port = asked["port"]
params.api_keys = [asked["key"]]
params.endpoint_slots = True
params.ui = False
server = xllamacpp.Server(params)
signal.pause()
"""


class LlamaServer:
    """llama-server in a process of its own: two slots of 512 tokens, a key."""

    def __init__(self, model_path: Path, port: int | None = None) -> None:
        self._model_path = model_path
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        asked = {"model": str(self._model_path), "port": self.port, "key": KEY}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LLAMA_SERVER, json.dumps(asked)], stderr=subprocess.DEVNULL
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Directly, past our engine."""
        with httpx.Client(trust_env=False, timeout=30) as client:
            headers = {"authorization": f"Bearer {KEY}"}
            answer = client.post(f"{self.url}{path}", json=body, headers=headers).json()
        assert isinstance(answer, dict)
        return answer

    def busy_slots(self) -> int:
        with httpx.Client(trust_env=False) as client:
            url = self.url.removesuffix("/v1") + "/slots"
            slots = client.get(url, headers={"authorization": f"Bearer {KEY}"}).json()
        return sum(slot["is_processing"] for slot in slots)

    async def wait_for_busy_slots(self, n_busy: int, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while (have := await asyncio.to_thread(self.busy_slots)) != n_busy:
            assert time.monotonic() < until, f"{have} slots are busy, not {n_busy}"
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def upstream(model_path: Path) -> Iterator[LlamaServer]:
    server = LlamaServer(model_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_upstream(model_path: Path) -> Iterator[LlamaServer]:
    """Not started, and for this test alone."""
    server = LlamaServer(model_path)
    yield server
    server.kill()


def config_for(url: str, key: str | None = None, **fields: Any) -> ServerConfig:
    config = ServerConfig.from_environ(
        {
            "EDGELLM_ENGINE": "forward",
            "EDGELLM_MODEL_NAME": "small",
            "EDGELLM_N_PARALLEL": "2",
            "EDGELLM_UPSTREAM_URL": url,
        }
    )
    return dataclasses.replace(config, upstream_key=key, **fields)


def with_engine(config: ServerConfig, scenario: Callable[[ForwardEngine], Awaitable[T]]) -> T:
    """Load, do it, stop; on a loop of its own."""

    async def run() -> T:
        engine = ForwardEngine(config, load_deadline_s=30)
        try:
            await engine.load()
            return await scenario(engine)
        finally:
            await engine.stop()

    return asyncio.run(run())


def load_error(config: ServerConfig) -> str:
    async def run() -> str:
        engine = ForwardEngine(config, load_deadline_s=20)
        try:
            with pytest.raises(EngineError) as caught:
                await engine.load()
        finally:
            await engine.stop()
        return str(caught.value)

    return asyncio.run(run())


def ask(text: str = "Hi", max_tokens: int = 8, **fields: Any) -> ChatRequest:
    return ChatRequest(
        messages=(Message(role="user", content=text),), max_tokens=max_tokens, **fields
    )


# An answer that cannot end before its tokens do.
MANY_NUMBERS = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "strict": True,
        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 500},
    },
}


async def events_of(generation: Generation) -> list[Event]:
    events = [event async for event in generation.events()]
    await asyncio.wait_for(generation.ended, 5)
    return events


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


def last_of(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


# llama-server


def test_an_answer_is_what_llama_server_says_itself(upstream: LlamaServer) -> None:
    events = with_engine(
        config_for(upstream.url, KEY),
        lambda engine: events_of(
            engine.chat(ask("What is snow?", 24, sampling={"temperature": 0, "seed": 7}))
        ),
    )
    messages = [{"role": "user", "content": "What is snow?"}]
    direct = upstream.ask("/chat/completions", messages=messages, max_tokens=24, temperature=0)
    assert text_of(events) == direct["choices"][0]["message"]["content"]
    assert events[0] == Accepted()
    assert len(events) > 20
    finished = last_of(events)
    assert finished.reason == direct["choices"][0]["finish_reason"] == "length"
    assert finished.usage.completion_tokens == 24
    assert finished.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    assert finished.timings is not None
    assert finished.timings.predicted_ms > 0


def test_a_text_is_continued_as_llama_server_continues_it(upstream: LlamaServer) -> None:
    request = CompletionRequest(prompt="Snow is", max_tokens=12, sampling={"temperature": 0})
    events = with_engine(
        config_for(upstream.url, KEY, system_prompt=SYSTEM_PROMPT),
        lambda engine: events_of(engine.complete(request)),
    )
    direct = upstream.ask("/completions", prompt="Snow is", max_tokens=12, temperature=0)
    assert text_of(events) == direct["choices"][0]["text"]
    assert last_of(events).usage.prompt_tokens == direct["usage"]["prompt_tokens"]


def test_the_system_prompt_is_in_the_upstreams_cache_once_loaded(upstream: LlamaServer) -> None:
    async def scenario(engine: ForwardEngine) -> list[Event]:
        return await events_of(engine.chat(ask("Rain?", 4)))

    prompt = SYSTEM_PROMPT + " You never speak of yesterday."
    events = with_engine(config_for(upstream.url, KEY, system_prompt=prompt), scenario)
    usage = last_of(events).usage
    assert usage.cached_tokens > 20
    assert usage.prompt_tokens - usage.cached_tokens < 15


def test_a_stop_string_and_a_schema_reach_the_upstream(upstream: LlamaServer) -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    described = {"name": "weather", "strict": True, "schema": schema}

    async def scenario(engine: ForwardEngine) -> tuple[list[Event], list[Event]]:
        stopped = engine.chat(ask("Count to 5.", 40, stop=("3",), sampling={"temperature": 0}))
        formatted = ask(
            "Is rain wet?", 30, response_format={"type": "json_schema", "json_schema": described}
        )
        return await events_of(stopped), await events_of(engine.chat(formatted))

    stopped, formatted = with_engine(config_for(upstream.url, KEY), scenario)
    assert "3" not in text_of(stopped)
    assert last_of(stopped).reason == "stop"
    assert isinstance(json.loads(text_of(formatted))["wet"], bool)


def test_a_prompt_that_is_too_long_is_told_with_both_numbers(upstream: LlamaServer) -> None:
    async def scenario(engine: ForwardEngine) -> PromptTooLongError:
        with pytest.raises(PromptTooLongError) as caught:
            await events_of(engine.chat(ask("snow " * 700)))
        return caught.value

    error = with_engine(config_for(upstream.url, KEY), scenario)
    assert error.n_ctx == 512
    assert 700 < error.n_prompt_tokens < 800


def test_cancel_frees_the_upstreams_slot_in_decode_and_in_prefill(upstream: LlamaServer) -> None:
    async def scenario(engine: ForwardEngine) -> None:
        writing = engine.chat(ask("Count.", 400, response_format=MANY_NUMBERS))
        events = writing.events()
        while not isinstance(await anext(events), Token):
            pass
        await upstream.wait_for_busy_slots(1, 2)
        writing.cancel()
        writing.cancel()
        await asyncio.wait_for(writing.ended, 0.5)
        assert [event async for event in events if isinstance(event, Finished)] == []
        await upstream.wait_for_busy_slots(0, 2)

        reading = engine.chat(ask("rain and snow " * 130, 400))
        await upstream.wait_for_busy_slots(1, 2)
        reading.cancel()
        await asyncio.wait_for(reading.ended, 0.5)
        await upstream.wait_for_busy_slots(0, 2)

    with_engine(config_for(upstream.url, KEY), scenario)


def test_a_hundred_cancelled_answers_leave_no_connection_behind(upstream: LlamaServer) -> None:
    async def scenario(engine: ForwardEngine) -> None:
        for number in range(100):
            generation = engine.chat(ask("Write a long story.", 100))
            # From before the connection is open to some tokens in.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(events_of(generation), number * 0.0005)
            generation.cancel()
            await asyncio.wait_for(generation.ended, 5)
        answers = await asyncio.gather(*(events_of(engine.chat(ask())) for _ in range(2)))
        assert all(text_of(events) for events in answers)

    with_engine(config_for(upstream.url, KEY), scenario)


def test_leaving_in_the_moment_the_answer_ends_costs_no_connection(upstream: LlamaServer) -> None:
    """A cancel then, which every stream's end brings, must leave the closing alone."""

    async def scenario(engine: ForwardEngine) -> None:
        for number in range(40):
            generation = engine.chat(ask("Hi", 2))
            async for event in generation.events():
                if isinstance(event, Finished):
                    for _ in range(number % 8):
                        await asyncio.sleep(0)
                    generation.cancel()
                    break
            await asyncio.wait_for(generation.ended, 5)
            assert engine._client._transport._pool.connections == []  # type: ignore[attr-defined]
        assert text_of(await events_of(engine.chat(ask())))

    with_engine(config_for(upstream.url, KEY), scenario)


def test_one_answer_after_the_other_never_fails(upstream: LlamaServer) -> None:
    """On kept connections one in seven did: llama-server closes them after a stream."""

    async def scenario(engine: ForwardEngine) -> None:
        for _ in range(60):
            last_of(await events_of(engine.chat(ask("Hi", 1))))

    with_engine(config_for(upstream.url, KEY), scenario)


def test_load_waits_for_an_upstream_that_starts_later(own_upstream: LlamaServer) -> None:
    async def run() -> None:
        engine = ForwardEngine(config_for(own_upstream.url, KEY), load_deadline_s=30)
        loading = asyncio.create_task(engine.load())
        while "ConnectError" not in (engine.waiting_for or ""):
            await asyncio.sleep(0.01)
        own_upstream.start()
        await loading
        assert engine.waiting_for is None
        assert text_of(await events_of(engine.chat(ask())))
        await engine.stop()

    asyncio.run(run())


def test_load_gives_up_after_its_deadline_and_says_what_it_waited_for() -> None:
    async def run() -> None:
        url = f"http://127.0.0.1:{free_port()}/v1"
        engine = ForwardEngine(config_for(url), load_deadline_s=0.5)
        with pytest.raises(EngineError, match=r"waited 0\.5 s .*ConnectError"):
            await engine.load()
        await engine.stop()

    asyncio.run(run())


def test_an_upstream_killed_in_mid_answer_is_an_engine_error_and_comes_back(
    own_upstream: LlamaServer,
) -> None:
    own_upstream.start()

    async def scenario(engine: ForwardEngine) -> None:
        events = engine.chat(ask("Count.", 400, response_format=MANY_NUMBERS)).events()
        while not isinstance(await anext(events), Token):
            pass
        own_upstream.kill()
        with pytest.raises(EngineError):
            async for _ in events:
                pass
        with pytest.raises(EngineError, match="ConnectError"):
            await events_of(engine.chat(ask()))
        own_upstream.start()
        await engine.load()
        assert text_of(await events_of(engine.chat(ask())))

    with_engine(config_for(own_upstream.url, KEY), scenario)


def test_a_wrong_key_or_model_ends_the_load_with_a_clear_sentence(
    upstream: LlamaServer, model_path: Path
) -> None:
    with_engine(config_for(upstream.url, KEY), lambda engine: events_of(engine.chat(ask())))
    told = load_error(config_for(upstream.url, "not-the-key"))
    assert "401: Invalid API Key" in told
    assert "EDGELLM_UPSTREAM_KEY_FILE" in told
    assert "not-the-key" not in told
    # llama-server itself would answer for any name with the model it has.
    told = load_error(config_for(upstream.url, KEY, upstream_model="qwen2.5-7b"))
    assert "want the model qwen2.5-7b, have " in told
    assert str(model_path) in told


# Our own server as the upstream


def test_our_own_server_is_an_upstream_like_any_other(keyed_server: RunningServer) -> None:
    async def scenario(engine: ForwardEngine) -> tuple[list[Event], PromptTooLongError]:
        events = await events_of(engine.chat(ask("Hail?", 12, sampling={"temperature": 0})))
        with pytest.raises(PromptTooLongError) as caught:
            await events_of(engine.chat(ask("snow " * 700)))
        return events, caught.value

    url = f"{keyed_server.url}/v1"
    events, error = with_engine(config_for(url, API_KEY), scenario)
    with keyed_server.client(headers={"authorization": f"Bearer {API_KEY}"}) as client:
        body = {
            "messages": [{"role": "user", "content": "Hail?"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        direct = client.post("/v1/chat/completions", json=body).json()
    assert text_of(events) == direct["choices"][0]["message"]["content"]
    assert last_of(events).usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    assert error.n_ctx == 512
    assert error.n_prompt_tokens > 700
    told = load_error(config_for(keyed_server.url, API_KEY))
    assert "does the upstream's URL end in /v1?" in told


def test_an_overloaded_upstream_is_busy_and_says_until_when(server: RunningServer) -> None:
    """One slot and a queue of one behind three slots of ours."""

    async def scenario(engine: ForwardEngine) -> list[BusyError]:
        generations = [engine.chat(ask("Write a long story.", 40)) for _ in range(3)]
        results = await asyncio.gather(*map(events_of, generations), return_exceptions=True)
        assert sum(isinstance(result, list) for result in results) == 2
        return [result for result in results if isinstance(result, BusyError)]

    (busy,) = with_engine(config_for(f"{server.url}/v1", n_parallel=3), scenario)
    assert "overloaded" in str(busy)
    assert 1 <= busy.retry_after_s <= 60


# What other servers send


class Scripted:
    """Answers each POST with the next of `replies`, raw; the last one again and again."""

    def __init__(self, *replies: bytes, owned_by: str = "someone", hangs: bool = False) -> None:
        self._replies = replies
        self._owned_by = owned_by
        self._hangs = hangs  # after the reply, for ever
        self.asked: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.gone = asyncio.Event()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /v1/models "):
                entry = {"id": "m", "object": "model", "owned_by": self._owned_by}
                writer.write(whole(200, {"object": "list", "data": [entry]}))
            else:
                lines = head.lower().split(b"\r\n")
                length = next(int(ln[15:]) for ln in lines if ln.startswith(b"content-length:"))
                self.asked.append(json.loads(await reader.readexactly(length)))
                self.heads.append(head)
                writer.write(self._replies[min(len(self.asked), len(self._replies)) - 1])
                await writer.drain()
                if self._hangs:
                    await reader.read()
                    self.gone.set()
            await writer.drain()
            writer.close()


def whole(status: int, body: object, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(data)}", *headers]
    if not any(line.startswith("content-type") for line in headers):
        lines.append("content-type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + data


def stream(events: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + events
    )


def chunk(delta: dict[str, Any] | None = None, reason: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def says(text: str) -> bytes:
    return chunk({"content": text})


DONE = b"data: [DONE]\n\n"
STOP = chunk({}, "stop")
USAGE = chunk(usage={"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11})
PLAIN = stream(chunk({"role": "assistant", "content": None}) + says("Hel") + says("lo"))
PLAIN += STOP + USAGE + DONE


def with_scripted(
    scripted: Scripted, scenario: Callable[[ForwardEngine], Awaitable[T]], **fields: Any
) -> T:
    """Without load(): the script is for the scenario's own requests."""

    async def run() -> T:
        async with scripted.listening() as url:
            engine = ForwardEngine(config_for(url, **fields))
            try:
                return await scenario(engine)
            finally:
                await engine.stop()

    return asyncio.run(run())


def answer_to(*replies: bytes, request: ChatRequest | None = None) -> list[Event]:
    scenario = lambda engine: events_of(engine.chat(request or ask()))  # noqa: E731
    return with_scripted(Scripted(*replies), scenario)


def error_to(*replies: bytes) -> Exception:
    async def scenario(engine: ForwardEngine) -> Exception:
        with pytest.raises((EngineError, BusyError, RefusedError, PromptTooLongError)) as caught:
            await events_of(engine.chat(ask()))
        return caught.value

    return with_scripted(Scripted(*replies), scenario)


@pytest.mark.parametrize(
    "events",
    [
        pytest.param(says("Hel") + says("lo") + STOP + USAGE + DONE, id="plain"),
        pytest.param(
            (says("Hel") + says("lo") + STOP + USAGE + DONE).replace(b"\n", b"\r\n"), id="CRLF"
        ),
        pytest.param(
            (says("Hel") + says("lo") + STOP + USAGE + DONE).replace(b"\n", b"\r"), id="CR"
        ),
        pytest.param(
            b"\xef\xbb\xbf: hello\n\nretry: 3\n\nevent: ping\n\n:\n\nid: 7\n"
            + says("Hel")
            + b": ping\n\n"
            + says("lo")
            + STOP
            + USAGE
            + DONE,
            id="BOM, comments, pings, ids",
        ),
        pytest.param(
            says("Hel").replace(b"data: {", b"data: {\ndata:") + says("lo") + STOP + USAGE + DONE,
            id="data over several lines",
        ),
        pytest.param(says("Hel") + says("lo") + STOP + USAGE, id="no end mark"),
        pytest.param(
            says("Hel") + says("lo") + STOP + USAGE + b"data: [DONE]", id="no last empty line"
        ),
        pytest.param(
            chunk(prompt_filter_results=[])
            + chunk({"role": "assistant", "content": None}, usage=None)
            + chunk({"role": "assistant", "content": ""}, error=None)
            + chunk({"content": "Hel"}, usage={"prompt_tokens": 9, "completion_tokens": 1})
            + chunk({"content": "lo"}, "eos_token")
            + USAGE
            + DONE,
            id="filters, roles, running usage, TGI's reason",
        ),
        pytest.param(
            chunk({"reasoning_content": "Let me think."})
            + chunk({"reasoning": "Hm."})
            + says("Hel")
            + says("lo")
            + STOP
            + USAGE
            + DONE,
            id="reasoning",
        ),
        pytest.param(
            says("Hel").replace(b"data: ", b"data:") + says("lo") + STOP + USAGE + DONE,
            id="no space after data:",
        ),
    ],
)
def test_every_way_to_stream_an_answer_gives_the_same_events(events: bytes) -> None:
    got = answer_to(stream(events))
    assert text_of(got) == "Hello"
    assert got[0] == Accepted()
    assert got.count(Accepted()) == 1
    finished = last_of(got)
    assert (finished.reason, finished.usage.prompt_tokens) == ("stop", 9)
    assert finished.usage.completion_tokens == 2


def test_events_are_the_same_wherever_the_bytes_are_cut() -> None:
    data = (
        "event: a\r\ndata: größe\r\n\r\n: x\n\ndata: 雪\ndata: 2\n\rdata: 🌨\r\rdata: last".encode()
    )
    want = [("a", "größe"), ("", "雪\n2"), ("", "🌨"), ("", "last")]
    for cut in range(len(data) + 1):
        for width in (1, 2, 3, len(data)):
            reader = EventReader()
            pieces = [data[:cut]]
            pieces += [data[at : at + width] for at in range(cut, len(data), width)]
            got = [event for piece in pieces for event in reader.feed(piece)]
            assert [*got, *reader.close()] == want


def test_usage_is_counted_where_the_upstream_gives_none() -> None:
    finished = last_of(answer_to(stream(says("Hel") + says("lo") + STOP + DONE)))
    assert finished.usage.completion_tokens == 2
    assert finished.usage.prompt_tokens == 0
    cut = answer_to(stream(says("Hel") + says("lo") + DONE), request=ask(max_tokens=2))
    assert last_of(cut).reason == "length"


def test_a_character_cut_in_two_arrives_whole() -> None:
    halves = rb'data: {"choices":[{"delta":{"content":"\ud83c"}}]}' + b"\n\n"
    halves += rb'data: {"choices":[{"delta":{"content":"\udf28!"}}]}' + b"\n\n"
    assert text_of(answer_to(stream(halves + STOP + DONE))) == "🌨!"
    lone = rb'data: {"choices":[{"delta":{"content":"x\ud83c"}}]}' + b"\n\n"
    assert text_of(answer_to(stream(lone + STOP + DONE))) == "x\N{REPLACEMENT CHARACTER}"


TOO_LONG = {
    "vLLM": "This model's maximum context length is 2048 tokens. However, you requested 2600 "
    "tokens (2400 in the messages, 200 in the completion). Please reduce the length of the "
    "messages or completion.",
    "vLLM, later": "This model's maximum context length is 2048 tokens. However, your request has "
    "2400 input tokens. Please reduce the length of the input messages.",
    "OpenAI": "This model's maximum context length is 2048 tokens. However, your messages "
    "resulted in 2400 tokens. Please reduce the length of the messages.",
    "vLLM, the prompt alone": "The decoder prompt (length 2400) is longer than the maximum model "
    "length of 2048. Make sure that `max_model_len` is no smaller than the number of text tokens.",
    "SGLang": "The input (2400 tokens) is longer than the model's context length (2048 tokens).",
    "TGI": "Input validation error: `inputs` must have less than 2048 tokens. Given: 2400",
    "llama-server": "request (2400 tokens) exceeds the available context size (2048 tokens), try "
    "increasing it",
}


@pytest.mark.parametrize("message", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_both_numbers_are_read_from_every_servers_words(message: str) -> None:
    error = error_to(whole(400, {"error": {"message": message, "type": "BadRequestError"}}))
    assert isinstance(error, PromptTooLongError)
    assert (error.n_prompt_tokens, error.n_ctx) == (2400, 2048)


@pytest.mark.parametrize(
    ("reply", "kind", "told"),
    [
        (whole(429, {"error": "Model is overloaded", "error_type": "overloaded"}), BusyError, "M"),
        (whole(503, {"error": {"message": "server busy"}}), BusyError, "server busy"),
        (whole(503, b"", "retry-after: Wed, 21 Oct 2026 07:28:00 GMT"), BusyError, "no reason"),
        (whole(400, {"error": {"message": "no such grammar"}}), RefusedError, "no such grammar"),
        (whole(422, {"detail": [{"loc": ["body", "x"]}]}), RefusedError, "body"),
        (whole(400, {"object": "error", "message": "old", "code": 400}), RefusedError, "old"),
        (whole(401, {"error": {"message": "no, k-e-y"}}), EngineError, "401: no, ***; EDGELLM_UP"),
        (whole(403, b"forbidden"), EngineError, "403: forbidden"),
        (whole(404, {"detail": "Not Found"}), EngineError, "404: Not Found"),
        (whole(500, b"<html>" + b"x" * 100_000), EngineError, "500: <html>xxx"),
        (whole(302, b"", "location: http://192.0.2.1/v1"), EngineError, "redirects are not follow"),
        (whole(200, {"choices": []}), EngineError, "want a stream of events"),
        (whole(200, b"<html>", "content-type: text/html"), EngineError, "have text/html"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", EngineError, "RemoteProtocolError"),
        (b"", EngineError, "disconnected"),
    ],
)
def test_every_refusal_becomes_the_right_error(
    reply: bytes, kind: type[Exception], told: str
) -> None:
    async def scenario(engine: ForwardEngine) -> None:
        with pytest.raises((EngineError, BusyError, RefusedError)) as caught:
            await events_of(engine.chat(ask()))
        assert isinstance(caught.value, kind)
        assert told in str(caught.value)
        assert len(str(caught.value)) < 500

    with_scripted(Scripted(reply), scenario, key="k-e-y")


def test_retry_after_is_passed_on_within_bounds() -> None:
    for header, want_s in (("7", 7), ("0", 1), ("86400", 60), ("soon", 2)):
        error = error_to(whole(429, {}, f"retry-after: {header}"))
        assert isinstance(error, BusyError)
        assert error.retry_after_s == want_s


def event(data: object, name: str = "data: ") -> bytes:
    return name.encode() + json.dumps(data).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (event({"error": "Model is overloaded", "error_type": "overloaded"}), BusyError),
        (
            event(
                {
                    "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be "
                    "<= 2048. Given: 2400 `inputs` tokens and 8 `max_new_tokens`",
                    "error_type": "validation",
                }
            ),
            PromptTooLongError,
        ),
        (
            event({"error": "Input validation error: x", "error_type": "validation"}),
            RefusedError,
        ),
        (event({"error": {"message": "bad", "http_status_code": 422}}), RefusedError),
        (event({"error": {"message": "x", "code": "overloaded"}}), BusyError),
        (says("a") + event({"error": "failed", "error_type": "generation"}) + DONE, EngineError),
        (says("a") + event({"error": {"message": "x", "code": 500}}) + DONE, EngineError),
        (event({"object": "error", "message": "x", "code": 400}) + DONE, RefusedError),
        (event({"code": 500, "message": "x"}, "error: "), EngineError),
        (b"event: error\n" + event({"message": "x"}), EngineError),
        (b"event: error\ndata: out of memory\n\n", EngineError),
        (says("a") + chunk({}, "abort") + DONE, EngineError),
        (says("a") + b"data: {not json\n\n", EngineError),
        (b"data: " + b"[" * 100_000 + b"\n\n", EngineError),
        (b"data: 7\n\n", EngineError),
        (b"data: \xff\xfe\n\n", EngineError),
        (says("a"), EngineError),
        (b"", EngineError),
        (DONE, EngineError),
        (b"data: " + b"x" * (2 * 1024 * 1024), EngineError),
        (b"data: x\n" * 200_000, EngineError),
        (says("on and on ") * 100 + STOP + DONE, EngineError),
    ],
)
def test_an_error_in_the_stream_becomes_the_right_error(
    events: bytes, kind: type[Exception]
) -> None:
    assert type(error_to(stream(events))) is kind


def test_a_stream_cut_off_in_mid_chunk_is_an_engine_error() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    data = says("a")
    piece = f"{len(data):x}\r\n".encode() + data + b"\r\n"
    assert isinstance(error_to(head + piece + b"ff\r\ndata: {"), EngineError)
    ended = says("a") + STOP + USAGE
    piece = f"{len(ended):x}\r\n".encode() + ended + b"\r\n"
    assert text_of(answer_to(head + piece)) == "a"  # only the end mark is missing


def test_stream_options_are_left_out_for_an_upstream_that_refuses_them() -> None:
    """vLLM before 0.4.3."""
    refusal = "[{'type': 'extra_forbidden', 'loc': ('body', 'stream_options'), 'msg': 'Extra…'}]"
    scripted = Scripted(
        whole(400, {"object": "error", "message": refusal, "code": 400}),
        stream(says("Hi") + STOP + DONE),
    )

    async def scenario(engine: ForwardEngine) -> list[Event]:
        await events_of(engine.chat(ask()))
        return await events_of(engine.chat(ask()))

    assert text_of(with_scripted(scripted, scenario)) == "Hi"
    assert ["stream_options" in body for body in scripted.asked] == [True, False, False]


@pytest.mark.parametrize(
    ("refusals", "asked_for"),
    [
        (
            [
                "This model's maximum context length is 2048 tokens. However, you requested 2300 "
                "tokens (1900 in the messages, 400 in the completion)."
            ],
            [400, 147],
        ),
        (
            [
                "'max_tokens' or 'max_completion_tokens' is too large: 400. This model's maximum "
                "context length is 2048 tokens and your request has 2000 input tokens."
            ],
            [400, 47],
        ),
        (
            [
                "This model's maximum context length is 2048 tokens. However, you requested 400 "
                "output tokens and your prompt contains at least 1649 input tokens, for a total of "
                "at least 2049 tokens."
            ],
            [400, 50],
        ),
    ],
)
def test_a_prompt_that_fits_gets_the_answer_there_is_room_for(
    refusals: list[str], asked_for: list[int]
) -> None:
    """vLLM and others refuse where prompt and longest answer together do not fit."""
    scripted = Scripted(
        *(whole(400, {"error": {"message": message, "code": 400}}) for message in refusals), PLAIN
    )
    events = with_scripted(scripted, lambda engine: events_of(engine.chat(ask("Hi", 400))))
    assert text_of(events) == "Hello"
    assert [body["max_tokens"] for body in scripted.asked] == asked_for


@pytest.mark.parametrize(
    ("owned_by", "want"),
    [
        ("vllm", {"repetition_penalty": 1.1, "top_k": -1}),
        ("tensorrt_llm", {"repetition_penalty": 1.1, "top_k": 0}),
        ("llamacpp", {"repetition_penalty": 1.1, "repeat_penalty": 1.1, "top_k": 0}),
        ("someone", {"repetition_penalty": 1.1, "repeat_penalty": 1.1, "top_k": 0}),
    ],
)
def test_each_server_gets_the_names_it_knows(owned_by: str, want: dict[str, float]) -> None:
    scripted = Scripted(PLAIN, owned_by=owned_by)

    async def scenario(engine: ForwardEngine) -> None:
        await engine.load()
        sampling = {"temperature": 0.5, "seed": 3, "repeat_penalty": 1.1, "top_k": 0}
        await events_of(engine.chat(ask(stop=("x",), sampling=sampling)))

    with_scripted(scripted, scenario, key="k-e-y")
    first, body = scripted.asked
    plain = {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert set(first) - {"return_progress"} == plain
    assert ("return_progress" in first) == (owned_by == "llamacpp")
    assert body["model"] == "m"
    assert {name: body[name] for name in body if "re" in name[:2] or name == "top_k"} == (
        want | ({"return_progress": True} if owned_by == "llamacpp" else {})
    )
    assert (body["temperature"], body["seed"], body["stop"]) == (0.5, 3, ["x"])
    assert b"authorization: bearer k-e-y" in scripted.heads[0].lower()


def test_a_silent_upstream_ends_the_answer_after_twice_the_stall_time() -> None:
    async def scenario(engine: ForwardEngine) -> float:
        assert engine.silent_s() == 0
        began = time.monotonic()
        reading = asyncio.create_task(events_of(engine.chat(ask())))
        while engine.silent_s() < 0.9:
            await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match="ReadTimeout"):
            await reading
        assert engine.silent_s() == 0
        return time.monotonic() - began

    scripted = Scripted(stream(says("Hi")), hangs=True)
    assert 1.9 < with_scripted(scripted, scenario, engine_stall_s=1) < 4
    assert scripted.gone.is_set()


@pytest.mark.parametrize("reply", [b"", stream(b""), stream(says("Hi"))])
def test_stop_does_not_wait_for_an_upstream_that_hangs(reply: bytes) -> None:
    async def scenario(engine: ForwardEngine) -> None:
        generation = engine.chat(ask())
        reading = asyncio.create_task(events_of(generation))
        while not scripted.asked:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.stop(), 0.5)
        assert generation.ended.done()
        assert not any(isinstance(event, Finished) for event in await reading)
        await asyncio.wait_for(scripted.gone.wait(), 1)

    scripted = Scripted(reply, hangs=True)
    with_scripted(scripted, scenario)


def test_an_upstream_that_hangs_while_loading_is_told_of_by_what_it_owes() -> None:
    async def run() -> None:
        async with Scripted(stream(b""), hangs=True).listening() as url:
            engine = ForwardEngine(config_for(url), load_deadline_s=0.7)
            with pytest.raises(EngineError, match=r"waited 0\.7 s .*: a first token of m"):
                await engine.load()
            await engine.stop()

    asyncio.run(run())


def test_stop_ends_a_load_that_waits() -> None:
    async def run() -> None:
        engine = ForwardEngine(config_for(f"http://127.0.0.1:{free_port()}/v1"))
        loading = asyncio.create_task(engine.load())
        while engine.waiting_for is None:
            await asyncio.sleep(0.01)
        await engine.stop()
        with pytest.raises(EngineError, match="stopped while waiting"):
            await asyncio.wait_for(loading, 5)

    asyncio.run(run())


def test_a_model_that_says_nothing_is_not_loaded() -> None:
    async def scenario(engine: ForwardEngine) -> None:
        with pytest.raises(EngineError, match="generated no token"):
            await engine.load()

    silent = stream(chunk({"role": "assistant", "content": ""}) + STOP + DONE)
    with_scripted(Scripted(silent), scenario)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert text_of(answer_to(PLAIN)) == "Hello"


@pytest.mark.parametrize(
    "url",
    ["http://192.0.2.7/v1", "http://example.org/v1", "https://127.0.0.1/v1", "http://[::1", ""],
)
def test_an_upstream_elsewhere_is_refused(url: str) -> None:
    config = dataclasses.replace(config_for("http://127.0.0.1:1/v1"), upstream_url=url)
    with pytest.raises(ValueError, match="loopback"):
        ForwardEngine(config)


# Through the whole server


def test_the_server_forwards_from_end_to_end(
    upstream: LlamaServer, start_server: StartServer, tmp_path: Path
) -> None:
    key_file, prompt_file = tmp_path / "key", tmp_path / "prompt"
    key_file.write_text(KEY + "\n")
    prompt_file.write_text(SYSTEM_PROMPT)
    server = start_server(
        EDGELLM_ENGINE="forward",
        EDGELLM_MODEL_PATH=None,
        EDGELLM_N_THREADS=None,
        EDGELLM_N_PARALLEL="2",
        EDGELLM_MAX_TOKENS="400",
        EDGELLM_UPSTREAM_URL=upstream.url,
        EDGELLM_UPSTREAM_KEY_FILE=str(key_file),
        EDGELLM_SYSTEM_PROMPT_FILE=str(prompt_file),
    )
    server.wait_until_ready()
    messages = [{"role": "user", "content": "Snow?"}]
    behind = [{"role": "system", "content": SYSTEM_PROMPT}, *messages]
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    direct = upstream.ask("/chat/completions", messages=behind, **fields)
    with server.client() as client:
        body: dict[str, Any] = {"model": "small", "messages": messages, **fields}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"] == direct["choices"][0]["message"] | {
            "refusal": None
        }
        assert answer["model"] == "small"
        assert answer["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]

        text = client.post("/v1/completions", json={"prompt": "Snow is", **fields}).json()
        assert text["choices"][0]["text"]

        long = [{"role": "user", "content": "snow " * 700}]
        refused = client.post("/v1/chat/completions", json={"messages": long})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"

        count = [{"role": "user", "content": "Count."}]
        body = {"messages": count, "stream": True, "response_format": MANY_NUMBERS}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            reading = response.iter_raw()  # kept: httpx hangs up where it is dropped
            next(reading)
            asyncio.run(upstream.wait_for_busy_slots(1, 2))
        asyncio.run(upstream.wait_for_busy_slots(0, 3))
    assert server.stop() in (0, -15)
    assert KEY not in server.log_text()


def test_a_refused_key_ends_the_server_with_the_reason(
    upstream: LlamaServer, start_server: StartServer, tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("another-key\n")
    server = start_server(
        EDGELLM_ENGINE="forward",
        EDGELLM_MODEL_PATH=None,
        EDGELLM_UPSTREAM_URL=upstream.url,
        EDGELLM_UPSTREAM_KEY_FILE=str(key_file),
    )
    failed = server.wait_for_event("failed", lambda _: True)
    assert "401: Invalid API Key" in failed["why"]
    assert server.process.wait(20) == 70
    assert "another-key" not in server.log_text()
