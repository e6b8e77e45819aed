"""Body of POST /v1/chat/completions -> ChatRequest, or ApiError naming the field at fault.

Pure. Shape: https://platform.openai.com/docs/api-reference/chat/create. Fields that would change
the answer and are not supported here are refused; fields that would not (user, metadata, store)
are ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

Role = Literal["system", "user", "assistant"]

_ROLES: Final = ("system", "user", "assistant")
_MAX_STOPS: Final = 16
# llama.cpp takes a uint32 and reads its highest value as "random".
_SEED_MODULUS: Final = 2**32 - 1

# Refused unless absent, null or set to the one value that means "off".
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}


class ApiError(Exception):
    """An answer in OpenAI's error shape: HTTP status, message, type, field and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat, checked. `max_tokens` is already within the server's cap.

    `sampling` holds only what the client set, under llama.cpp's names, so that the model's own
    defaults stay in force for the rest.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)


def parse_chat_request(body: bytes, *, model_name: str, max_tokens_cap: int) -> ChatRequest:
    """JSON bytes -> ChatRequest. Raises ApiError: 400 naming the field, 404 for another model."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body: want a JSON object, have {_kind_of(data)}")

    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong("model", "a string", model)
    if model and model != model_name:
        raise ApiError(
            404,
            f"model: {_shown(model)} is not served here, {model_name!r} is",
            param="model",
            code="model_not_found",
        )
    for name, off_values in _UNSUPPORTED.items():
        value = data.get(name)
        # `True == 1` in Python: compare types too.
        if value is not None and not any(
            type(value) is type(off) and value == off for off in off_values
        ):
            raise ApiError(
                400,
                f"{name}: not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )

    messages = _messages(data.get("messages"))
    stream = _flag(data, "stream")
    return ChatRequest(
        messages=messages,
        max_tokens=_max_tokens(data, max_tokens_cap),
        stream=stream,
        include_usage=stream and _include_usage(data.get("stream_options")),
        stop=_stops(data.get("stop")),
        sampling=_sampling(data),
    )


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _wrong("messages", "a list of messages", value)
    if not value:
        raise ApiError(400, "messages: want at least one message, have none", param="messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _wrong(where, "an object with role and content", value)
    role = value.get("role")
    # OpenAI's newer name for the system role.
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise _wrong(f"{where}.role", "system, user or assistant", role)
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(
            _text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", "a string or a list of text parts", content)
    return Message(role=cast(Role, role), content=_encodable(content, f"{where}.content"))


def _text_part(value: object, where: str) -> str:
    if (
        not isinstance(value, dict)
        or value.get("type") != "text"
        or not isinstance(value.get("text"), str)
    ):
        raise _wrong(where, 'a part of type "text" with a text', value)
    return cast(str, value["text"])


def _max_tokens(data: dict[str, Any], cap: int) -> int:
    # max_completion_tokens is OpenAI's newer name and wins where both are there.
    for name in ("max_completion_tokens", "max_tokens"):
        value = data.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise _wrong(name, "a whole number of at least 1", value)
        return min(value, cap)
    return cap


def _include_usage(value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise _wrong("stream_options", "an object", value)
    return _flag(value, "include_usage", "stream_options.include_usage")


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise _wrong("stop", f"a string or a list of up to {_MAX_STOPS} strings", value)
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise _wrong(f"stop[{index}]", "a string that is not empty", stop)
        _encodable(stop, f"stop[{index}]")
    return tuple(stops)


def _sampling(data: dict[str, Any]) -> dict[str, float | int]:
    chosen: dict[str, float | int] = {}

    def number(name: str, lowest: float, highest: float, llama_name: str | None = None) -> None:
        value = data.get(name)
        if value is None:
            return
        want = f"a number from {lowest:g} to {highest:g}"
        if type(value) not in (int, float) or not lowest <= value <= highest:
            raise _wrong(name, want, value)
        chosen[llama_name or name] = value

    # Python's json takes NaN and Infinity; the comparisons above refuse them both.
    number("temperature", 0, 2)
    number("top_p", 0, 1)
    number("min_p", 0, 1)
    number("presence_penalty", -2, 2)
    number("frequency_penalty", -2, 2)
    number("repetition_penalty", 0.01, 10, "repeat_penalty")  # the name vLLM and TGI use
    number("repeat_penalty", 0.01, 10)

    for name, lowest in (("top_k", -1), ("seed", -(2**63))):
        value = data.get(name)
        if value is None:
            continue
        if type(value) is not int or not lowest <= value < 2**63:
            raise _wrong(name, f"a whole number of at least {lowest}", value)
        if name == "top_k":
            chosen["top_k"] = min(max(value, 0), 2**31 - 1)  # 0 is "off" to llama.cpp
        elif value != -1:  # -1: random, as without a seed
            chosen["seed"] = value % _SEED_MODULUS
    return chosen


def _flag(data: dict[str, Any], name: str, where: str | None = None) -> bool:
    value = data.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(where or name, "true or false", value)
    return value


def _encodable(text: str, where: str) -> str:
    """JSON can spell half a surrogate pair ("\\ud83d"), which is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(
            400, f"{where}: want valid Unicode, have a lone surrogate", param=where
        ) from None
    return text


def _wrong(where: str, want: str, have: object) -> ApiError:
    return ApiError(400, f"{where}: want {want}, have {_shown(have)}", param=where)


def _shown(value: object) -> str:
    """A scalar as sent, cut short; anything else by its kind: errors do not echo prompts."""
    if value is None or isinstance(value, bool | int | float):
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
            return "a huge number"
        if isinstance(value, float) and not math.isfinite(value):
            return "a number that is not finite"
        return json.dumps(value)
    if isinstance(value, str) and len(value) <= 64:
        return json.dumps(value)
    return _kind_of(value)


def _kind_of(value: object) -> str:
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return _shown(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
