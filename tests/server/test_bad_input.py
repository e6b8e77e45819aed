"""What clients get wrong, and what they are told: OpenAI's error shape, naming the field."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from .conftest import API_KEY, RunningServer

HI = [{"role": "user", "content": "Hi"}]

BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 7}),
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "Hi"}),
    ("messages[0]", {"messages": ["Hi"]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "Hi"}]}),
    ("messages[0].role", {"messages": [{"role": ["user"], "content": "Hi"}]}),
    ("messages[1].role", {"messages": [*HI, {"content": "Hi"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
    (
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    ("messages[0].content", {"messages": [{"role": "user", "content": "\ud83d"}]}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": "8"}),
    ("max_completion_tokens", {"max_completion_tokens": -4}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 10**400}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": 2.5}),
    ("top_k", {"top_k": -2}),
    ("seed", {"seed": "lucky"}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("stop", {"stop": 5}),
    ("stop[0]", {"stop": [""]}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream": True, "stream_options": [1]}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("n", {"n": 2}),
    ("n", {"n": True}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("logprobs", {"logprobs": True}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    (
        "response_format.json_schema.schema.type",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "banana"}},
            }
        },
    ),
    ("user.a[0]", {"user": {"a": [float("nan")]}}),
]

BAD_COMPLETION_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 7}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": [1, 2]}),
    ("prompt", {"prompt": ["a", "b"]}),
    ("prompt", {"prompt": "\ud83d"}),
    ("prompt[0]", {"prompt": [""]}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": float("-inf")}),
    ("stop", {"stop": {}}),
    ("stream", {"stream": 0}),
    ("echo", {"echo": True}),
    ("suffix", {"suffix": "."}),
    ("best_of", {"best_of": 3}),
    ("logprobs", {"logprobs": 1}),
    ("n", {"n": 2}),
]


@pytest.mark.parametrize(
    ("field", "change"), BAD_FIELDS, ids=[f"{field}-{n}" for n, (field, _) in enumerate(BAD_FIELDS)]
)
def test_a_wrong_field_is_400_and_named(
    client: httpx.Client, field: str, change: dict[str, Any]
) -> None:
    response = client.post("/v1/chat/completions", content=json.dumps({"messages": HI} | change))
    assert_refused_for(field, response)


@pytest.mark.parametrize(
    ("field", "change"),
    BAD_COMPLETION_FIELDS,
    ids=[f"{field}-{n}" for n, (field, _) in enumerate(BAD_COMPLETION_FIELDS)],
)
def test_a_wrong_field_of_a_completion_is_400_and_named(
    client: httpx.Client, field: str, change: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 1} | change)
    assert_refused_for(field, client.post("/v1/completions", content=body))


def assert_refused_for(field: str, response: httpx.Response) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe\xfa", b"[" * 60_000, b'{"seed": ' + b"9" * 6000 + b"}"],
    ids=["empty", "cut off", "list", "null", "not UTF-8", "deeply nested", "endless number"],
)
def test_a_body_that_is_no_json_object_is_400(client: httpx.Client, body: bytes, path: str) -> None:
    response = client.post(path, content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 300


def test_harmless_fields_are_ignored(client: httpx.Client) -> None:
    extra = {
        "user": "me",
        "metadata": {},
        "n": 1,
        "tools": None,
        "response_format": {"type": "text"},
    }
    body = {"messages": HI, "max_tokens": 1} | extra
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_another_model_is_404_and_both_are_named(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json={"model": "gpt-9", "messages": HI})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "gpt-9" in error["message"]
    assert "small" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_slot_is_400_with_both_numbers(
    client: httpx.Client, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 3000}], "stream": stream}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    n_prompt_tokens, n_ctx = map(int, re.findall(r"\d+", error["message"]))
    assert n_prompt_tokens > 3000
    assert n_ctx == 2048


def test_a_body_declared_too_large_is_413(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", content=b"x" * 65537)
    assert response.status_code == 413
    assert "65536" in response.json()["error"]["message"]


def test_a_body_that_grows_too_large_is_413(client: httpx.Client) -> None:
    pieces = (b"x" * 8192 for _ in range(9))  # chunked: no length is declared
    assert client.post("/v1/chat/completions", content=pieces).status_code == 413


def test_an_unknown_path_is_404_in_the_same_shape(client: httpx.Client) -> None:
    response = client.get("/v1/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/chat/completions"), ("POST", "/v1/models"), ("PUT", "/health")],
)
def test_a_wrong_method_is_405_and_says_which_are_right(
    client: httpx.Client, method: str, path: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["allow"]


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {API_KEY}",
        API_KEY,
        f"Bearer {'0' * 64}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nothing", "/health/"])
def test_without_a_right_key_everything_but_health_is_401(
    keyed_server: RunningServer, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    with keyed_server.client(headers=headers) as client:
        response = client.get(path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_right_key_is_let_in(keyed_server: RunningServer) -> None:
    with keyed_server.client(headers={"authorization": f"Bearer {API_KEY}"}) as client:
        assert client.get("/v1/models").status_code == 200
        body = {"messages": HI, "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_asks_for_no_key(keyed_server: RunningServer, path: str) -> None:
    with keyed_server.client() as client:
        assert client.get(path).status_code == 200


def test_no_error_reached_a_client_as_a_traceback_or_500(server: RunningServer) -> None:
    assert "Traceback" not in server.log_text()
    assert all(
        event["status"] < 500 or event["status"] == 503 for event in server.events("request")
    )
