"""Bodies of requests -> ChatRequest, CompletionRequest, or ApiError naming the field at fault.

Pure. Shapes: https://platform.openai.com/docs/api-reference/chat/create and …/completions/create.
Fields that would change the answer and are not supported here are refused; fields that would not
(user, metadata, store) are ignored. What is accepted is described in openapi.py.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from edgellm_server.json_schema import SchemaError, checked_schema, join_path

Role = Literal["system", "user", "assistant"]

_ROLES: Final = ("system", "user", "assistant")
MAX_MESSAGES: Final = 1024
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
# OpenAI's default for this older route, whose clients count on short answers.
DEFAULT_COMPLETION_TOKENS: Final = 16
_MAX_PATH_CHARACTERS: Final = 128
_SCHEMA_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
# llama.cpp takes a uint32 and reads its highest value as "random".
_SEED_MODULUS: Final = 2**32 - 1

# Refused unless absent, null or set to the one value that means "off".
_UNSUPPORTED_IN_CHAT: Final[dict[str, tuple[object, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
}
_UNSUPPORTED_IN_COMPLETIONS: Final[dict[str, tuple[object, ...]]] = {
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
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
    defaults stay in force for the rest. `response_format` is None for plain text, else
    {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "strict", "schema"}}
    with a schema of `checked_schema`, as OpenAI and llama.cpp both read it.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)
    response_format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One text to go on with, checked, as `ChatRequest` is. No chat template is put around it."""

    prompt: str
    max_tokens: int
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    sampling: dict[str, float | int] = field(default_factory=dict)


def parse_chat_request(body: bytes, *, model_name: str, max_tokens_cap: int) -> ChatRequest:
    """JSON bytes -> ChatRequest. Raises ApiError: 400 naming the field, 404 for another model."""
    return parse_chat_data(parse_json(body), model_name=model_name, max_tokens_cap=max_tokens_cap)


def parse_chat_data(data: object, *, model_name: str, max_tokens_cap: int) -> ChatRequest:
    """As `parse_chat_request`, of what `parse_json` made of the body."""
    body = _checked_object(data, model_name, _UNSUPPORTED_IN_CHAT)
    messages = _messages(body.get("messages"))
    stream = _flag(body, "stream")
    include_usage = _include_usage(body.get("stream_options"))
    return ChatRequest(
        messages=messages,
        max_tokens=_max_tokens(body, max_tokens_cap, max_tokens_cap),
        stream=stream,
        include_usage=stream and include_usage,
        stop=_stops(body.get("stop")),
        sampling=_sampling(body),
        response_format=_response_format(body.get("response_format")),
    )


def parse_completion_request(
    body: bytes, *, model_name: str, max_tokens_cap: int
) -> CompletionRequest:
    """JSON bytes -> CompletionRequest. Raises ApiError as `parse_chat_request` does."""
    data = _checked_object(parse_json(body), model_name, _UNSUPPORTED_IN_COMPLETIONS)
    prompt = _prompt(data.get("prompt"))
    stream = _flag(data, "stream")
    include_usage = _include_usage(data.get("stream_options"))
    return CompletionRequest(
        prompt=prompt,
        max_tokens=_max_tokens(data, DEFAULT_COMPLETION_TOKENS, max_tokens_cap),
        stream=stream,
        include_usage=stream and include_usage,
        stop=_stops(data.get("stop")),
        sampling=_sampling(data),
    )


def parse_json(body: bytes | str) -> object:
    """JSON in UTF-8 -> what it holds; every number in it is finite. Raises ApiError 400."""
    not_finite: list[str] = []

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            not_finite.append(text)
        return value

    try:
        # Not left to json.loads, which would take UTF-16 and UTF-32 as well.
        text = body if isinstance(body, str) else body.decode("utf-8-sig")
        data = json.loads(text, parse_constant=number, parse_float=number)
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {_one_line(error)}") from None
    if not_finite:
        where = _path_of_not_finite(data)
        raise ApiError(
            400, f"{where or 'the body'}: {not_finite[0][:32]} is not a finite number", param=where
        )
    return data


