"""/ws/chat: for browsers and devices that keep one connection.

Each text frame is one chat request, as the body of POST /v1/chat/completions (`stream` is implied);
the answer comes as its chunks, one a frame, then {"type": "done"}. {"type": "cancel"} stops it:
{"type": "cancelled"} follows. An error is {"error": {...}}; the connection stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from edgellm_server.access import WEBSOCKET_PROTOCOL
from edgellm_server.answering import (
    ClientGoneError,
    begin,
    chat_shape,
    checked_events,
    new_record,
)
from edgellm_server.engine import Finished, Token
from edgellm_server.lifecycle import ANSWERING, LIFECYCLE
from edgellm_server.record import STATUS_CLIENT_GONE
from edgellm_server.request import ApiError, ChatRequest, parse_chat_data, parse_json
from edgellm_server.service import Service

# A device that is silent for this long between two questions connects anew.
IDLE_DEADLINE_S: Final = 600.0
# Frames that wait behind a running answer; whoever sends more does not read what we say.
MAX_PENDING_FRAMES: Final = 8

CLOSE_RESTART: Final = 1012
CLOSE_IDLE: Final = 1000
CLOSE_NOT_TEXT: Final = 1003
CLOSE_FLOOD: Final = 1008


async def chat_socket(websocket: WebSocket) -> None:
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(WEBSOCKET_PROTOCOL if WEBSOCKET_PROTOCOL in offered else None)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
        await _Conversation(websocket).run()


class _Conversation:
    """One connection: frames are read while an answer runs, so that it can be cancelled."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._service: Service = websocket.app.state.service
        self._frames: asyncio.Queue[str | None] = asyncio.Queue(MAX_PENDING_FRAMES)
        self._stop: asyncio.Future[None] | None = None
        self._disconnected = False

    async def run(self) -> None:
        reading = asyncio.create_task(self._read())
        try:
            while True:
                try:
                    frame = await asyncio.wait_for(self._frames.get(), IDLE_DEADLINE_S)
                except asyncio.TimeoutError:
                    await self._websocket.close(CLOSE_IDLE, "idle")
                    return
                if frame is None:
                    return
                self._websocket.scope[ANSWERING] = True
                await self._answer(frame)
                self._websocket.scope[ANSWERING] = False
                if LIFECYCLE.draining:
                    await self._websocket.close(CLOSE_RESTART, "the server restarts")
                    return
        finally:
            reading.cancel()
            self._end_answer()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                text = message.get("text")
                if text is None:
                    await self._websocket.close(CLOSE_NOT_TEXT, "want text frames of JSON")
                    break
                if _is_cancel(text):
                    self._end_answer()
                elif self._frames.full():
                    await self._websocket.close(CLOSE_FLOOD, "too many frames wait")
                    break
                else:
                    self._frames.put_nowait(text)
        except (RuntimeError, OSError):
            pass  # closed by us or by the peer
        self._disconnected = True
        self._end_answer()
        while self._frames.full():
            self._frames.get_nowait()
        self._frames.put_nowait(None)

    def _end_answer(self) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)

    async def _send(self, data: dict[str, Any]) -> None:
        await self._websocket.send_text(json.dumps(data, separators=(",", ":")))

    async def _answer(self, frame: str) -> None:
        record = new_record(self._service, "ws")
        record.stream = True
        self._stop = asyncio.get_running_loop().create_future()
        generation = None
        try:
            asked = self._parse(frame)
            generation = await begin(self._service, asked, record, self._stop)
            shape = chat_shape(record, self._service)
            async for event in checked_events(generation, self._service, asked):
                record.read(event)
                if isinstance(event, Token):
                    await self._send(shape.token(event.text))
                elif isinstance(event, Finished):
                    record.status = 200
                    await self._send(shape.last(event.reason))
                    await self._send(shape.usage_chunk(event.usage))
                    await self._send({"type": "done", "id": record.id})
                    return
            raise ClientGoneError
        except ApiError as error:
            record.status, record.error = error.status, error.code or error.kind
            told: dict[str, Any] = error.body()
            if error.retry_after_s is not None:
                told["retry_after_s"] = error.retry_after_s
            await self._send(told)
        except ClientGoneError:
            record.status = STATUS_CLIENT_GONE
            if not self._disconnected:
                await self._send({"type": "cancelled", "id": record.id})
        except (WebSocketDisconnect, RuntimeError, OSError):
            record.status = STATUS_CLIENT_GONE
            raise
        finally:
            self._stop = None
            if generation is not None:
                generation.cancel()
            record.write()

    def _parse(self, frame: str) -> ChatRequest:
        config = self._service.config
        if len(frame.encode("utf-8", "surrogatepass")) > config.max_body_bytes:
            raise ApiError(
                413,
                f"the frame is larger than the {config.max_body_bytes} bytes accepted here",
                code="too_large",
            )
        return parse_chat_data(
            parse_json(frame), model_name=config.model_name, max_tokens_cap=config.max_tokens
        )


def _is_cancel(text: str) -> bool:
    if len(text) > 64 or "cancel" not in text:
        return False
    try:
        return bool(json.loads(text) == {"type": "cancel"})
    except ValueError:
        return False
