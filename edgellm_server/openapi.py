"""What the server accepts and answers, as OpenAPI 3.1: GET /openapi.json.

Pure. It promises no more than request.py holds: tests/server/test_schema.py has schemathesis ask a
running server for all of it.
"""

from __future__ import annotations

from typing import Any, Final

from edgellm_server import json_schema
from edgellm_server.request import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)

Json = dict[str, Any]

_FLAG: Final[Json] = {"type": ["boolean", "null"]}
_TEXT: Final[Json] = {"type": "string"}
_COUNT: Final[Json] = {"type": "integer", "minimum": 0}


def openapi_document(model_name: str, keyed: bool, web_ui: bool) -> Json:
    """`keyed`: the server has API keys. `web_ui`: it has the chat page at /."""
    paths = {
        "/v1/chat/completions": {
            "post": _generating(
                "createChatCompletion",
                "Answer a conversation. Several in a row are better asked over WS /ws/chat: text "
                "frames, each the body of this request with `stream` implied; the answers are this "
                'request\'s chunks, then {"type": "done"}; {"type": "cancel"} stops one.',
                "Chat",
            )
        },
        "/v1/completions": {
            "post": _generating(
                "createCompletion",
                "Go on with a text. No chat template and no system prompt is put around it.",
                "Completion",
            )
        },
        "/v1/models": {
            "get": {
                "operationId": "listModels",
                "responses": _responses({"200": _json("The one model", "ModelList")}),
            }
        },
        "/v1/models/{id}": {
            "get": {
                "operationId": "retrieveModel",
                "parameters": [{"name": "id", "in": "path", "required": True, "schema": _TEXT}],
                "responses": _responses({"200": _json("The model", "Model")}, 404),
            }
        },
        "/metrics": {
            "get": {
                "operationId": "readMetrics",
                "responses": _responses(
                    {
                        "200": {
                            "description": "Prometheus' text format",
                            "content": {"text/plain": {"schema": _TEXT}},
                        }
                    }
                ),
            }
        },
        "/health": {"get": _health("readHealth")},
        "/health/ready": {"get": _health("readHealthReady")},
        "/health/live": {
            "get": {
                "operationId": "readHealthLive",
                "security": [],
                "responses": {"200": _json("The process answers", "Health")},
            }
        },
        "/openapi.json": {
            "get": {
                "operationId": "readOpenapi",
                "security": [],
                "responses": {
                    "200": {
                        "description": "This document",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    }
                },
            }
        },
    }
    if web_ui:
        paths["/"] = {
            "get": {
                "operationId": "chatPage",
                "security": [],
                "responses": {
                    "200": {
                        "description": "A page to chat on",
                        "content": {"text/html": {"schema": _TEXT}},
                    }
                },
            }
        }
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "edgellm",
            "version": "1",
            "description": "OpenAI's API, as far as one small model on an edge host goes. Fields "
            "that are not described here and would not change the answer are ignored.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(model_name), "responses": _error_responses()},
    }
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in paths.values():
            for operation in path.values():
                if "security" not in operation:
                    operation["responses"]["401"] = {"$ref": "#/components/responses/401"}
    return document


# Operations


def _generating(operation_id: str, description: str, kind: str) -> Json:
    return {
        "operationId": operation_id,
        "description": description,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(f"{kind}Request")}},
        },
        "responses": _responses(
            {
                "200": {
                    "description": "The answer; with `stream`, its chunks as server-sent events "
                    f"(each `data: ` a {kind}Chunk, or an Error that ends it), then data: [DONE]",
                    "headers": {"x-request-id": {"required": True, "schema": _TEXT}},
                    "content": {
                        "application/json": {"schema": _ref(kind)},
                        # Of each event, as OpenAPI 3.2 puts it.
                        "text/event-stream": {"schema": _object({"data": _TEXT})},
                    },
                }
            },
            *(400, 403, 404, 408, 413, 500, 503),
        ),
    }


def _health(operation_id: str) -> Json:
    return {
        "operationId": operation_id,
        "security": [],
        "responses": {
            "200": _json("A real token was generated", "Health"),
            "503": _json("Not ready", "Health") | {"headers": _RETRY_AFTER},
        },
    }


def _responses(of_its_own: Json, *error_statuses: int) -> Json:
    return of_its_own | {
        str(status): {"$ref": f"#/components/responses/{status}"} for status in error_statuses
    }


def _json(description: str, schema: str) -> Json:
    return {
        "description": description,
        "content": {"application/json": {"schema": _ref(schema)}},
    }


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}


_RETRY_AFTER: Final[Json] = {
    "retry-after": {
        "description": "seconds",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": 60},
    }
}


def _error_responses() -> Json:
    responses = {
        str(status): _json(description, "Error")
        for status, description in {
            400: "Something is wrong with the field that `param` names",
            401: "No key of this server",
            403: "A browser's page of an origin that may not ask",
            404: "Not served here",
            408: "The body did not arrive in time",
            413: "The body is too large",
            500: "The engine failed",
            503: "Every slot and every place in the queue is taken, or the model is not loaded",
        }.items()
    }
    responses["401"]["headers"] = {"www-authenticate": {"required": True, "schema": _TEXT}}
    responses["503"]["headers"] = _RETRY_AFTER
    return responses


# Schemas