def _path_of_not_finite(data: object) -> str | None:
    """'messages[0].content' of one that is not; None where a double key has hidden it."""
    ahead: list[tuple[str, object]] = [("", data)]
    while ahead:
        where, value = ahead.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return where or None
        where = where[:_MAX_PATH_CHARACTERS]
        if isinstance(value, dict):
            ahead += [(join_path(where, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            ahead += [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    return None


def _checked_object(
    data: object, model_name: str, unsupported: dict[str, tuple[object, ...]]
) -> dict[str, Any]:
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
    for name, off_values in unsupported.items():
        value = data.get(name)
        # `True == 1` in Python, but not in JSON.
        if value is not None and not any(
            isinstance(value, bool) is isinstance(off, bool) and value == off for off in off_values
        ):
            raise ApiError(
                400,
                f"{name}: not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    return data


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _wrong("messages", "a list of messages", value)
    if not value:
        raise ApiError(400, "messages: want at least one message, have none", param="messages")
    if len(value) > MAX_MESSAGES:
        raise _wrong("messages", f"at most {MAX_MESSAGES} messages", value)
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


def _prompt(value: object) -> str:
    where = "prompt"
    if isinstance(value, list):
        # OpenAI takes several prompts, and token numbers; neither is of use with one small model.
        if len(value) != 1 or not isinstance(value[0], str):
            raise _wrong(where, "a string or a list of exactly one string (no tokens)", value)
        value, where = value[0], "prompt[0]"
    if not isinstance(value, str) or not value:
        raise _wrong(where, "a string that is not empty", value)
    return _encodable(value, where)


def _max_tokens(data: dict[str, Any], default: int, cap: int) -> int:
    # max_completion_tokens is OpenAI's newer name and wins where both are there.
    chosen = default
    for name in ("max_tokens", "max_completion_tokens"):
        value = data.get(name)
        if value is None:
            continue
        count = _whole(value)
        if count is None or count < 1:
            raise _wrong(name, "a whole number of at least 1", value)
        chosen = count
    return min(chosen, cap)


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
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise _wrong("stop", f"a string or a list of up to {MAX_STOPS} strings", value)
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not stop:
            raise _wrong(f"stop[{index}]", "a string that is not empty", stop)
        if len(stop) > MAX_STOP_CHARACTERS:
            raise _wrong(f"stop[{index}]", f"at most {MAX_STOP_CHARACTERS} characters", stop)
        _encodable(stop, f"stop[{index}]")
    return tuple(stops)


def _response_format(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    where = "response_format"
    if not isinstance(value, dict):
        raise _wrong(where, "an object with a type", value)
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _wrong(f"{where}.type", "text, json_object or json_schema", kind)
    _only(value, ("type", "json_schema") if kind == "json_schema" else ("type",), where)
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    where = "response_format.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise _wrong(where, "an object with a name and a schema", described)
    _only(described, ("name", "schema", "strict", "description"), where)
    name = described.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise _wrong(f"{where}.name", "1 to 64 letters, digits, dashes or underscores", name)
    # An answer keeps to the schema here whether strict is asked for or not.
    _flag(described, "strict", f"{where}.strict")
    try:
        schema = checked_schema(described.get("schema"))
    except SchemaError as error:
        path = ".".join(part for part in (f"{where}.schema", error.where) if part)
        raise ApiError(400, f"{path}: {error.why}", param=path) from None
    return {"type": kind, "json_schema": {"name": name, "strict": True, "schema": schema}}


def _only(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise ApiError(400, f"{where}: {_shown(name)} is not supported here", param=where)


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
        count = _whole(value)
        if count is None or not lowest <= count < 2**63:
            raise _wrong(name, f"a whole number from {lowest} to 2^63 - 1", value)
        if name == "top_k":
            chosen["top_k"] = min(max(count, 0), 2**31 - 1)  # 0 is "off" to llama.cpp
        elif count != -1:  # -1: random, as without a seed
            chosen["seed"] = count % _SEED_MODULUS
    return chosen


def _whole(value: object) -> int | None:
    """JSON does not tell 8 from 8.0; Python tells 1 from true."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


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
