"""The ASGI app: `uvicorn edgellm_server.app:app`, configured by EDGELLM_* (config.py).

POST /v1/chat/completions   GET /v1/models   GET /health = /health/ready   GET /health/live

Exit codes: 78 (EX_CONFIG) for a wrong environment, which no restart repairs; 70 (EX_SOFTWARE) for
an engine that did not load or died, which systemd is meant to restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgellm_server.config import ConfigError, ServerConfig
from edgellm_server.engine import (
    Engine,
    EngineError,
    Event,
    Finished,
    Generation,
    LlamaEngine,
    PromptTooLongError,
    RefusedError,
    Token,
)
from edgellm_server.placement import Place, PlacementError, take_a_place
from edgellm_server.request import ApiError, ChatRequest, Message, parse_chat_request
from edgellm_server.stream import SSE_DONE, SSE_HEADERS, Answer, sse

EXIT_CONFIG: Final = 78
EXIT_ENGINE: Final = 70

# How long /health still says why the load failed, for whoever polls it, before the process ends.
FAILED_LINGER_S: Final = 3.0
# A body that trickles in would otherwise hold its connection for ever: uvicorn has no such limit.
BODY_DEADLINE_S: Final = 30.0
# For the one token that tells a broken answer from a dead engine.
ENGINE_CHECK_DEADLINE_S: Final = 60.0
# nginx's number for "the client closed the request": only ever seen in our log.
STATUS_CLIENT_GONE: Final = 499

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready"})

State = Literal["loading", "ready", "failed"]

log = logging.getLogger("edgellm")


class ClientGoneError(Exception):
    """The client went away before its answer was complete."""


class Slots:
    """At most `n_slots` hold a slot, at most `max_queue` wait for one, in order of arrival."""

    def __init__(self, n_slots: int, max_queue: int) -> None:
        self._n_slots = n_slots
        self._max_queue = max_queue
        self._free = n_slots
        self._waiting: deque[asyncio.Future[None]] = deque()
        # How long a slot is held, smoothed: what Retry-After is made of.
        self._held_s = 1.0

    async def acquire(self) -> None:
        """Returns holding a slot. Raises ApiError 503 at once when the queue is full."""
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self._max_queue:
            raise ApiError(
                503,
                f"overloaded: {self._n_slots} answers are being generated and "
                f"{len(self._waiting)} requests wait; try again later",
                kind="server_error",
                code="overloaded",
                retry_after_s=self._retry_after_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the slot was handed to us in the moment we left
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    def release(self, held_s: float | None = None) -> None:
        """`held_s` is None for a slot that was not used."""
        if held_s is not None:
            self._held_s += 0.2 * (held_s - self._held_s)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _retry_after_s(self) -> int:
        wait_s = self._held_s * (len(self._waiting) + 1) / self._n_slots
        return max(1, min(60, math.ceil(wait_s)))


class Service:
    """What lives as long as the process: the configuration, the engine, its state, its slots."""

    def __init__(self, config: ServerConfig, engine: Engine, place: Place | None = None) -> None:
        self.place = place  # None: this is the only worker
        self.config = config
        self.engine = engine
        self.state: State = "loading"
        self.why_failed: str | None = None
        self.slots = Slots(engine.n_slots, config.max_queue)
        self.started_s = int(time.time())
        self._check: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Load in the background of an open port. Ends the process when that fails."""
        began = time.monotonic()
        try:
            await self.engine.load()
        except asyncio.CancelledError:
            raise
        except EngineError as error:
            await self._fail(str(error))
        except Exception as error:
            # Not foreseen, and fatal all the same: a task's exception would go unseen.
            await self._fail(f"{type(error).__name__}: {error}")
        if self.config.mlock:
            _warn_unless_locked(self.config.model_path)
        self.state = "ready"
        if self.place is not None:
            self.place.say_ready()
        _log_event("ready", model=self.config.model_name, load_ms=_ms(time.monotonic() - began))

    def all_workers_ready(self) -> bool:
        """A request that follows may reach another worker than the one that was asked."""
        return self.state == "ready" and (self.place is None or self.place.all_ready())

    def suspect(self) -> None:
        """An answer broke. Unless a check already runs, see whether the engine still works."""
        if self.state == "ready" and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(self._check_engine())

    async def _check_engine(self) -> None:
        request = ChatRequest(messages=(Message(role="user", content="Hi"),), max_tokens=1)
        try:
            await self.slots.acquire()
        except ApiError:
            return  # those who wait will tell
        began = time.monotonic()
        generation = self.engine.chat(request)
        _release_at_end(self.slots, generation, began)
        try:
            await asyncio.wait_for(_drain(generation), ENGINE_CHECK_DEADLINE_S)
        except Exception as error:
            await self._fail(f"the engine died: {type(error).__name__}: {error}")

    async def _fail(self, why: str) -> NoReturn:
        self.state, self.why_failed = "failed", _one_line(why)
        _log_event("failed", why=self.why_failed)
        await asyncio.sleep(FAILED_LINGER_S)
        # os._exit: a broken engine's threads may never come back to be joined.
        _flush_and_exit(EXIT_ENGINE)


