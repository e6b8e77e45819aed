"""Who may ask: API keys, and which web pages' scripts a browser may lend its hands to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgellm_server.request import ApiError

# No key asked: health for whoever watches, the page and the description, which hold no secret.
OPEN_PATHS: Final = frozenset({"/", "/health", "/health/live", "/health/ready", "/openapi.json"})
# Browsers cannot set headers on a WebSocket: the key comes as a subprotocol.
WEBSOCKET_PROTOCOL: Final = "edgellm.chat"
KEY_PROTOCOL_PREFIX: Final = "edgellm.key."


class AccessMiddleware:
    """401 without a key of this server, if it has keys; 403 for another site's page in a browser.

    Both before routing, so unknown paths do not tell what is served here either. The second also
    where no key is set: any page that a browser on this host shows could reach a port on loopback.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        service = scope["app"].state.service
        config = service.config
        refusal: ApiError | None = None
        if not origin_fits(scope, config.cors_origins):
            refusal = ApiError(
                403,
                "this Origin is not allowed here; name it in EDGELLM_CORS_ORIGINS (cors_origins)",
                code="origin_not_allowed",
            )
        elif (
            config.api_key_hashes is not None
            and scope["path"] not in OPEN_PATHS
            and not key_fits(scope, config.api_key_hashes)
        ):
            refusal = ApiError(
                401,
                "want `Authorization: Bearer <key>` with a key of this server",
                code="invalid_api_key",
            )
        if refusal is not None:
            service.metrics.reject("key" if refusal.status == 401 else "origin")
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def origin_fits(scope: Scope, allowed: Iterable[str]) -> bool:
    """No Origin (not a browser, or not across sites), the server's own, or one that is allowed."""
    origins = _header(scope, b"origin")
    if not origins:
        return True
    if len(origins) > 1:
        return False
    origin = origins[0].decode("latin-1")
    hosts = _header(scope, b"host")
    own = hosts[0].decode("latin-1") if len(hosts) == 1 else None
    return origin in allowed or (own is not None and origin.partition("://")[2] == own)


def key_fits(scope: Scope, hashes: tuple[str, ...]) -> bool:
    values = _header(scope, b"authorization")
    scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
    if not values and scope["type"] == "websocket":
        for protocol in scope.get("subprotocols", ()):
            if protocol.startswith(KEY_PROTOCOL_PREFIX):
                scheme = b"bearer"
                key = protocol[len(KEY_PROTOCOL_PREFIX) :].encode("latin-1")
    if scheme.lower() != b"bearer":
        return False
    have = hashlib.sha256(key.strip()).hexdigest()
    # All are compared, each in constant time: the time taken says nothing about the keys.
    return any([hmac.compare_digest(have, want) for want in hashes])


def error_response(error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _header(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == wanted]
