"""uvicorn's WebSocket with a kinder end: at SIGTERM it would be closed in mid-answer."""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from edgellm_server.lifecycle import ANSWERING, LIFECYCLE

CLOSE_NOT_UTF8: Final = 1007


class DrainingWebSocket(WebSocketsSansIOProtocol):
    """Is closed after its answer, by the app; between answers at once, with 1012 (restart)."""

    def send_receive_event_to_app(self) -> None:
        """Text that is no UTF-8 closes the connection; uvicorn would log a traceback for each."""
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(CLOSE_NOT_UTF8)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def shutdown(self) -> None:
        LIFECYCLE.draining = True
        scope: Any = getattr(self, "scope", None)
        if not (isinstance(scope, dict) and scope.get(ANSWERING)):
            super().shutdown()
