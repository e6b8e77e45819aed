"""`python3 -m edgellm_server`: uvicorn with its workers, on systemd's socket or one of its own.

All from the environment: EDGELLM_HOST, _PORT, _WORKERS, _APP, _DRAIN_DEADLINE_S here, the rest by
the app (config.py). Why not uvicorn's command line: it gives a passed socket the wrong family
(--fd), which leaves Nagle's algorithm on under a token stream; and it has no limit for a request's
head, no readiness and no watchdog.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

import uvicorn
from uvicorn.importer import ImportFromStringError, import_from_string
from uvicorn.supervisors import Multiprocess

from edgellm_server.config import DEFAULT_APP, DEFAULT_MAX_BODY_BYTES
from edgellm_server.connections import MAX_HEAD_BYTES, LimitedHttp, websocket_protocol
from edgellm_server.listener import ListenerError, listening_socket
from edgellm_server.log import one_line

EXIT_CONFIG: Final = 78
KEEP_ALIVE_S: Final = 75
# A worker's event loop stands still while llama.cpp loads, which on a slow disk takes its time.
WORKER_HEALTH_DEADLINE_S: Final = 600


def main() -> int:
    environ = os.environ
    faults = []

    def whole(name: str, default: int, lowest: int, highest: int) -> int:
        raw = environ.get(name, "").strip() or str(default)
        if not (raw.isascii() and raw.isdigit()) or not lowest <= int(raw) <= highest:
            faults.append(f"{name}: want a whole number from {lowest} to {highest}, have {raw!r}")
            return default
        return int(raw)

    host = environ.get("EDGELLM_HOST", "").strip() or "127.0.0.1"
    port = whole("EDGELLM_PORT", 8000, 1, 65535)
    workers = whole("EDGELLM_WORKERS", 1, 1, 64)
    drain_deadline_s = whole("EDGELLM_DRAIN_DEADLINE_S", 30, 0, 3600)
    max_body_bytes = whole("EDGELLM_MAX_BODY_BYTES", DEFAULT_MAX_BODY_BYTES, 1024, 1024**3)
    app = environ.get("EDGELLM_APP") or DEFAULT_APP
    if app != DEFAULT_APP:
        try:
            import_from_string(app)
        except ImportFromStringError as error:
            faults.append(f"EDGELLM_APP: want an ASGI app as module:attribute, have {error}")
        except Exception as error:
            # Whatever that module's own lines raise. Its traceback helps whoever wrote them.
            traceback.print_exc()
            faults.append(f"EDGELLM_APP: want {app} to import, have {type(error).__name__}")
    if faults:
        return _refuse("; ".join(faults))
    config = uvicorn.Config(
        "edgellm_server.hosting:app",
        workers=workers,
        http=LimitedHttp,
        ws=websocket_protocol,  # type: ignore[arg-type]
        ws_max_size=max_body_bytes,
        ws_per_message_deflate=False,
        loop="asyncio",
        lifespan="on",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_deadline_s,
        timeout_worker_healthcheck=WORKER_HEALTH_DEADLINE_S,
    )
    try:
        sock = listening_socket(environ, host, port)
    except ListenerError as error:
        return _refuse(str(error))
    if workers > 1:
        Multiprocess(config, sockets=[sock]).run()
        return 0
    server = uvicorn.Server(config)
    server.run(sockets=[sock])
    return 0 if server.started else 3


def _refuse(why: str) -> int:
    print(f"edgellm_server: {one_line(why)}", file=sys.stderr)
    return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
