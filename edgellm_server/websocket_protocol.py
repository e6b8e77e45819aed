"""uvicorn's WebSocket with a kinder end: at SIGTERM it would be closed in mid-answer."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from edgellm_server.lifecycle import ANSWERING, LIFECYCLE


class DrainingWebSocket(WebSocketsSansIOProtocol):
    """Is closed after its answer, by the app; between answers at once, with 1012 (restart)."""

    def shutdown(self) -> None:
        LIFECYCLE.draining = True
        scope: Any = getattr(self, "scope", None)
        if not (isinstance(scope, dict) and scope.get(ANSWERING)):
            super().shutdown()
