"""/openapi.json is true: schemathesis asks a running server for all of it, and for what it is not.

The limit on how much is asked is max_examples; what is asked is the same in each run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from edgellm_server.openapi import openapi_document

from .conftest import API_KEY, RunningServer, StartServer

MAX_EXAMPLES = 25
KEYED_MAX_EXAMPLES = 3
# An answer that takes longer hangs: they are all of four tokens at most.
ANSWER_DEADLINE_S = 20.0

ALWAYS_THE_SAME = hypothesis.settings(derandomize=True, database=None, deadline=None)


@pytest.fixture(scope="module")
def open_server(start_server: StartServer) -> RunningServer:
    server = start_server(EDGELLM_N_PARALLEL="1", EDGELLM_N_CTX="1024", EDGELLM_MAX_TOKENS="4")
    server.wait_until_ready()
    return server


def api_of(keyed: bool, **config: Any) -> Any:
    return schemathesis.openapi.from_dict(
        openapi_document("small", keyed=keyed, web_ui=True),
        config=SchemathesisConfig.from_dict({"seed": 1} | config),
    )


open_api = api_of(keyed=False)
# What the bodies may hold is the open server's part.
keyed_api = api_of(
    keyed=True,
    auth={"openapi": {"key": {"bearer": API_KEY}}},
    phases={"coverage": {"enabled": False}},
)


def test_the_document_that_is_tested_here_is_the_one_that_is_served(
    open_server: RunningServer, keyed_server: RunningServer
) -> None:
    for server, keyed in ((open_server, False), (keyed_server, True)):
        served = httpx.get(f"{server.url}/openapi.json", trust_env=False)
        assert served.headers["content-type"] == "application/json"
        assert served.json() == openapi_document("small", keyed=keyed, web_ui=True)


@open_api.parametrize()
@hypothesis.settings(ALWAYS_THE_SAME, max_examples=MAX_EXAMPLES)
def test_every_operation_answers_as_described(
    case: schemathesis.Case, open_server: RunningServer
) -> None:
    ask_and_check(case, open_server)


@keyed_api.parametrize()
@hypothesis.settings(ALWAYS_THE_SAME, max_examples=KEYED_MAX_EXAMPLES)
def test_every_operation_with_a_key_asks_for_it_as_described(
    case: schemathesis.Case, keyed_server: RunningServer
) -> None:
    ask_and_check(case, keyed_server)


def ask_and_check(case: schemathesis.Case, server: RunningServer) -> None:
    response = case.call(base_url=server.url, timeout=ANSWER_DEADLINE_S)
    unsaid = response.status_code == 400 and beyond_a_schema(response.json()["error"])
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if unsaid else [])
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["param"] is None or error["message"].startswith(f"{error['param']}: ")
        assert "Traceback" not in error["message"]


def beyond_a_schema(error: dict[str, Any]) -> bool:
    """What no schema can say: how many tokens a prompt is, which JSON Schemas can be kept to."""
    return error["code"] == "context_length_exceeded" or (error["param"] or "").startswith(
        "response_format.json_schema.schema"
    )


def test_schemathesis_met_no_fault_of_the_server_and_left_it_answering(
    open_server: RunningServer,
) -> None:
    statuses = Counter(event["status"] for event in open_server.events("request"))
    assert set(statuses) <= {200, 400, 404, 413}
    assert statuses[200] > 20
    assert statuses[400] > 20
    assert "Traceback" not in open_server.log_text()
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    with open_server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
