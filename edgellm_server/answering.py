"""From a request's bytes to its answer, whole or streamed: admission, engine, errors, log line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgellm_server.access import error_response
from edgellm_server.engine import (
    BusyError,
    EngineError,
    Event,
    Finished,
    Generation,
    PromptTooLongError,
    RefusedError,
    Token,
)
from edgellm_server.log import in_ms, log_event, one_line
from edgellm_server.record import STATUS_CLIENT_GONE, Record
from edgellm_server.request import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from edgellm_server.service import Service
from edgellm_server.stream import SSE_DONE, SSE_HEADERS, Answer, CompletionAnswer, sse

# A body that trickles in would otherwise hold its connection for ever: uvicorn has no such limit.
BODY_DEADLINE_S: Final = 30.0

Asked = ChatRequest | CompletionRequest
Parse = Callable[[bytes, Service], Asked]


class ClientGoneError(Exception):
    """The client went away before its answer was complete."""


async def chat_completions(request: Request) -> Response:
    return await _answer(request, "chat", _parse_chat)


async def completions(request: Request) -> Response:
    return await _answer(request, "completions", _parse_completion)


def _parse_chat(body: bytes, service: Service) -> Asked:
    config = service.config
    return parse_chat_request(body, model_name=config.model_name, max_tokens_cap=config.max_tokens)


def _parse_completion(body: bytes, service: Service) -> Asked:
    config = service.config
    return parse_completion_request(
        body, model_name=config.model_name, max_tokens_cap=config.max_tokens
    )


async def _answer(request: Request, endpoint: str, parse: Parse) -> Response:
    service: Service = request.app.state.service
    record = new_record(service, endpoint)
    try:
        response = await _answer_or_raise(request, service, record, parse)
    except ApiError as error:
        record.status = error.status
        record.error = error.code or error.kind
        response = error_response(error)
    except (ClientGoneError, ClientDisconnect):
        record.status = STATUS_CLIENT_GONE
        response = Response(status_code=STATUS_CLIENT_GONE)  # nobody is there to read it
    except BaseException as error:
        record.error = type(error).__name__
        record.write()
        raise
    response.headers["x-request-id"] = record.id
    if not isinstance(response, EventStream):  # which writes its own line, at its end
        record.write()
    return response


async def _answer_or_raise(
    request: Request, service: Service, record: Record, parse: Parse
) -> Response:
    asked = parse(await _read_body(request, service.config.max_body_bytes), service)
    record.stream = asked.stream
    gone = asyncio.create_task(_client_gone(request.receive))
    try:
        generation = await begin(service, asked, record, gone)
        shape = _shape_of(asked, record, service)
        # The first event decides between an answer and an error with a status of its own.
        events = checked_events(generation, service, asked)
        if await anext(events, None) is None:
            raise ClientGoneError
        if asked.stream:
            record.status = 200
            return EventStream(events, generation, gone, shape, asked.include_usage, record)
        return await _whole(events, gone, shape, record)
    except BaseException:
        gone.cancel()  # and by its callback the generation, where there is one
        raise


def new_record(service: Service, endpoint: str) -> Record:
    return Record(metrics=service.metrics, endpoint=endpoint, keep_text=service.config.log_prompts)


async def begin(
    service: Service, asked: Asked, record: Record, gone: asyncio.Future[None]
) -> Generation:
    """Waits for the model and a slot, and starts the engine; all ends when `gone` is done.

    Raises ApiError 503, at once where the queue is full, and ClientGoneError.
    """
    await service.until_loaded(gone)
    if not await service.slots.acquire_unless(gone):
        raise ClientGoneError
    record.queue_ms = in_ms(time.monotonic() - record.began)
    if record.keep_text:
        record.prompt = (
            asked.prompt
            if isinstance(asked, CompletionRequest)
            else [asdict(message) for message in asked.messages]
        )
    try:
        if isinstance(asked, CompletionRequest):
            generation = service.engine.complete(asked)
        else:
            generation = service.engine.chat(asked)
    except BaseException:
        service.slots.release()
        raise
    service.start_holding(generation)
    gone.add_done_callback(lambda _: generation.cancel())
    return generation


async def checked_events(
    generation: Generation, service: Service, asked: Asked
) -> AsyncIterator[Event]:
    """The generation's events; its errors as ApiError."""
    field = "prompt" if isinstance(asked, CompletionRequest) else "messages"
    try:
        async for event in generation.events():
            yield event
    except PromptTooLongError as error:
        raise ApiError(
            400, f"{field}: {error}", param=field, code="context_length_exceeded"
        ) from None
    except RefusedError as error:
        if isinstance(asked, ChatRequest) and asked.response_format is not None:
            field = "response_format"
        raise ApiError(400, f"{field}: {error}", param=field) from None
    except BusyError as error:
        raise ApiError(
            503,
            f"overloaded: {error}",
            kind="server_error",
            code="overloaded",
            retry_after_s=error.retry_after_s,
        ) from None
    except EngineError as error:
        log_event("engine_error", why=one_line(str(error)))
        service.suspect()
        raise ApiError(
            500, "the engine failed on this request", kind="server_error", code="engine_error"
        ) from None


