"""The app that uvicorn is given: the one EDGELLM_APP names, with a sentinel beside it.

An operator's own app gets readiness and watchdog this way without a line of its own.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.importer import import_from_string

from edgellm_server.config import DEFAULT_APP
from edgellm_server.lifecycle import LIFECYCLE
from edgellm_server.log import set_up_log
from edgellm_server.notify import notify
from edgellm_server.sentinel import Sentinel


class Hosted:
    """Passes everything on; takes note of the lifespan."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        set_up_log()

        async def noting_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._started()
            await send(message)

        took_part = False

        async def noting_receive() -> MutableMapping[str, Any]:
            nonlocal took_part
            took_part = True
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                notify("STOPPING=1")
            return message

        async with Sentinel().watching():
            try:
                await self._app(scope, noting_receive, noting_send)
            except Exception:
                if took_part:
                    raise
                # An app without a lifespan, which ASGI allows. The sentinel stays all the same.
                await _plain_lifespan(noting_receive, noting_send)

    def _started(self) -> None:
        if not LIFECYCLE.app_announces_ready:
            notify("READY=1", f"STATUS=serving {os.environ.get('EDGELLM_APP', '')}")


async def _plain_lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


app = Hosted(import_from_string(os.environ.get("EDGELLM_APP") or DEFAULT_APP))