@dataclass(slots=True, kw_only=True)
class Record:
    """One request's line in the log. Holds no text of prompt or answer."""

    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    began: float = field(default_factory=time.monotonic)
    status: int = 500
    stream: bool = False
    queue_ms: float | None = None
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def read(self, event: Event) -> None:
        if isinstance(event, Token):
            self.completion_tokens += 1
            if self.ttft_ms is None:
                self.ttft_ms = _ms(time.monotonic() - self.began)
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
            self.prompt_tokens = event.usage.prompt_tokens
            self.cached_tokens = event.usage.cached_tokens
            self.completion_tokens = event.usage.completion_tokens

    def write(self) -> None:
        _log_event(
            "request",
            id=self.id,
            status=self.status,
            stream=self.stream,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_ms=self.queue_ms,
            ttft_ms=self.ttft_ms,
            duration_ms=_ms(time.monotonic() - self.began),
            finish_reason=self.finish_reason,
            error=self.error,
        )


# Routes


async def health(request: Request) -> Response:
    """200 once every worker generated a real token; before that 503, with the state and why."""
    service = _service(request)
    if service.all_workers_ready():
        return JSONResponse({"state": "ready", "model": service.config.model_name})
    body: dict[str, Any] = {"state": "loading" if service.state == "ready" else service.state}
    if service.why_failed is not None:
        body["why"] = service.why_failed
    return JSONResponse(body, status_code=503, headers={"retry-after": "1"})


async def health_live(request: Request) -> Response:
    """200 while the process answers at all. Slow answers are no reason to restart it."""
    return JSONResponse({"state": "alive"})


async def models(request: Request) -> Response:
    service = _service(request)
    entry = {
        "id": service.config.model_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "edgellm",
    }
    return JSONResponse({"object": "list", "data": [entry]})


async def chat_completions(request: Request) -> Response:
    service = _service(request)
    record = Record()
    try:
        response = await _chat(request, service, record)
    except ApiError as error:
        record.status = error.status
        record.error = error.code or error.kind
        response = _error_response(error)
    except (ClientGoneError, ClientDisconnect):
        record.status = STATUS_CLIENT_GONE
        response = Response(status_code=STATUS_CLIENT_GONE)  # nobody is there to read it
    except BaseException as error:
        record.error = type(error).__name__
        record.write()
        raise
    response.headers["x-request-id"] = record.id
    if not isinstance(response, ChatStream):  # which writes its own line, at its end
        record.write()
    return response


