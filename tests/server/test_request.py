"""Bodies -> requests: what is accepted, what is refused, and that openapi.py says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm_server.json_schema import SchemaError, checked_schema
from edgellm_server.openapi import openapi_document
from edgellm_server.request import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    parse_chat_data,
    parse_chat_request,
    parse_completion_request,
    parse_json,
)

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
HALF_PAIR = {"type": "text", "text": "\udc00"}
SERVED: dict[str, Any] = {"model_name": "small", "max_tokens_cap": 400}

DOCUMENT = openapi_document("small", keyed=True, web_ui=True)


def chat(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": HI} | fields).encode(), **SERVED)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion_request(json.dumps({"prompt": "Once"} | fields).encode(), **SERVED)


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | fields}


def refusal(parse: Callable[[], object]) -> ApiError | None:
    try:
        parse()
    except ApiError as error:
        return error
    return None


# JSON


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "Expecting value"),
        (b'{"a": "\xff"}', "utf-8"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b'{"a": "\xed\xa0\x80"}', "utf-8"),  # half a surrogate pair, spelled in bytes
        (b"[" * 1_000_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 100_000 + b"}", "digits"),
        (b'{"a": 1} {"a": 1}', "Extra data"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:12]),
)
def test_what_is_no_json_is_400_and_says_why_in_one_short_line(body: bytes, why: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert why in caught.value.message
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", '{"temperature": NaN}'),
        ("temperature", '{"temperature": 1e999}'),
        ("metadata.a[1][0]", '{"metadata": {"a": [1, [-Infinity]]}}'),
        ('["\\ud83d b"]', '{"\\ud83d b": Infinity}'),
        (None, '{"a": NaN, "a": 1}'),
        (None, "[" * 500 + "NaN" + "]" * 500),
    ],
    ids=repr,
)
def test_a_number_that_is_not_finite_is_400_and_named_wherever_it_is(
    field: str | None, body: str
) -> None:
    with pytest.raises(ApiError, match="is not a finite number") as caught:
        parse_json(body)
    if field is not None:
        assert caught.value.param == field
        assert caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 300
    caught.value.message.encode()


def test_a_byte_order_mark_is_passed_over_and_of_double_keys_the_last_counts() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1, "a": 2}') == {"a": 2}


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_400(body: bytes) -> None:
    error = refusal(lambda: parse_json(body))
    assert error is None or error.status == 400


# Chat


def test_numbers_may_be_spelled_with_a_point() -> None:
    assert chat(max_tokens=8.0, seed=3.0, top_k=40.0) == chat(max_tokens=8, seed=3, top_k=40)


def test_max_tokens_is_held_to_the_servers_and_the_newer_name_wins() -> None:
    assert chat().max_tokens == 400
    assert chat(max_tokens=10**30).max_tokens == 400
    assert chat(max_tokens=7, max_completion_tokens=9).max_tokens == 9
    assert chat(max_tokens=7, max_completion_tokens=None).max_tokens == 7


def test_usage_is_streamed_only_where_asked_for() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream_options={"include_usage": True}).include_usage


def test_decoded_data_is_read_as_the_body_is() -> None:
    assert parse_chat_data({"messages": HI}, **SERVED) == chat()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("messages", {"messages": HI * 1025}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [HALF_PAIR]}]}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop[0]", {"stop": "\ud83d"}),
        ("stop[1]", {"stop": ["a", "b" * 257]}),
        ("seed", {"seed": 2**63}),
        ("stream_options", {"stream_options": 1}),  # also where nothing is streamed
        ("n", {"n": True}),
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {"type": "text", "grammar": "x"}}),
        ("response_format", {"response_format": {"type": "json_object", "schema": {}}}),
        ("response_format.type", {"response_format": {}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", {"response_format": json_schema({}, name="a b")}),
        ("response_format.json_schema.strict", {"response_format": json_schema({}, strict=1)}),
        ("response_format.json_schema.schema", {"response_format": json_schema(None)}),
        ("response_format.json_schema.schema", {"response_format": json_schema(True)}),
        (
            "response_format.json_schema.schema",
            {"response_format": json_schema({"enum": ["\ud83d"]})},
        ),
        (
            "response_format.json_schema.schema.properties.age.minimum",
            {
                "response_format": json_schema(
                    {"type": "object", "properties": {"age": {"type": "number", "minimum": 1}}}
                )
            },
        ),
    ],
)
def test_a_wrong_field_of_a_chat_is_400_and_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**change)
    assert caught.value.status == 400
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")
    caught.value.message.encode()  # it can be sent


# Completions


def test_a_prompt_is_a_string_or_a_list_of_one() -> None:
    assert completion(prompt="Once") == completion(prompt=["Once"])
    assert completion().max_tokens == 16
    assert completion(max_tokens=1000).max_tokens == 400


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ["a", "b"]}),
        ("prompt", {"prompt": [1, 2, 3]}),
        ("prompt", {"prompt": [[1, 2, 3]]}),
        ("prompt[0]", {"prompt": [""]}),
        ("prompt", {"prompt": "\ud83d"}),
        ("echo", {"echo": True}),
        ("suffix", {"suffix": " the end"}),
        ("best_of", {"best_of": 2}),
        ("n", {"n": 2}),
        ("logprobs", {"logprobs": 0}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("stream", {"stream": 1}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": 3}),
    ],
)
def test_a_wrong_field_of_a_completion_is_400_and_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**change)
    assert caught.value.status == 400
    assert caught.value.param == field
    assert caught.value.message.startswith(f"{field}: ")


# JSON Schema


def test_a_schema_is_cut_down_to_what_an_answer_can_be_held_to() -> None:
    schema = {
        "title": "Station",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "a property, not an annotation"},
            "wind": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 13.0},
            "mail": {"type": "string", "format": "email"},
            "last": {"type": "array", "maxItems": 3},
            "next": {"anyOf": [{"$ref": "#/$defs/Next"}, {"type": "null"}], "default": None},
        },
        "required": ["wind", "wind"],
        "$defs": {"Next": {"type": "array", "items": {"$ref": "#/$defs/Next"}}},
    }
    assert checked_schema(schema) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "wind": {"type": "integer", "minimum": 1, "maximum": 12},
            "mail": {"type": "string"},
            "last": {"type": "array", "items": {}, "maxItems": 3},
            "next": {"anyOf": [{"$ref": "#/$defs/Next"}, {"type": "null"}]},
        },
        "required": ["wind"],
        "$defs": {"Next": {"type": "array", "items": {"$ref": "#/$defs/Next"}}},
    }


def nested(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(levels - 1)} if levels else {"type": "string"}


TWO_ARRAYS = [{"type": "array", "items": {"$ref": "#/$defs/A"}}] * 2


@pytest.mark.parametrize(
    ("where", "schema"),
    [
        ("type", {"type": "banana"}),
        ("type", {"type": []}),
        ("type", {"type": ["null", "null"]}),
        ("pattern", {"type": "string", "pattern": "^a{5,2}$"}),
        ("not", {"not": {}}),
        ("minItems", {"type": "array", "minItems": 5, "maxItems": 2}),
        ("minLength", {"type": "string", "minLength": 5, "maxLength": 2}),
        ("minLength", {"type": "string", "minLength": 5.5}),
        ("maxLength", {"type": "string", "maxLength": 1001}),
        ("format", {"type": "string", "format": "date", "maxLength": 5}),
        ("", {"type": "integer", "minimum": 9, "exclusiveMaximum": 9}),
        ("minimum", {"type": "integer", "minimum": 2**60}),
        ("minimum", {"type": "integer", "minimum": True}),
        ("properties", {"type": "object", "properties": []}),
        ("properties", {"type": "object", "properties": {"": {}}}),
        ("properties", {"type": "object", "properties": {f"p{n}": {} for n in range(257)}}),
        ('properties["a b"].items', {"type": "object", "properties": {"a b": {"items": {}}}}),
        ("properties.a", {"type": "object", "properties": {"a": True}}),
        ("required[0]", {"type": "object", "required": ["a"]}),
        ("additionalProperties", {"type": "object", "additionalProperties": 1}),
        ("items", {"type": "array", "items": [{}]}),
        ("enum", {"enum": []}),
        ("enum", {"enum": [*range(257)]}),
        ("enum", {"type": "string", "enum": ["a", 1]}),
        ("const", {"type": "integer", "const": 1.5}),
        ("anyOf", {"anyOf": []}),
        ("anyOf[1].type", {"anyOf": [{}, {"type": 1}]}),
        ("allOf", {"allOf": [{}]}),
        ("type", {"type": "object", "anyOf": [{}]}),
        ("$ref", {"$ref": "https://schemas.example/a.json"}),
        ("$ref", {"$ref": "#"}),
        ("$ref", {"$ref": "#/$defs/none"}),
        ("$defs", {"$defs": []}),
        ("$defs", {"$defs": {f"d{n}": {} for n in range(65)}}),
        ("$defs.A", {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}),
        ("$defs.A", {"$defs": {"A": {"anyOf": TWO_ARRAYS}}}),
        ("", {"anyOf": [{"type": "array"}] * 65}),
        (".".join(["items"] * 17), nested(20)),
        ("", {"enum": ["x" * 20_000]}),
    ],
)
def test_a_schema_the_engine_would_ignore_hang_on_or_die_of_is_refused(
    where: str, schema: dict[str, Any]
) -> None:
    with pytest.raises(SchemaError) as caught:
        checked_schema(schema)
    assert caught.value.where == where


# Any JSON at all

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, -1, 8.0, "", "small", "user", "text", "none", "auto", "json_object"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
KEYWORDS = [
    *("type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions", "items", "title"),
    *("properties", "required", "additionalProperties", "format", "minItems", "maxItems"),
    *("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "a", "b"),
]
SCHEMA_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYWORDS) | st.text(max_size=3),
            inner
            | st.sampled_from(
                ["object", "array", "string", "integer", "date", "#/$defs/a", "#/$defs/b", {}, []]
            ),
            max_size=5,
        )
    ),
    max_leaves=20,
)


def fields_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with a few of the request's own fields, some of them right."""
    schema = DOCUMENT["components"]["schemas"][name]
    right: dict[str, Any] = {
        "messages": HI,
        "prompt": "Once",
        "response_format": {"type": "json_object"},
    }
    known = {
        field: VALUES
        | st.just(right.get(field))
        | st.sampled_from(described.get("enum") or [described.get("minimum", 1)])
        for field, described in schema["properties"].items()
    }
    needed = {field: known.pop(field) for field in schema["required"]}
    return st.fixed_dictionaries(needed, optional=known)


