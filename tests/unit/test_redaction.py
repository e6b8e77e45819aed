"""What a bug report must not show."""

from __future__ import annotations

import hashlib
import json

import pytest

from edgellm.redaction import REMOVED, journal, redacted

API_KEY = "the operator's own key"
HASH = hashlib.sha256(API_KEY.encode()).hexdigest()
HEAD = "2026-12-02T17:40:01+0000 edge-1 python3[812]: "
SYSTEMD = "2026-12-02T17:40:01+0000 edge-1 systemd[1]: "
REQUEST = {
    **{"event": "request", "id": "chatcmpl-0123456789abcdef01234567", "endpoint": "chat"},
    **{"status": 200, "stream": True, "prompt_tokens": 31, "ttft_ms": 112.4},
    **{"finish_reason": "stop", "error": None},
}
QUESTION = [{"role": "user", "content": "Where is the spare key of hall B?"}]


@pytest.mark.parametrize(
    ("text", "gone", "stays"),
    [
        (f"Authorization: Bearer {API_KEY}", API_KEY, "Authorization"),
        ('{"authorization": "Bearer abcdef"}', "abcdef", "authorization"),
        ("x-api-key: abcdef", "abcdef", "x-api-key"),
        ("Cookie: session=abcdef; b=c", "abcdef", "Cookie"),
        ("curl -H 'authorization: bearer abcdef' x", "abcdef", "curl"),
        ("Sec-WebSocket-Protocol: edgellm.chat, edgellm.key.abcdef", "abcdef", "edgellm.chat"),
        ("api_key=abcdef and more", "abcdef", "and more"),
        ("HF_TOKEN=abcdef", "abcdef", "HF_TOKEN"),
        ("db_password: abcdef", "abcdef", "db_password"),
        ("http://user:abcdef@host/v1", "abcdef", "@host/v1"),
        ("sk-abcdefabcdefabcdef", "abcdefabcdef", "sk-"),
        ("# keys 0123456789abcdef", "0123456789abcdef", "# keys"),
        (f"digest {HASH} of it", HASH, "of it"),
        ("Environment=UPSTREAM_WORD=abcdef", "abcdef", "UPSTREAM_WORD"),
        ('Environment="A=abcdef"', "abcdef", "A="),
        ("Environment=EDGELLM_X=1 WORD=abcdef", "abcdef", "EDGELLM_X=1 WORD="),
        ("Environment=EDGELLM_X=1 \\\n  WORD=abcdef", "abcdef", "EDGELLM_X=1 WORD="),
        ('Environment=EDGELLM_X=1 "WORD=abcdef', "abcdef", "Environment="),
        ("serve --api-key abcdef --port 1", "abcdef", "--port 1"),
        ("serve --token abcdef", "abcdef", "--token"),
    ],
)
def test_whatever_looks_like_a_secret_goes_and_the_rest_stays(
    text: str, gone: str, stays: str
) -> None:
    found = redacted(text)
    assert gone not in found
    assert stays in found
    assert REMOVED in found


@pytest.mark.parametrize(
    "text",
    [
        "EDGELLM_MAX_TOKENS=512",
        "first_token_deadline_s=30",
        '{"prompt_tokens": 31, "cached_tokens": 4}',
        "/opt/edgellm/releases/3abadcf8e3b5c3fa/entrypoint.sh",
        f"/opt/edgellm/models/{'ab' * 32}.gguf",
        "Environment=OMP_WAIT_POLICY=PASSIVE",
        "ExecStart=/opt/edgellm/current/entrypoint.sh",
        "812  815  engine-1  batch  0  0  2  1-3",
    ],
)
def test_what_a_reader_needs_is_left(text: str) -> None:
    assert redacted(text) == text


def test_the_keys_that_are_known_go_wherever_they_stand_and_whatever_they_are_like() -> None:
    found = redacted(f"x{API_KEY}y {API_KEY}", [API_KEY])
    assert found == f"x{REMOVED}y {REMOVED}"


def test_a_secret_that_begins_another_does_not_leave_its_rest() -> None:
    assert redacted("long-key-and-more", ["long-key", "long-key-and-more"]) == REMOVED


def test_a_short_secret_does_not_take_ordinary_words() -> None:
    assert redacted("the ten knobs", ["ten"]) == "the ten knobs"


def test_a_requests_figures_stay_and_its_texts_go() -> None:
    line = {**REQUEST, "prompt": QUESTION, "answer": "Under the mat."}
    found = journal([HEAD + json.dumps(line)], holds_texts=False)
    assert "spare key" not in found
    assert "mat" not in found
    kept = json.loads(found.removeprefix(HEAD))
    assert kept == {**REQUEST, "prompt": REMOVED, "answer": REMOVED}


def test_an_error_that_quotes_its_client_goes() -> None:
    line = {**REQUEST, "error": "no tool named Where is the spare key"}
    found = journal([HEAD + json.dumps(line)], holds_texts=False)
    assert "spare" not in found
    assert '"error": "engine_error"' in journal(
        [HEAD + json.dumps({**REQUEST, "error": "engine_error"})], holds_texts=False
    )


def test_other_lines_of_ours_stay_but_for_what_came_from_a_client() -> None:
    line = {"event": "load_failed", "detail": "no such file", "content": "a secret"}
    found = json.loads(journal([HEAD + json.dumps(line)], holds_texts=False).removeprefix(HEAD))
    assert found == {"event": "load_failed", "detail": "no such file", "content": REMOVED}


def test_a_prompt_that_journald_has_cut_into_lines_goes_as_a_whole() -> None:
    text = json.dumps({**REQUEST, "prompt": QUESTION, "answer": "Under the mat, by the door."})
    at = text.index("mat")
    lines = [f"{HEAD}{text[:at]}", f"{HEAD}{text[at:]}", f"{SYSTEMD}edgellm.service: Failed"]
    found = journal(lines, holds_texts=False)
    assert "spare" not in found
    assert "door" not in found
    assert "edgellm.service: Failed" in found


def test_where_prompts_may_be_written_no_free_text_is_believed_but_systemds() -> None:
    lines = [f"{HEAD}Where is the spare key?", f"{SYSTEMD}Started edgellm.service.", "by the door"]
    found = journal(lines, holds_texts=True).splitlines()
    assert found == [f"{HEAD}{REMOVED}", f"{SYSTEMD}Started edgellm.service.", REMOVED]


def test_where_none_are_written_a_traceback_stays_without_keys() -> None:
    lines = [f"{HEAD}Traceback (most recent call last):", f"{HEAD}ValueError: {HASH}"]
    found = journal(lines, holds_texts=False)
    assert "Traceback" in found
    assert HASH not in found
