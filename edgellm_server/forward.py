"""The engine that forwards to an OpenAI-compatible server on loopback.

Made for llama-server, vLLM, TGI, Ollama and what is like them. Servers differ in what they call a
sampling parameter, how they say that a prompt is too long, and where in a stream they put an error;
all of that is here, so that clients see one behaviour whatever runs behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

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
    Timings,
    Token,
    first_token,
    with_system_prompt,
)
from edgellm_server.notify import notify
from edgellm_server.request import ChatRequest, CompletionRequest, Message
from edgellm_server.stream import Usage

CONNECT_DEADLINE_S: Final = 5.0
# A server that loads tens of gigabytes from a slow disk is not broken.
LOAD_DEADLINE_S: Final = 600.0
LIST_DEADLINE_S: Final = 10.0
STOP_DEADLINE_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0

MAX_EVENT_BYTES: Final = 1024 * 1024
_MAX_REFUSAL_BYTES: Final = 64 * 1024
_MAX_ATTEMPTS: Final = 5
# A few deltas carry no token of their own: text held back in case it became a stop string.
_DELTAS_OVER_MAX_TOKENS: Final = 64

# By `owned_by` of /models, where these write their own name. Early vLLM (before PR 10463) and
# TensorRT-LLM (`extra="forbid"`) refuse a request with a field they do not know, so they get only
# the name they know. All others seen ignore unknown fields and may know either name.
_KNOWS_REPETITION_PENALTY_ONLY: Final = ("vllm", "sglang", "tensorrt_llm", "lmdeploy")
# Elsewhere 0 is "off", which early vLLM and SGLang refuse: they want -1.
_TOP_K_OFF_IS_MINUS_1: Final = ("vllm", "sglang")

_LINE_END: Final = re.compile(rb"[\r\n]")

# How servers say that a prompt is too long. The first that fits counts; n_ctx is the whole context
# or, to TGI, what of it is for the prompt.
_TOO_LONG: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # vLLM: "… is 2048 tokens. However, you requested 2500 tokens (2400 in the messages, …"
        r"maximum context length is (?P<n_ctx>\d+).{0,80}?\((?P<n_prompt>\d+) in ",
        # vLLM, later; "at least" where it stopped counting. OpenAI: "your messages resulted in …"
        r"maximum context length is (?P<n_ctx>\d+).{0,120}?"
        r"(?:request has|resulted in|contains|requested) (?P<at_least>at least )?"
        r"(?P<n_prompt>\d+) (?:input )?tokens",
        # SGLang
        r"context length of (?P<n_ctx>\d+) tokens.{0,80}?: (?P<n_prompt>\d+) tokens from the input",
        r"input \((?P<n_prompt>\d+) tokens\) is longer than .{0,40}?\((?P<n_ctx>\d+) tokens\)",
        # vLLM: "The decoder prompt (length 5000) is longer than the maximum model length of 4096."
        r"prompt \(length (?P<n_prompt>\d+)\) is longer than .{0,40}? (?P<n_ctx>\d+)",
        # TGI
        r"must have less than (?P<n_ctx>\d+) tokens\. Given: (?P<n_prompt>\d+)",
        r"must be <= (?P<n_ctx>\d+)\. Given: (?P<n_prompt>\d+) `inputs`",
        # llama-server
        r"request \((?P<n_prompt>\d+) tokens\) exceeds .{0,40}?\((?P<n_ctx>\d+) tokens\)",
        # edgellm
        r"prompt is (?P<n_prompt>\d+) tokens long, the context of a slot is (?P<n_ctx>\d+) tokens",
    )
)


class UnreachableError(EngineError):
    """The upstream is not there: no connection, or one that broke. It may come back."""


class ForwardEngine:
    """Answers come from `config.upstream_url`; its slots are the upstream's to have.

    Raises ValueError for a URL that is not on loopback: prompts and the key go there in the clear.
    """

    def __init__(self, config: ServerConfig, *, load_deadline_s: float = LOAD_DEADLINE_S) -> None:
        if not _is_on_loopback(config.upstream_url):
            raise ValueError(
                f"upstream: want an http:// URL on loopback, have {config.upstream_url!r}"
            )
        self._config = config
        self._url = config.upstream_url.rstrip("/")
        self._load_deadline_s = load_deadline_s
        self._model = config.upstream_model
        self._server = ""  # who it says it is: /models' owned_by
        self._takes_stream_options = True
        self._running: set[Generation] = set()
        self._progress = time.monotonic()
        self.waiting_for: str | None = None  # while loading: what, or why it is not there yet
        headers = {"accept-encoding": "identity", "connection": "close"}
        if config.upstream_key is not None:
            headers["authorization"] = f"Bearer {config.upstream_key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            trust_env=False,  # a proxy of the environment has no business on loopback
            follow_redirects=False,
            # Silence is first the stall rule's to judge, over all answers; this ends a single one.
            timeout=httpx.Timeout(
                2.0 * config.engine_stall_s, connect=CONNECT_DEADLINE_S, pool=CONNECT_DEADLINE_S
            ),
            # No connection is used twice. llama-server closes each after a stream, a moment after
            # its last byte: of 150 requests on kept connections 23 failed, and none was faster.
            # No limit of its own: `n_parallel` is kept by who calls.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @property
    def n_slots(self) -> int:
        return self._config.n_parallel

    async def load(self) -> None:
        """Wait for the upstream as long as it is merely not up yet, then generate a token.

        Raises EngineError at once for what waiting does not repair: a wrong key, model or URL.
        """
        until = time.monotonic() + self._load_deadline_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await asyncio.wait_for(self._load_now(), max(0.0, until - time.monotonic()))
                self.waiting_for = None
                return
            except (UnreachableError, BusyError) as error:
                self._say_waiting_for(str(error))
            except asyncio.TimeoutError:
                pass  # what was waited for is said below
            if self._client.is_closed:
                raise EngineError("stopped while waiting for the upstream")
            if time.monotonic() + pause_s > until:
                raise EngineError(
                    f"waited {self._load_deadline_s:g} s for the upstream: {self.waiting_for}"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    def chat(self, request: ChatRequest) -> Generation:
        messages = with_system_prompt(request.messages, self._config.system_prompt)
        body = self._body(request)
        body["messages"] = [{"role": m.role, "content": m.content} for m in messages]
        if request.response_format is not None:
            body["response_format"] = request.response_format
        return self._start("/chat/completions", body)

    def complete(self, request: CompletionRequest) -> Generation:
        return self._start("/completions", self._body(request) | {"prompt": request.prompt})

    def silent_s(self) -> float:
        return time.monotonic() - self._progress if self._running else 0.0

    async def stop(self) -> None:
        running = tuple(self._running)
        for generation in running:
            generation.cancel()
        if running:
            await asyncio.wait({g.ended for g in running}, timeout=STOP_DEADLINE_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._client.aclose(), STOP_DEADLINE_S)

    def _say_waiting_for(self, what: str) -> None:
        if what != self.waiting_for:
            self.waiting_for = what
            notify(f"STATUS=waiting for the upstream: {what}")

    async def _load_now(self) -> None:
        if self.waiting_for is None:
            self._say_waiting_for(f"{self._url}: its models")
        self._model, self._server = self._choose_model(await self._list_models())
        self._say_waiting_for(f"{self._url}: a first token of {_brief(self._model)}")
        # The system prompt goes first, so its prefix is in the upstream's cache from now on.
        request = ChatRequest(messages=(Message(role="user", content="Hi"),), max_tokens=2)
        generation = self.chat(request)
        await first_token(generation, f"{self._url}: a first request")

    async def _list_models(self) -> list[dict[str, Any]] | None:
        """Entries of /models; None where there is no such list."""
        url = f"{self._url}/models"
        try:
            response = await self._client.get(url, timeout=LIST_DEADLINE_S)
        except (httpx.HTTPError, RuntimeError) as error:
            raise self._unreachable(error) from error
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise self._error_of(_complaint(response.status_code, response.content, None))
        try:
            listed = response.json()["data"] or ()  # Ollama: null where there is none
            return [entry for entry in listed if isinstance(entry["id"], str)]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise EngineError(
                f"{url}: want a list of models, have something else: is this the base URL of an "
                "OpenAI-compatible server, such as http://127.0.0.1:8080/v1?"
            ) from error

    def _choose_model(self, listed: list[dict[str, Any]] | None) -> tuple[str, str]:
        """-> id, and the server's name for itself. The upstream's own word is not enough:

        llama-server answers for any model name with the one it has.
        """
        wanted = self._config.upstream_model
        if listed is None:
            if not wanted:
                raise EngineError(
                    f"{self._url}/models: not found: does the upstream's URL end in /v1? Where it "
                    "has no such list, set EDGELLM_UPSTREAM_MODEL"
                )
            return wanted, ""
        for entry in listed:
            aliases = entry.get("aliases")
            names = [entry["id"], *(aliases if isinstance(aliases, list) else ())]
            if not wanted or wanted in names or f"{wanted}:latest" in names:  # Ollama's tag
                return wanted or entry["id"], str(entry.get("owned_by", "")).lower()
        have = ", ".join(entry["id"] for entry in listed[:8]) or "none"
        raise EngineError(f"{self._url}: want the model {wanted or '(any)'}, have {_brief(have)}")

    def _body(self, request: ChatRequest | CompletionRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "stream": True,
            **_sampling_for(self._server, request.sampling),
        }
        if self._takes_stream_options:
            body["stream_options"] = {"include_usage": True}
        if self._server == "llamacpp":
            # A sign of life for each batch of a long prompt.
            body["return_progress"] = True
        if request.stop:
            body["stop"] = list(request.stop)
        return body

    def _start(self, path: str, body: dict[str, Any]) -> Generation:
        generation = _ForwardedGeneration()
        self._progress = time.monotonic()
        self._running.add(generation)
        task = generation.task = asyncio.create_task(self._run(path, body, generation))

        def over(_: asyncio.Task[None]) -> None:
            self._running.discard(generation)
            generation.end()

        task.add_done_callback(over)
        return generation

    async def _run(self, path: str, body: dict[str, Any], generation: Generation) -> None:
        try:
            await self._forward(path, body, generation)
        except (EngineError, BusyError, RefusedError, PromptTooLongError) as error:
            generation.emit(error)
        except (httpx.HTTPError, RuntimeError) as error:
            generation.emit(self._unreachable(error))
        except Exception as error:
            generation.emit(EngineError(f"{self._url}: {type(error).__name__}: {_brief(error)}"))

    async def _forward(self, path: str, body: dict[str, Any], generation: Generation) -> None:
        for attempt in range(_MAX_ATTEMPTS):
            async with self._client.stream("POST", self._url + path, json=body) as response:
                if response.status_code == 200:
                    await self._read(response, body["max_tokens"], generation)
                    return
                text = await _start_of(response)
            retry_after = response.headers.get("retry-after")
            complaint = _complaint(response.status_code, text, retry_after)
            adapted = self._adapted(body, complaint, text)
            if adapted is None or attempt == _MAX_ATTEMPTS - 1:
                raise self._error_of(complaint)
            body = adapted

    def _adapted(
        self, body: dict[str, Any], complaint: _Complaint, text: bytes
    ) -> dict[str, Any] | None:
        """The request as this upstream takes it, where its complaint says how."""
        if complaint.status not in (400, 422):
            return None
        if "stream_options" in body and b"stream_options" in text:
            self._takes_stream_options = False
            return {name: value for name, value in body.items() if name != "stream_options"}
        too_long = complaint.too_long
        if too_long is not None and too_long.n_prompt_tokens < too_long.n_ctx:
            # The prompt fits, the prompt and the longest answer do not. A client that asked for
            # no length gets what there is room for, as from llama.cpp.
            if too_long.counted_to_the_end:
                room = too_long.n_ctx - too_long.n_prompt_tokens - 1  # SGLang wants one left over
            else:
                room = body["max_tokens"] // 8
            if 1 <= room < body["max_tokens"]:
                return body | {"max_tokens": room}
        return None

    async def _read(
        self, response: httpx.Response, max_tokens: int, generation: Generation
    ) -> None:
        content_type = response.headers.get("content-type", "nothing")
        if not content_type.lower().startswith("text/event-stream"):
            raise EngineError(
                f"{self._url}: want a stream of events, have {_brief(content_type)}: "
                "is this the base URL of an OpenAI-compatible server?"
            )
        events, answer = EventReader(), _AnswerReader(max_tokens, generation)
        try:
            async for data in response.aiter_bytes():
                for name, text in events.feed(data):
                    self._progress = time.monotonic()
                    if answer.read(name, text):
                        return
            for name, text in events.close():
                if answer.read(name, text):
                    return
        except httpx.HTTPError:
            if not answer.is_whole:  # else only the end mark is missing
                raise
        except _ComplaintError as error:
            raise self._error_of(error.complaint) from None
        except _OddStreamError as error:
            raise EngineError(f"{self._url}: {error}") from None
        if not answer.is_whole:
            raise EngineError(f"{self._url}: the stream ended before the answer did")
        answer.finish()

    def _error_of(self, complaint: _Complaint) -> Exception:
        status, said = complaint.status, self._without_key(_brief(complaint.message))
        too_long = complaint.too_long
        if too_long is not None and too_long.n_prompt_tokens >= too_long.n_ctx:
            return PromptTooLongError(too_long.n_prompt_tokens, too_long.n_ctx)
        if status in (429, 503):
            return BusyError(said, complaint.retry_after_s)
        if status in (400, 413, 422):
            return RefusedError(said)
        if status in (502, 504):
            return UnreachableError(f"{self._url}: {status}: {said}")
        hint = {
            401: "; EDGELLM_UPSTREAM_KEY_FILE names the key to send",
            403: "; EDGELLM_UPSTREAM_KEY_FILE names the key to send",
            404: f"; asked for the model {self._model}: is it served there, under a URL in /v1?",
        }.get(status, "")
        if 300 <= status < 400:
            hint = ": redirects are not followed"
        return EngineError(f"{self._url}: {status or 'error'}: {said}{hint}")

    def _unreachable(self, error: Exception) -> UnreachableError:
        said = self._without_key(_brief(error))
        return UnreachableError(f"{self._url}: {type(error).__name__}: {said}")

    def _without_key(self, text: str) -> str:
        """Some servers quote the key they refuse; this text may end up in a log or at a client."""
        key = self._config.upstream_key
        return text.replace(key, "***") if key else text


class _ForwardedGeneration(Generation):
    """One whose `cancel` closes the connection at once, which is how an upstream learns of it."""

    def __init__(self) -> None:
        super().__init__()
        self.task: asyncio.Task[None] | None = None
        self._finished = False

    def emit(self, event: Event | Exception) -> None:
        self._finished = self._finished or isinstance(event, Finished)
        super().emit(event)

    def cancel(self) -> None:
        # Once, and not after the answer: it would interrupt the closing of the connection, which
        # httpx then counts as open for good.
        if not self.cancelled and not self._finished and self.task is not None:
            self.task.cancel()
        super().cancel()


class EventReader:
    """Bytes of a server-sent event stream -> (event, data). Format: the HTML standard, 9.2.

    More lenient in two ways: a field called "error" (early llama-server) counts as an event of that
    name, and a last event counts without the empty line after it.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._after_cr = False
        self._at_start = True
        self._name = ""
        self._data: list[str] = []
        self._n_data_bytes = 0

    def feed(self, data: bytes) -> Iterator[tuple[str, str]]:
        """Raises _OddStreamError for an event that grows without end, or is not UTF-8."""
        rest = self._rest
        scanned = len(rest)  # no line ends before: it would have been taken
        rest += data
        if self._after_cr and rest:
            self._after_cr = False
            if rest[0] == 0x0A:
                del rest[0]
        while (found := _LINE_END.search(rest, scanned)) is not None:
            end = found.start()
            line, ender = bytes(rest[:end]), rest[end]
            width = 2 if rest[end : end + 2] == b"\r\n" else 1
            # A CR at the very end is a line end already; a LF that follows belongs to it.
            self._after_cr = ender == 0x0D and end + width == len(rest) and width == 1
            del rest[: end + width]
            scanned = 0
            if (event := self._take_line(line)) is not None:
                yield event
        if len(rest) + self._n_data_bytes > MAX_EVENT_BYTES:
            raise _OddStreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def close(self) -> Iterator[tuple[str, str]]:
        """What a stream's end leaves over."""
        for line in (bytes(self._rest), b""):
            if (event := self._take_line(line)) is not None:
                yield event
        self._rest.clear()

    def _take_line(self, raw: bytes) -> tuple[str, str] | None:
        if self._at_start:
            self._at_start = False
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw:
            name, data = self._name, self._data
            self._name, self._data, self._n_data_bytes = "", [], 0
            return (name, "\n".join(data)) if data else None
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _OddStreamError("bytes that are not UTF-8") from None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field in ("data", "error"):
            self._data.append(value)
            self._n_data_bytes += len(raw)
        if field in ("event", "error"):
            self._name = value if field == "event" else "error"
        return None