def validator(name: str) -> jsonschema_rs.Validator:
    schema = {**DOCUMENT["components"]["schemas"][name], "components": DOCUMENT["components"]}
    return jsonschema_rs.validator_for(schema)


CHAT, COMPLETION = validator("ChatRequest"), validator("CompletionRequest")


@settings(deadline=None)
@given(fields_of("ChatRequest"))
def test_the_openapi_document_says_what_chats_are_accepted(data: dict[str, Any]) -> None:
    error = refusal(lambda: parse_chat_request(json.dumps(data).encode(), **SERVED))
    assert (error is None) == CHAT.is_valid(data)
    if error is not None:
        assert error.status in (400, 404)
        assert error.param is None or error.message.startswith(error.param)
        error.message.encode()


@settings(deadline=None)
@given(fields_of("CompletionRequest"))
def test_the_openapi_document_says_what_completions_are_accepted(data: dict[str, Any]) -> None:
    error = refusal(lambda: parse_completion_request(json.dumps(data).encode(), **SERVED))
    assert (error is None) == COMPLETION.is_valid(data)
    assert error is None or error.status in (400, 404)


@settings(deadline=None, max_examples=300)
@given(SCHEMA_VALUES)
def test_any_value_is_a_schema_or_refused_in_no_time(value: Any) -> None:
    try:
        schema = checked_schema(value)
    except SchemaError:
        return
    assert checked_schema(schema) == schema
