"""uvicorn's HTTP with the limits it lacks: open connections, time for a request's head."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm_server.lifecycle import LIFECYCLE
from edgellm_server.request import ApiError

HEAD_DEADLINE_S: Final = 10.0
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 1024
# Who connected in the moment of a restart has this long to send what was on its way.
LATE_HEAD_GRACE_S: Final = 2.0


class LimitedHttp(H11Protocol):
    """A head within HEAD_DEADLINE_S, MAX_CONNECTIONS at most, errors in OpenAI's shape."""

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(
                ApiError(
                    503,
                    f"overloaded: {MAX_CONNECTIONS} connections are open; try again later",
                    kind="server_error",
                    code="overloaded",
                    retry_after_s=5,
                )
            )
            return
        self._watch_head()
        if LIFECYCLE.draining:  # accepted just before the socket was closed
            self.shutdown()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()
        if LIFECYCLE.draining and self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all, told as every other fault is."""
        self._refuse(ApiError(400, msg))

    def shutdown(self) -> None:
        LIFECYCLE.draining = True
        if self.cycle is None and not self.transport.is_closing():
            # uvicorn would reset a client whose first request is still on its way.
            self.loop.call_later(LATE_HEAD_GRACE_S, self._close_unless_asked)
        else:
            super().shutdown()

    def _close_unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def _watch_head(self) -> None:
        # Between two requests uvicorn's own keep-alive timer runs.
        in_head = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not in_head or self.transport.is_closing():
            self._forget_deadline()
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_DEADLINE_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_deadline = None
        if not self.transport.is_closing():
            self._refuse(
                ApiError(
                    408,
                    f"the request's head did not arrive within {HEAD_DEADLINE_S:.0f} s",
                    code="head_timeout",
                )
            )

    def _forget_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _refuse(self, error: ApiError) -> None:
        """Answer without an app, and close."""
        body = json.dumps(error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        try:
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=b""),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # an answer has begun already
        self.transport.close()


def websocket_protocol(*args: Any, **kwargs: Any) -> asyncio.BaseProtocol:
    """Imported with the first WebSocket: a start that nobody waits for on one is the quicker."""
    from edgellm_server.websocket_protocol import DrainingWebSocket

    return DrainingWebSocket(*args, **kwargs)