class _AnswerReader:
    """Events of one answer -> Accepted, Tokens, Finished."""

    def __init__(self, max_tokens: int, generation: Generation) -> None:
        self._max_tokens = max_tokens
        self._generation = generation
        self._accepted = False
        self._n_deltas = 0
        self._half_pair = ""
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}

    @property
    def is_whole(self) -> bool:
        return self._reason is not None

    def read(self, name: str, data: str) -> bool:
        """True once the answer is complete. Raises _ComplaintError, _OddStreamError."""
        if data.strip() == "[DONE]":
            if not self._accepted:
                raise _OddStreamError("the end of an answer that never began")
            self.finish()
            return True
        chunk = _object_of(data)
        if chunk is None and name != "error":
            # Not quoted: it may be a piece of somebody's answer.
            raise _OddStreamError(f"an event of {len(data)} characters that is no JSON object")
        if chunk is None or name == "error" or chunk.get("error") or chunk.get("object") == "error":
            raise _ComplaintError(_complaint(0, chunk or data, None))
        choices = _objects_in(chunk.get("choices"))
        if not self._accepted and choices:
            self._accepted = True
            self._generation.emit(Accepted())
        for choice in choices:
            self._read_choice(choice)
        # Some send usage with each chunk, some a null until the last.
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        if isinstance(timings := chunk.get("timings"), dict):
            self._timings = timings
        return False

    def finish(self) -> None:
        if self._half_pair:
            self._emit_text("", final=True)
        usage, timings = self._usage, self._timings
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        prompt_ms, predicted_ms = timings.get("prompt_ms"), timings.get("predicted_ms")
        n_cached = _count(cached, _count(timings.get("cache_n"), 0))
        self._generation.emit(
            Finished(
                self._reason or ("length" if self._n_deltas >= self._max_tokens else "stop"),
                Usage(
                    # 0 where nobody says: only the upstream's tokenizer knows.
                    prompt_tokens=_count(
                        usage.get("prompt_tokens"), _count(timings.get("prompt_n"), 0) + n_cached
                    ),
                    cached_tokens=n_cached,
                    completion_tokens=_count(usage.get("completion_tokens"), self._n_deltas),
                ),
                Timings(prompt_ms=float(prompt_ms), predicted_ms=float(predicted_ms))
                if isinstance(prompt_ms, int | float) and isinstance(predicted_ms, int | float)
                else None,
            )
        )

    def _read_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if isinstance(text, str) and text:
            self._n_deltas += 1
            self._emit_text(text)
        elif isinstance(delta, dict) and (delta.get("reasoning_content") or delta.get("reasoning")):
            self._n_deltas += 1  # tokens all the same, of a part that is not the answer
        if self._n_deltas > self._max_tokens + _DELTAS_OVER_MAX_TOKENS:
            raise _OddStreamError(f"an answer that goes on after max_tokens ({self._max_tokens})")
        reason = choice.get("finish_reason")
        if reason in ("abort", "error"):
            raise _OddStreamError(f"an answer broken off (finish_reason {reason!r})")
        if isinstance(reason, str) and reason:
            # TGI's other names ("eos_token", "stop_sequence") all mean the model stopped.
            self._reason = "length" if reason == "length" else "stop"

    def _emit_text(self, text: str, final: bool = False) -> None:
        """A server that thinks in UTF-16 may cut a character in two, which is no text by halves."""
        text, self._half_pair = self._half_pair + text, ""
        if not final and "\ud800" <= text[-1] <= "\udbff":
            text, self._half_pair = text[:-1], text[-1]
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        if text:
            self._generation.emit(Token(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TooLong:
    n_prompt_tokens: int
    n_ctx: int
    counted_to_the_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Complaint:
    """What an upstream finds wrong. `status` is HTTP's, or what an event says instead; 0: none."""

    status: int
    message: str
    too_long: _TooLong | None
    retry_after_s: int


class _ComplaintError(Exception):
    """An error where a piece of the answer was due."""

    def __init__(self, complaint: _Complaint) -> None:
        super().__init__(complaint.message)
        self.complaint = complaint


class _OddStreamError(Exception):
    """What the upstream sent, where it is nothing an OpenAI-compatible server sends."""


def _complaint(
    status: int, body: bytes | str | dict[str, Any], retry_after: str | None
) -> _Complaint:
    """Of an error's body, in any of the shapes in use.

    {"error": {"message", "type", "code"}} (OpenAI, llama-server, vLLM, Ollama),
    {"error": "…", "error_type": "…"} (TGI), {"object": "error", "message", "code"} (early vLLM),
    {"detail": …} (FastAPI), or plain text.
    """
    if isinstance(body, bytes):
        body = body.decode("utf-8", "replace")
    said = body if isinstance(body, dict) else _object_of(body) or {}
    inner = said.get("error")
    error = inner if isinstance(inner, dict) else said
    message = inner if isinstance(inner, str) else error.get("message", said.get("detail"))
    if not isinstance(message, str):
        message = json.dumps(message) if message else body if isinstance(body, str) else "no reason"
    names = " ".join(
        str(holder.get(name, "")).lower()
        for holder in (error, said)
        for name in ("type", "code", "error_type")
    )
    if not status:
        for name in ("code", "http_status_code", "status"):
            status = status or _count(error.get(name), 0)
    if not status:
        status = _status_of(names)
    return _Complaint(
        status=status,
        message=message or "no reason given",
        too_long=_too_long(status, error, message),
        retry_after_s=_retry_after_s(retry_after),
    )


def _status_of(names: str) -> int:
    """Of an error in a stream, which has no status of its own, by its type or code."""
    if any(part in names for part in ("overloaded", "unavailable", "rate_limit")):
        return 503
    refusals = ("validation", "invalid", "badrequest", "template", "context", "tool_error")
    return 400 if any(part in names for part in refusals) else 0


def _too_long(status: int, error: dict[str, Any], message: str) -> _TooLong | None:
    if status not in (0, 400, 413, 422):
        return None
    n_prompt, n_ctx = _count(error.get("n_prompt_tokens"), 0), _count(error.get("n_ctx"), 0)
    if n_prompt and n_ctx:  # llama-server
        return _TooLong(n_prompt_tokens=n_prompt, n_ctx=n_ctx, counted_to_the_end=True)
    for pattern in _TOO_LONG:
        if (found := pattern.search(message[:2000])) is not None:
            said = found.groupdict()
            return _TooLong(
                n_prompt_tokens=int(said["n_prompt"][:12]),
                n_ctx=int(said["n_ctx"][:12]),
                counted_to_the_end=not said.get("at_least"),
            )
    return None


def _retry_after_s(header: str | None) -> int:
    """Within what this server says of itself. HTTP's other form, a date, is not worth a parser."""
    if header is None or not re.fullmatch(r"[0-9]{1,6}", header.strip()):
        return 2
    return min(60, max(1, int(header)))


def _sampling_for(server: str, sampling: dict[str, float | int]) -> dict[str, float | int]:
    """llama.cpp's names -> the upstream's. Only what the client set is in there."""
    chosen = dict(sampling)
    if (penalty := sampling.get("repeat_penalty")) is not None:
        chosen["repetition_penalty"] = penalty
        if server in _KNOWS_REPETITION_PENALTY_ONLY:
            del chosen["repeat_penalty"]
    if chosen.get("top_k") == 0 and server in _TOP_K_OFF_IS_MINUS_1:
        chosen["top_k"] = -1
    return chosen


def _is_on_loopback(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return urlsplit(url).scheme == "http" and (
            host == "localhost" or ip_address(host).is_loopback
        )
    except ValueError:
        return False


async def _start_of(response: httpx.Response) -> bytes:
    text = bytearray()
    async for data in response.aiter_bytes():
        text += data
        if len(text) >= _MAX_REFUSAL_BYTES:
            break
    return bytes(text[:_MAX_REFUSAL_BYTES])


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _objects_in(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: object, otherwise: int) -> int:
    return value if type(value) is int and value >= 0 else otherwise


def _brief(said: object) -> str:
    return " ".join(str(said).split())[:300] or "no reason given"
