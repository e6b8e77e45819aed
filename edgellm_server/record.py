"""One request's line in the log, and its share in the metrics."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from edgellm_server.engine import Event, Finished, Token
from edgellm_server.log import in_ms, log_event
from edgellm_server.metrics import Metrics

# nginx's number for "the client closed the request": only ever seen in our log.
STATUS_CLIENT_GONE: Final = 499


@dataclass(slots=True, kw_only=True)
class Record:
    """Holds no text of prompt or answer, unless `keep_text` was asked for."""

    metrics: Metrics
    endpoint: str  # "chat", "completions" or "ws"
    keep_text: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    began: float = field(default_factory=time.monotonic)
    status: int = 500
    stream: bool = False
    queue_ms: float | None = None
    ttft_ms: float | None = None
    prompt_ms: float | None = None  # the engine's own clock
    predicted_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    prompt: object = None
    answer: list[str] = field(default_factory=list)
    _first_token: float = 0.0
    _last_token: float = 0.0

    def read(self, event: Event) -> None:
        if isinstance(event, Token):
            self.completion_tokens += 1
            self._last_token = time.monotonic()
            if self.ttft_ms is None:
                self._first_token = self._last_token
                self.ttft_ms = in_ms(self._first_token - self.began)
            if self.keep_text:
                self.answer.append(event.text)
        elif isinstance(event, Finished):
            self.finish_reason = event.reason
            self.prompt_tokens = event.usage.prompt_tokens
            self.cached_tokens = event.usage.cached_tokens
            self.completion_tokens = event.usage.completion_tokens
            if event.timings is not None:
                self.prompt_ms = round(event.timings.prompt_ms, 1)
                self.predicted_ms = round(event.timings.predicted_ms, 1)

    def write(self) -> None:
        """Once, when the request is over."""
        now = time.monotonic()
        self._count(now)
        log_event(
            "request",
            id=self.id,
            endpoint=self.endpoint,
            status=self.status,
            stream=self.stream,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_ms=self.queue_ms,
            ttft_ms=self.ttft_ms,
            prompt_ms=self.prompt_ms,
            predicted_ms=self.predicted_ms,
            duration_ms=in_ms(now - self.began),
            finish_reason=self.finish_reason,
            error=self.error,
            **({"prompt": self.prompt, "answer": "".join(self.answer)} if self.keep_text else {}),
        )

    def _count(self, now: float) -> None:
        counts = self.metrics
        counts.request(self.endpoint, self.status)
        if self.status == STATUS_CLIENT_GONE:
            counts.count("cancelled")
        elif self.status == 503:
            counts.reject(self.error or "overloaded")
        elif self.error == "engine_error":
            counts.count("engine_errors")
        if self.queue_ms is not None:
            counts.observe("queue_seconds", self.queue_ms / 1000)
        if self.ttft_ms is not None:
            counts.observe("ttft_seconds", self.ttft_ms / 1000)
        counts.count("generation_tokens", self.completion_tokens)
        if self.prompt_tokens is None:
            return
        counts.count("prompt_tokens", self.prompt_tokens)
        counts.count("prompt_tokens_cached", self.cached_tokens or 0)
        counts.count("prompt_cache_hits" if self.cached_tokens else "prompt_cache_misses")
        if self.finish_reason is not None:
            counts.observe("request_duration_seconds", now - self.began)
            if self.completion_tokens > 1:
                span_s = self._last_token - self._first_token
                counts.observe("tpot_seconds", span_s / (self.completion_tokens - 1))