class _ChatShape:
    """Chat chunks: a role first, then content."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.usage_chunk = answer.usage_chunk
        self.whole = answer.whole

    def first(self) -> dict[str, Any] | None:
        return self._answer.chunk({"role": "assistant", "content": ""})

    def token(self, text: str) -> dict[str, Any]:
        return self._answer.chunk({"content": text})

    def last(self, reason: str) -> dict[str, Any]:
        return self._answer.chunk({}, reason)


class _CompletionShape:
    """Text chunks, the reason with an empty one."""

    def __init__(self, answer: CompletionAnswer) -> None:
        self._answer = answer
        self.usage_chunk = answer.usage_chunk
        self.whole = answer.whole

    def first(self) -> dict[str, Any] | None:
        return None

    def token(self, text: str) -> dict[str, Any]:
        return self._answer.chunk(text)

    def last(self, reason: str) -> dict[str, Any]:
        return self._answer.chunk("", reason)


_Shape = _ChatShape | _CompletionShape


def _shape_of(asked: Asked, record: Record, service: Service) -> _Shape:
    created_s, model = int(time.time()), service.config.model_name
    if isinstance(asked, CompletionRequest):
        return _CompletionShape(CompletionAnswer(id=record.id, created_s=created_s, model=model))
    return chat_shape(record, service)


def chat_shape(record: Record, service: Service) -> _ChatShape:
    return _ChatShape(
        Answer(id=record.id, created_s=int(time.time()), model=service.config.model_name)
    )


async def _whole(
    events: AsyncIterator[Event], gone: asyncio.Task[None], shape: _Shape, record: Record
) -> Response:
    text: list[str] = []
    async for event in events:
        record.read(event)
        if isinstance(event, Token):
            text.append(event.text)
        elif isinstance(event, Finished):
            gone.cancel()
            record.status = 200
            return JSONResponse(shape.whole("".join(text), event.reason, event.usage))
    raise ClientGoneError


class EventStream(Response):
    """The answer as server-sent events. Writes the request's log line when it ends."""

    def __init__(
        self,
        events: AsyncIterator[Event],
        generation: Generation,
        gone: asyncio.Task[None],
        shape: _Shape,
        include_usage: bool,
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
        self._shape = shape
        self._include_usage = include_usage
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            started = False
            async for data in self._frames():
                if not started:
                    # Not before there is something to read: on a small box the client's waking up
                    # for the headers alone takes a core from the prefill.
                    started = True
                    start = {"type": "http.response.start", "status": 200}
                    await send(start | {"headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
            if started:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ApiError as error:
            # Before the first token: a status of its own still fits.
            self._record.status = error.status
            response = error_response(error)
            response.headers["x-request-id"] = self._record.id
            await response(scope, receive, send)
        except OSError:
            self._record.status = STATUS_CLIENT_GONE
        finally:
            self._gone.cancel()
            self._generation.cancel()
            self._record.write()

    async def _frames(self) -> AsyncIterator[bytes]:
        """What is ready at the same time is one piece: each costs both sides a wake-up.

        Raises ApiError where nothing was yielded yet.
        """
        first = self._shape.first()
        lead = b"" if first is None else sse(first)
        begun = False
        try:
            async for event in self._events:
                self._record.read(event)
                if isinstance(event, Token):
                    yield lead + sse(self._shape.token(event.text))
                    lead, begun = b"", True
                elif isinstance(event, Finished):
                    end = sse(self._shape.last(event.reason))
                    if self._include_usage:
                        end += sse(self._shape.usage_chunk(event.usage))
                    yield lead + end + SSE_DONE
                    return
        except ApiError as error:
            self._record.error = error.code or error.kind
            if not begun:
                raise
            # The status line is long gone: the error is an event, and no [DONE] follows.
            yield sse(error.body())
            return
        self._record.status = STATUS_CLIENT_GONE


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