async def _chat(request: Request, service: Service, record: Record) -> Response:
    if service.state != "ready":
        raise ApiError(
            503,
            f"the model is not ready: {service.state}",
            kind="server_error",
            code="not_ready",
            retry_after_s=2,
        )
    chat = parse_chat_request(
        await _read_body(request, service.config.max_body_bytes),
        model_name=service.config.model_name,
        max_tokens_cap=service.config.max_tokens,
    )
    record.stream = chat.stream

    gone = asyncio.create_task(_client_gone(request.receive))
    try:
        await _acquire_unless_gone(service.slots, gone)
        began = time.monotonic()
        record.queue_ms = _ms(began - record.began)
        generation = service.engine.chat(chat)
        _release_at_end(service.slots, generation, began)
        gone.add_done_callback(lambda _: generation.cancel())

        answer = Answer(id=record.id, created_s=int(time.time()), model=service.config.model_name)
        # The first event decides between an answer and an error with a status of its own.
        events = _checked(generation, service)
        first = await anext(events, None)
        if first is None:
            raise ClientGoneError
        if chat.stream:
            record.status = 200
            return ChatStream(events, generation, gone, answer, chat, record)
        return await _whole(events, gone, answer, record)
    except BaseException:
        gone.cancel()  # and by its callback the generation, where there is one
        raise


async def _whole(
    events: AsyncIterator[Event], gone: asyncio.Task[None], answer: Answer, record: Record
) -> Response:
    text: list[str] = []
    async for event in events:
        record.read(event)
        if isinstance(event, Token):
            text.append(event.text)
        elif isinstance(event, Finished):
            gone.cancel()
            record.status = 200
            return JSONResponse(answer.whole("".join(text), event.reason, event.usage))
    raise ClientGoneError


class ChatStream(Response):
    """The answer as server-sent events. Writes the request's log line when it ends."""

    def __init__(
        self,
        events: AsyncIterator[Event],
        generation: Generation,
        gone: asyncio.Task[None],
        answer: Answer,
        chat: ChatRequest,
        record: Record,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        # Not by way of super().__init__: that would add a content-length.
        self.raw_headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in SSE_HEADERS.items()
        ]
        self._events = events
        self._generation = generation
        self._gone = gone
        self._answer = answer
        self._chat = chat
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._frames():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            self._record.status = STATUS_CLIENT_GONE
        finally:
            self._gone.cancel()
            self._generation.cancel()
            self._record.write()

    async def _frames(self) -> AsyncIterator[bytes]:
        answer = self._answer
        yield sse(answer.chunk({"role": "assistant", "content": ""}))
        try:
            async for event in self._events:
                self._record.read(event)
                if isinstance(event, Token):
                    yield sse(answer.chunk({"content": event.text}))
                elif isinstance(event, Finished):
                    yield sse(answer.chunk({}, event.reason))
                    if self._chat.include_usage:
                        yield sse(answer.usage_chunk(event.usage))
                    yield SSE_DONE
                    return
        except ApiError as error:
            # The status line is long gone: the error is an event, and no [DONE] follows.
            self._record.error = error.code or error.kind
            yield sse(error.body())
            return
        self._record.status = STATUS_CLIENT_GONE