def _schemas(model_name: str) -> Json:
    return {
        "ChatRequest": _object(
            {
                "messages": {
                    "type": "array",
                    "items": _ref("Message"),
                    "minItems": 1,
                    "maxItems": MAX_MESSAGES,
                },
                **_sampling(model_name, "all that the server allows"),
                "response_format": {
                    "anyOf": [{"type": "null"}, _ref("PlainFormat"), _ref("SchemaFormat")]
                },
                "tools": _off([]),
                "tool_choice": _off("none", "auto"),
                "functions": _off([]),
                "function_call": _off("none", "auto"),
                "n": _off(1),
                "logprobs": _off(False),
                "top_logprobs": _off(0),
                "logit_bias": _off({}),
                "modalities": _off(["text"]),
                "audio": _off(),
            },
            required=["messages"],
        ),
        "Message": _object(
            {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {
                    "anyOf": [
                        _TEXT,
                        {
                            "type": "array",
                            "items": _object({"type": {"const": "text"}, "text": _TEXT}),
                        },
                    ]
                },
            }
        ),
        "PlainFormat": _object({"type": {"enum": ["text", "json_object"]}}, closed=True),
        "SchemaFormat": _object(
            {
                "type": {"const": "json_schema"},
                "json_schema": _object(
                    {
                        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                        "schema": {
                            "type": "object",
                            "description": "The part of JSON Schema an answer can be held to: "
                            "type, properties, required, additionalProperties, items, enum, const, "
                            "anyOf, oneOf (read as anyOf), $ref to $defs, minItems, maxItems, "
                            "minLength, maxLength, format (date, time, date-time, uuid), and of "
                            "integers minimum, maximum, exclusiveMinimum, exclusiveMaximum. Other "
                            "keywords than annotations are refused, and so are more than "
                            f"{json_schema.MAX_SCHEMA_BYTES} bytes, {json_schema.MAX_DEPTH} "
                            f"levels, {json_schema.MAX_PROPERTIES} properties, "
                            f"{json_schema.MAX_ENUM_VALUES} enum values and bounds over "
                            f"{json_schema.MAX_BOUND}.",
                        },
                        "strict": _FLAG,
                        "description": {},
                    },
                    required=["name", "schema"],
                    closed=True,
                ),
            },
            closed=True,
        ),
        "CompletionRequest": _object(
            {
                "prompt": {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        {
                            "type": "array",
                            "items": {"type": "string", "minLength": 1},
                            "minItems": 1,
                            "maxItems": 1,
                        },
                    ]
                },
                **_sampling(model_name, str(DEFAULT_COMPLETION_TOKENS)),
                "suffix": _off(""),
                "echo": _off(False),
                "best_of": _off(1),
                "n": _off(1),
                "logprobs": _off(False),
                "logit_bias": _off({}),
                "response_format": _off({"type": "text"}),
            },
            required=["prompt"],
        ),
        "Chat": _answer(
            "chat.completion",
            {
                "message": _object(
                    {
                        "role": {"const": "assistant"},
                        "content": _TEXT,
                        "refusal": {"type": "null"},
                    }
                )
            },
        ),
        "ChatChunk": _answer(
            "chat.completion.chunk",
            {"delta": _object({"role": {"const": "assistant"}, "content": _TEXT}, required=[])},
            is_chunk=True,
        ),
        "Completion": _answer("text_completion", {"text": _TEXT}),
        "CompletionChunk": _answer("text_completion", {"text": _TEXT}, is_chunk=True),
        "Usage": _object(
            {
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "total_tokens": _COUNT,
                "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            }
        ),
        "Model": _object(
            {
                "id": {"const": model_name},
                "object": {"const": "model"},
                "created": {"type": "integer", "description": "Unix time in seconds"},
                "owned_by": _TEXT,
            }
        ),
        "ModelList": _object(
            {
                "object": {"const": "list"},
                "data": {"type": "array", "items": _ref("Model"), "minItems": 1},
            }
        ),
        "Health": _object(
            {
                "state": {"enum": ["loading", "ready", "failed", "draining", "alive"]},
                "model": _TEXT,
                "why": _TEXT,
            },
            required=["state"],
        ),
        "Error": _object(
            {
                "error": _object(
                    {
                        "message": {"type": "string", "minLength": 1},
                        "type": _TEXT,
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    }
                )
            }
        ),
    }


def _sampling(model_name: str, default_tokens: str) -> Json:
    """The fields that both requests have."""
    tokens: Json = {
        "type": ["integer", "null"],
        "minimum": 1,
        "description": "Never more than the server allows. Default: " + default_tokens,
    }
    return {
        "model": {"enum": [model_name, "", None]},
        "max_tokens": tokens,
        "max_completion_tokens": tokens,
        "stream": _FLAG,
        "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
        "stop": {
            "anyOf": [
                {"type": "null"},
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
            ]
        },
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 10),
        "repeat_penalty": _number(0.01, 10),
        "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": 2**63 - 1},
        "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
    }


_STOP: Final[Json] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}


def _number(lowest: float, highest: float) -> Json:
    return {"type": ["number", "null"], "minimum": lowest, "maximum": highest}


def _off(*values: object) -> Json:
    """A field of OpenAI's that is not supported: only absent, null or "off"."""
    return {"enum": [*values, None]}


def _answer(kind: str, choice: Json, *, is_chunk: bool = False) -> Json:
    reason: Json = {"enum": ["stop", "length", None] if is_chunk else ["stop", "length"]}
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {"type": "integer", "description": "Unix time in seconds"},
            "model": _TEXT,
            "choices": {
                "type": "array",
                "items": _object({"index": {"const": 0}, **choice, "finish_reason": reason}),
                "minItems": 0 if is_chunk else 1,
                "maxItems": 1,
            },
            "usage": _ref("Usage"),
        },
        required=["id", "object", "created", "model", "choices"] + ([] if is_chunk else ["usage"]),
    )


def _object(properties: Json, *, required: list[str] | None = None, closed: bool = False) -> Json:
    """All properties are required unless `required` says which. `closed`: no others."""
    schema: Json = {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else required,
    }
    return schema | {"additionalProperties": False} if closed else schema
