"""Chunks and answers in OpenAI's shape, and their framing as server-sent events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

SSE_DONE: Final = b"data: [DONE]\n\n"

SSE_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx in front would otherwise buffer the stream, and time to first token with it.
    "x-accel-buffering": "no",
}


def sse(data: dict[str, Any]) -> bytes:
    """One event: b'data: {...}\\n\\n'. JSON keeps to one line: it escapes every newline."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all chunks of one answer share, and the shapes made of it."""

    id: str
    created_s: int
    model: str

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        }

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The extra last chunk of stream_options.include_usage: no choices, only the usage."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage.body()}

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        return self._head("chat.completion") | {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
            ],
            "usage": usage.body(),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAnswer:
    """As `Answer`, in the shapes of /v1/completions: whole answer and chunk look alike there."""

    id: str
    created_s: int
    model: str

    def chunk(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return self._head() | {"choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head() | {"choices": [], "usage": usage.body()}

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        return self.chunk(text, finish_reason) | {"usage": usage.body()}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
        }