# What the routes are made of


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _read_body(request: Request, max_body_bytes: int) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than the {max_body_bytes} bytes accepted here", code="too_large"
    )
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_body_bytes:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > max_body_bytes:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_DEADLINE_S)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_DEADLINE_S:.0f} s", code="body_timeout"
        ) from None


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _acquire_unless_gone(slots: Slots, gone: asyncio.Task[None]) -> None:
    """Wait for a slot as long as the client does."""
    acquire = asyncio.create_task(slots.acquire())
    try:
        await asyncio.wait({acquire, gone}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        _give_back(slots, acquire)
        raise
    if gone.done():
        _give_back(slots, acquire)
        raise ClientGoneError
    acquire.result()


def _give_back(slots: Slots, acquire: asyncio.Task[None]) -> None:
    if acquire.done():
        if not acquire.cancelled() and acquire.exception() is None:
            slots.release()
    else:
        acquire.cancel()


def _release_at_end(slots: Slots, generation: Generation, began: float) -> None:
    """The slot is free when the engine has let go of it, not when the client has read it all."""
    generation.ended.add_done_callback(lambda _: slots.release(time.monotonic() - began))


async def _checked(generation: Generation, service: Service) -> AsyncIterator[Event]:
    """The generation's events; its errors as ApiError."""
    try:
        async for event in generation.events():
            yield event
    except PromptTooLongError as error:
        raise ApiError(
            400, f"messages: {error}", param="messages", code="context_length_exceeded"
        ) from None
    except RefusedError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    except EngineError as error:
        _log_event("engine_error", why=_one_line(str(error)))
        service.suspect()
        raise ApiError(
            500, "the engine failed on this request", kind="server_error", code="engine_error"
        ) from None


async def _drain(generation: Generation) -> None:
    async for _ in generation.events():
        pass


class ApiKeyMiddleware:
    """Asks for `Authorization: Bearer <key>` everywhere but on the health paths, if keys are set.

    Starts with the rest of the app, so unknown paths do not tell what is served here either.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            service: Service = scope["app"].state.service
            hashes = service.config.api_key_hashes
            if hashes is not None and not _key_fits(scope, hashes):
                error = ApiError(
                    401,
                    "want `Authorization: Bearer <key>` with a key of this server",
                    code="invalid_api_key",
                )
                await _error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _key_fits(scope: Scope, hashes: tuple[str, ...]) -> bool:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    have = hashlib.sha256(key.strip()).hexdigest()
    # All are compared, each in constant time: the time taken says nothing about the keys.
    return any([hmac.compare_digest(have, want) for want in hashes])


def _error_response(error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = ApiError(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", code=code
    )
    response = _error_response(told)
    response.headers.update(error.headers or {})
    return response


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    """The traceback goes to the log (Starlette raises it on), never to the client."""
    return _error_response(ApiError(500, "internal error", kind="server_error"))


# Process


def _warn_unless_locked(model_path: Path) -> None:
    """llama.cpp goes on without a lock when LimitMEMLOCK= is too small; say so."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        model_kb = model_path.stat().st_size // 1024
        for line in Path("/proc/self/status").read_text().splitlines():
            # The weights are locked, the file's vocabulary is not: a few percent less.
            if line.startswith("VmLck:") and int(line.split()[1]) < 0.8 * model_kb:
                _log_event(
                    "not_locked",
                    want=f"EDGELLM_MLOCK=1: about {model_kb} kB locked in memory",
                    have=f"VmLck {line.split()[1]} kB",
                    fix="raise LimitMEMLOCK= of the service",
                )


def _log_event(event: str, **fields: object) -> None:
    log.info(json.dumps({"event": event, **fields}))


def _set_up_log() -> None:
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def _flush_and_exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    _set_up_log()
    try:
        config = ServerConfig.from_environ(os.environ)
    except ConfigError as error:
        # Raised on, uvicorn would print a traceback and no clear line.
        print(f"edgellm_server: {_one_line(str(error))}", file=sys.stderr)
        _flush_and_exit(EXIT_CONFIG)
    place: Place | None = None
    if config.worker_cpus:
        try:
            place = take_a_place(config.worker_cpus)
        except PlacementError as error:
            print(f"edgellm_server: EDGELLM_WORKER_CPUS: {error}", file=sys.stderr)
            _flush_and_exit(EXIT_CONFIG)
    service = Service(config, LlamaEngine(config), place)
    app.state.service = service
    loading = asyncio.create_task(service.load())
    yield
    if not loading.done():
        # llama.cpp cannot be stopped while it loads, and there is nothing to lose.
        _flush_and_exit(0)
    await service.engine.stop()


app = Starlette(
    routes=[
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/health/ready", health, methods=["GET"]),
        Route("/health/live", health_live, methods=["GET"]),
    ],
    middleware=[Middleware(ApiKeyMiddleware)],
    exception_handlers={HTTPException: _on_http_exception, Exception: _on_unforeseen},
    lifespan=lifespan,
)
