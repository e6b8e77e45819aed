"""The ASGI app that is served, configured by EDGELLM_* (config.py): routes, and what starts them.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models[/{id}]   WS /ws/chat
GET /health = /health/ready   GET /health/live   GET /metrics   GET /openapi.json   GET /

Exit codes: 78 (EX_CONFIG) for a wrong environment, which no restart repairs; 70 (EX_SOFTWARE) for
an engine that did not load, died or hangs, which systemd is meant to restart.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from edgellm_server.access import AccessMiddleware, error_response
from edgellm_server.answering import chat_completions, completions
from edgellm_server.config import ConfigError, ServerConfig
from edgellm_server.engine import Engine, LlamaEngine
from edgellm_server.lifecycle import LIFECYCLE
from edgellm_server.log import exit_now, one_line, set_up_log
from edgellm_server.openapi import openapi_document
from edgellm_server.placement import Place, PlacementError, take_a_place
from edgellm_server.request import ApiError
from edgellm_server.service import Service
from edgellm_server.websocket import chat_socket

EXIT_CONFIG: Final = 78
SHOWN_CHARS: Final = 200  # of what a client sent, in an error
CHAT_PAGE: Final = Path(__file__).with_name("chat_page.html")

# Its model decides when it is ready, not its start.
LIFECYCLE.app_announces_ready = True


async def health(request: Request) -> Response:
    """200 once every worker generated a real token; else 503, with the state and why."""
    service = _service(request)
    if service.all_workers_ready():
        return JSONResponse({"state": "ready", "model": service.config.model_name})
    state = "loading" if service.state == "ready" else service.state
    body: dict[str, Any] = {"state": "draining" if LIFECYCLE.draining else state}
    if service.why_failed is not None:
        body["why"] = service.why_failed
    return JSONResponse(body, status_code=503, headers={"retry-after": "1"})


async def health_live(request: Request) -> Response:
    """200 while the process answers at all. Slow answers are no reason to restart it."""
    return JSONResponse({"state": "alive"})


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


async def model(request: Request) -> Response:
    service = _service(request)
    wanted = request.path_params["id"]
    if wanted != service.config.model_name:
        raise ApiError(
            404,
            f"model: {wanted[:SHOWN_CHARS]!r} is not served here, {service.config.model_name!r} is",
            param="model",
            code="model_not_found",
        )
    return JSONResponse(_model(service))


async def metrics(request: Request) -> Response:
    text, content_type = _service(request).exposition()
    return Response(text, headers={"content-type": content_type})


async def openapi(request: Request) -> Response:
    config = _service(request).config
    return JSONResponse(
        openapi_document(config.model_name, config.api_key_hashes is not None, config.web_ui)
    )


async def page(request: Request) -> Response:
    if not _service(request).config.web_ui:
        raise HTTPException(404, "Not Found")
    body, policy = _chat_page()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(body, media_type="text/html", headers=headers)


@cache
def _chat_page() -> tuple[bytes, str]:
    """The page, and the policy that lets nothing run or be asked but what is in it."""
    text = CHAT_PAGE.read_text(encoding="utf-8")

    def source(tag: str) -> str:
        (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {source('style')}; "
        f"script-src {source('script')}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text.encode(), policy


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "edgellm",
    }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    told = ApiError(
        error.status_code,
        f"{request.method} {request.url.path[:SHOWN_CHARS]}: {error.detail}",
        code=code,
    )
    response = error_response(told)
    response.headers.update(error.headers or {})
    return response


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    """The traceback goes to the log (Starlette raises it on), never to the client."""
    return error_response(ApiError(500, "internal error", kind="server_error"))


class ConfiguredCors:
    """Starlette's CORSMiddleware, once the configuration is known; without origins, none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._with_cors: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["app"].state.service.config.cors_origins:
            await self._app(scope, receive, send)
            return
        if self._with_cors is None:
            self._with_cors = CORSMiddleware(
                self._app,
                allow_origins=scope["app"].state.service.config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
                expose_headers=["Retry-After", "X-Request-Id"],
            )
        await self._with_cors(scope, receive, send)


def _engine(config: ServerConfig) -> Engine:
    if config.engine == "llama":
        return LlamaEngine(config)
    from edgellm_server.forward import ForwardEngine

    return ForwardEngine(config)


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    set_up_log()
    try:
        config = ServerConfig.from_environ(os.environ)
    except ConfigError as error:
        # Raised on, uvicorn would print a traceback and no clear line.
        _refuse_to_start(str(error))
    place: Place | None = None
    if config.worker_cpus:
        try:
            place = take_a_place(config.worker_cpus)
        except PlacementError as error:
            _refuse_to_start(f"EDGELLM_WORKER_CPUS: {error}")
    service = Service(config, _engine(config), place)
    app.state.service = service
    loading = asyncio.create_task(service.load())
    leaving = asyncio.create_task(service.leave_snapshots())
    yield
    leaving.cancel()
    if not loading.done():
        # llama.cpp cannot be stopped while it loads, and there is nothing to lose.
        exit_now(0)
    await service.engine.stop()


def _refuse_to_start(why: str) -> NoReturn:
    print(f"edgellm_server: {one_line(why)}", file=sys.stderr)
    exit_now(EXIT_CONFIG)


app = Starlette(
    routes=[
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", model, methods=["GET"]),
        WebSocketRoute("/ws/chat", chat_socket),
        Route("/health", health, methods=["GET"]),
        Route("/health/ready", health, methods=["GET"]),
        Route("/health/live", health_live, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/", page, methods=["GET"]),
    ],
    middleware=[Middleware(ConfiguredCors), Middleware(AccessMiddleware)],
    exception_handlers={
        ApiError: _on_api_error,
        HTTPException: _on_http_exception,
        Exception: _on_unforeseen,
    },
    lifespan=lifespan,
)
