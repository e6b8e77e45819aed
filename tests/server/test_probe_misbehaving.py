"""Servers that misbehave, each told apart by its kind, and servers that only look as if."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from edgellm_server import probe
from edgellm_server.probe import Options, Stream

from .scripted import (
    END,
    WORDS,
    Behaviour,
    answer_to,
    breaks_a_chunk,
    event,
    head,
    in_turn,
    resets,
    says_nothing,
    sends,
    serving,
    slowly,
    status,
    talks,
    trickles,
    usage,
)


def options(url: str, **changes: Any) -> Options:
    chosen: dict[str, Any] = {
        "n": 5,
        "load_deadline_s": 2.0,
        "first_token_deadline_s": 1.0,
        "stall_deadline_s": 1.0,
        "request_deadline_s": 2.0,
    }
    return Options(url=url, model="m", **(chosen | changes))


def kinds(report: dict[str, Any]) -> set[str]:
    return {failure["kind"] for failure in report["failures"]}


# In one answer

FAILING: list[tuple[str, str, Behaviour, str]] = [
    (
        "sends all at the end",
        "buffered_stream",
        sends(0.2, b"".join(event(word + " ") for word in WORDS) + END),
        "10 chunks came in 1 burst,",
    ),
    (
        "sends in two bursts",
        "buffered_stream",
        sends(*(p for _ in "ab" for p in (0.1, b"".join(map(event, WORDS)))), END),
        "20 chunks came in 2 bursts,",
    ),
    (
        "answers in one piece",
        "buffered_stream",
        sends(b'{"choices": [{"message": {}}]}', content_type="application/json"),
        "in one piece",
    ),
    ("ends without content", "empty_answer", sends(event(None), event(""), END), "without any"),
    ("sends only spaces", "empty_answer", sends(*slowly(" ", "\n", " "), END), "white space"),
    (
        "sends empty chunks for ever",
        "empty_chunks",
        sends(event(None, role="assistant"), *slowly(*[""] * 400)),
        "all empty",
    ),
    (
        "sends empty chunks to the end",
        "empty_chunks",
        sends(*slowly(*[""] * 12, pause_s=0.001), END),
        "12 empty ones, 0 with text",
    ),
    (
        "sends one word and empty chunks to the end",
        "empty_chunks",
        sends(*slowly("Hello", *[""] * 12, pause_s=0.001), END),
        "12 empty ones, 1 with text",
    ),
    (
        "sends one word and empty chunks for ever",
        "stalled",
        sends(*slowly("Hello", *[""] * 400)),
        "empty ones, then none for",
    ),
    ("says nothing at all", "no_token", says_nothing, "no content within"),
    ("sends a role and then nothing", "no_token", sends(event(None), 4.0), "no content within"),
    (
        "puts an error in the stream",
        "error_body",
        sends(*slowly("Hello"), b'data: {"error": {"message": "out of memory"}}\n\n'),
        "out of memory",
    ),
    (
        "puts an error in a 200 body",
        "error_body",
        sends(b'{"error": {"message": "no model"}}', content_type="application/json"),
        "no model",
    ),
    (
        "puts FastAPI's error in a 200 body",
        "error_body",
        sends(b'{"detail": "no such model"}', content_type="application/json"),
        "no such model",
    ),
    (
        "says its error in plain text",
        "error_body",
        sends(b"Internal Server Error", content_type="text/plain"),
        "Internal Server Error",
    ),
    (
        "puts vLLM's error in the stream",
        "error_body",
        sends(b'data: {"object": "error", "message": "too long"}\n\n'),
        "too long",
    ),
    (
        "puts an error under a name of its own",
        "error_body",
        sends(b'error: {"code": 500, "message": "slot lost"}\n\n'),
        "slot lost",
    ),
    (
        "ends for an error",
        "error_body",
        sends(*slowly("Hello"), event(None, "error"), END),
        "finish_reason error",
    ),
    (
        "is a captive portal",
        "garbage_body",
        sends(b"<html>Log in</html>", content_type="text/html"),
        "text/html: a page",
    ),
    (
        "calls a page an event stream",
        "garbage_body",
        sends(b"<!DOCTYPE html>\n<html>Log in</html>\n"),
        "no event stream: <!DOCTYPE html>",
    ),
    (
        "sends bytes of no kind",
        "garbage_body",
        sends(bytes(range(256)) * 4, content_type="application/octet-stream"),
        "1024 bytes b'\\x00",
    ),
    ("calls bytes an event stream", "garbage_body", sends(b"\x00\xff" * 300), "no event stream"),
    ("sends events that are not JSON", "garbage_body", sends(b"data: {oops\n\n"), "not JSON"),
    ("sends events that are lists", "garbage_body", sends(b"data: [1]\n\n"), "not an object"),
    (
        "sends events of another shape",
        "garbage_body",
        sends(b'data: {"choices": [7]}\n\n'),
        "shape",
    ),
    (
        "sends a page as its answer",
        "garbled_answer",
        sends(*slowly("<!DOCTYPE html>", "<title>", "Log in"), END),
        "a page",
    ),
    ("repeats one token", "garbled_answer", sends(*slowly(*[" the"] * 9), END), "'the' 9 times"),
    (
        "repeats a token without spaces",
        "garbled_answer",
        sends(*slowly(*["the"] * 9), END),
        "'the' 9 times",
    ),
    (
        "sends signs alone",
        "garbled_answer",
        sends(*slowly(*["#$%", '"!', "&*(", ")(", "@!", "{}", "}|", "~^", "<>", "?/", "\\;"]), END),
        "0 of 24 characters are letters",
    ),
    (
        "sends tokens of all the world",
        "garbled_answer",
        sends(*slowly(" rest", "на", "的", "ของ", "und", "ال"), END),
        "5 scripts",
    ),
    (
        "sends a whole answer as one chunk of its stream",
        "buffered_stream",
        sends(0.1, event("The sea is wide and blue."), event(None, "stop"), usage(9), END),
        "1 chunk came in 1 burst",
    ),
    ("stops after the first token", "stalled", sends(*slowly("Hello"), 4.0), "1 chunks, then none"),
    (
        "never comes to an end",
        "timeout",
        sends(*slowly(*WORDS * 30, pause_s=0.02)),
        "not complete within 2.",
    ),
    ("trickles its head", "no_token", trickles, "no content within"),
    (
        "sends bytes that are no text",
        "garbled_answer",
        sends(*slowly("\ufffd\ufffd", "a"), END),
        "2 of 3",
    ),
    ("repeats one character", "garbled_answer", sends(*slowly(*"GGGGGGGGGG"), END), "'G' 10 times"),
    ("breaks off in the answer", "connection", sends(*slowly("Hello", " you")), "after 2 chunks"),
    ("breaks off before it", "connection", sends(event(None)), "after 0 chunks"),
    ("breaks off in a chunk", "connection", breaks_a_chunk, ""),
    ("resets the connection", "connection", resets(event("Hello")), "after 1 chunks"),
    ("is overloaded", "http_status", status(503, b'{"error": {"message": "full"}}'), "503: full"),
    ("is not there", "http_status", status(404, b"<h1>Not Found</h1>"), "404"),
]


@pytest.mark.parametrize(
    ("kind", "chat", "detail"),
    [case[1:] for case in FAILING],
    ids=[case[0] for case in FAILING],
)
def test_a_server_that(kind: str, chat: Behaviour, detail: str) -> None:
    with serving(chat) as url:
        try:
            _, failures = probe.split_buffered({1: probe.ask(options(url), "Hi")})
            found = [(failure.kind, failure.detail) for failure in failures]
        except probe.ProbeError as error:
            found = [(error.kind, error.detail)]
    assert [kind for kind, _ in found] == [kind], found
    assert detail in found[0][1]


def test_every_kind_that_one_answer_can_show_has_a_server_here() -> None:
    shown = {kind for _, kind, _, _ in FAILING}
    others = {"not_ready", "load_failed", "cached_answer", "unexpected_answer"}
    assert shown | others == set(probe.Kind.__args__)  # type: ignore[attr-defined]


# In several answers


def replays(*words: str, answer_id: str | None = None, first_s: float = 0.03) -> Behaviour:
    more = {} if answer_id is None else {"id": answer_id}
    chunks = [p for word in words for p in (event(word + " ", **more), 0.006)]
    return sends(first_s, *chunks, event(None, "stop", **more), END)


def test_a_server_that_repeats_one_answer_is_a_cache() -> None:
    with serving(replays(*WORDS)) as url:
        report = probe.probe(options(url))
    (failure,) = report["failures"]
    assert failure["kind"] == "cached_answer"
    assert failure["detail"] == (
        "one answer to 6 different questions: 'the sea is wide and blue and very deep indeed'"
    )


def test_an_answer_repeated_under_one_id_names_the_id() -> None:
    with serving(replays(*WORDS, answer_id="chatcmpl-7")) as url:
        (failure,) = probe.probe(options(url))["failures"]
    assert "6 different questions under one id, chatcmpl-7: " in failure["detail"]


def test_a_short_answer_repeated_to_all_is_a_cache_as_well() -> None:
    with serving(replays("Hello!")) as url:
        report = probe.probe(options(url))
    assert kinds(report) == {"cached_answer"}


def test_a_cache_that_knows_the_questions_is_told_by_its_first_token() -> None:
    def behave(handler: Any) -> None:
        sends(*slowly(*answer_to(handler.asked[-1]), pause_s=0.04), END)(handler)

    with serving(behave) as url:
        (failure,) = probe.probe(options(url, n=3))["failures"]
    assert failure["kind"] == "cached_answer"
    assert failure["detail"].startswith("the first token after ")
    assert failure["detail"].endswith(": no model computed it")


def test_a_cache_that_sends_all_at_once_is_named_as_both() -> None:
    burst = sends(b"".join(event(word + " ") for word in WORDS) + END)
    with serving(burst) as url:
        report = probe.probe(options(url))
    assert kinds(report) == {"cached_answer", "buffered_stream"}


def test_a_buffer_before_a_sound_model_is_only_a_buffer() -> None:
    with serving(talks(together=lambda number: 12)) as url:
        report = probe.probe(options(url))
    assert kinds(report) == {"buffered_stream"}
    assert report["median_ttft_ms"] is None


def test_one_failed_answer_among_sound_ones_is_named_with_its_number_and_section() -> None:
    error = sends(*slowly("Hello"), b'data: {"error": "out of memory"}\n\n')
    with serving(in_turn(talks(), talks(), error, talks())) as url:
        report = probe.probe(options(url, n=3))
    assert report["failures"] == [
        {"kind": "error_body", "detail": "out of memory", "request": 2, "section": "varied"}
    ]
    assert report["n"] == 2


def test_different_faults_of_one_server_are_all_named() -> None:
    stalls = sends(*slowly("Hello"), 1.5)
    empty = sends(*slowly(*[""] * 12, pause_s=0.001), END)
    page = sends(b"<html>Log in</html>", content_type="text/html")
    with serving(in_turn(talks(), stalls, talks(), empty, talks(), page, talks())) as url:
        report = probe.probe(options(url))
    found = [(failure["kind"], failure["request"]) for failure in report["failures"]]
    assert found == [("stalled", 1), ("empty_chunks", 3), ("garbage_body", 5)]


def test_a_stall_after_a_burst_is_a_stall() -> None:
    with serving(sends(b"".join(map(event, WORDS)), 1.5)) as url:
        report = probe.probe(options(url))
    assert kinds(report) == {"stalled"}


def test_an_error_behind_empty_chunks_is_the_error() -> None:
    chunks = slowly(*[""] * 12, pause_s=0.001)
    with serving(sends(*chunks, b'data: {"error": {"message": "full"}}\n\n')) as url:
        report = probe.probe(options(url))
    assert kinds(report) == {"error_body"}


def test_the_stall_deadline_is_an_option_of_its_own() -> None:
    chat = sends(*slowly("The", " sea"), 0.5, *slowly(" is", " wide"), END)
    with serving(chat) as url:
        with pytest.raises(probe.ProbeError) as raised:
            probe.ask(options(url, stall_deadline_s=0.2), "Hi")
        assert probe.ask(options(url, stall_deadline_s=1.0), "Hi").answer == "The sea is wide"
    assert raised.value.kind == "stalled"


@pytest.mark.parametrize(
    ("expect", "found"), [(("PARIS", "France"), set()), (("Rome",), {"unexpected_answer"})]
)
def test_the_expected_word_is_looked_for_in_an_answer_of_its_own(
    expect: tuple[str, ...], found: set[str]
) -> None:
    def behave(handler: Any) -> None:
        known = replays("It", "is", "Paris.")
        (known if handler.asked[-1] == probe.FACT else talks())(handler)

    with serving(behave) as url:
        report = probe.probe(options(url, n=1, expect=expect))
    assert kinds(report) == found


# Sound servers that look odd


@pytest.mark.parametrize(
    "chat",
    [
        pytest.param(talks(first_token_s=0.4, pause_s=0.03, length=6), id="is slow"),
        pytest.param(talks(length=1), id="answers with one word"),
        pytest.param(talks(length=3), id="answers in three words"),
        pytest.param(talks(together=lambda number: 3), id="sends three tokens at a time"),
        pytest.param(
            talks(together=lambda number: 12 if number % 3 == 1 else 1),
            id="is held back by its busy host in every third answer",
        ),
        pytest.param(talks(pause_s=0.0015, length=24), id="is fast"),
    ],
)
def test_no_false_alarm_for_a_server_that(chat: Behaviour) -> None:
    with serving(chat) as url:
        report = probe.probe(options(url))
    assert report["failures"] == []
    assert report["n"] == report["known_prefix"]["n"] == 5


def test_no_false_alarm_for_alike_beginnings_of_cut_answers() -> None:
    begins = [event(word, **{"id": "1"}) for word in ("Sure", "!", " Here", " are")]
    paced: list[bytes | float] = [piece for chunk in begins for piece in (chunk, 0.006)]
    with serving(sends(0.03, *paced, event(None, "length"), b"data: [DONE]\n\n")) as url:
        assert probe.probe(options(url))["failures"] == []


def test_no_false_alarm_for_keep_alives_before_the_first_token() -> None:
    def behave(handler: Any) -> None:
        head(handler)
        for piece in (event(""), b": ping\n\n", event(""), b"retry: 5\n\n", event("")):
            handler.wfile.write(piece)
            time.sleep(0.02)
        for word in answer_to(handler.asked[-1]):
            handler.wfile.write(event(word))
            time.sleep(0.006)
        handler.wfile.write(END)

    with serving(behave) as url:
        report = probe.probe(options(url, n=2))
    assert report["failures"] == []
    assert report["median_ttft_ms"] >= 60


def steady(text: str = "", **changes: Any) -> Stream:
    """24 tokens, one every 10 ms."""
    content_s = [0.1 + 0.01 * index for index in range(24)]
    words = text.split() or [f"word{index}" for index in range(24)]
    return Stream(content_s=content_s, text=words, finished_s=0.4, done=True, **changes)


def test_bursts_are_not_the_servers_where_the_probe_itself_waited_for_a_core() -> None:
    burst = Stream(content_s=[0.4] * 24, text=["a"] * 24, finished_s=0.4, done=True)
    assert probe.came_in_bursts(burst)
    assert not probe.came_in_bursts(replace(burst, held_up_s=0.2))


def test_a_text_of_two_answers_in_six_is_no_cache() -> None:
    long = "the very same sentence that is long enough to be told from a beginning"
    streams = {0: steady(long), 3: steady(long)} | {n: steady(f"answer {n}") for n in (1, 2, 4, 5)}
    assert probe.find_cached(streams) is None


def test_one_text_for_one_question_asked_again_is_no_cache() -> None:
    long = "the very same sentence that is long enough to be told from a beginning"
    assert probe.find_cached({2: steady(long), 10: steady(long)}) is None


# Several at once


def test_streams_at_once_have_a_section_of_their_own() -> None:
    with serving(talks(first_token_s=0.1, length=10)) as url:
        report = probe.probe(options(url, n=5, concurrency=3))
    assert report["failures"] == []
    one, three = report["concurrency"]
    assert (one["k"], three["k"]) == (1, 3)
    assert (one["n"], three["n"]) == (5, 6)  # two rounds of three
    assert {**one, "k": None} == {**report["varied"], "k": None}
    assert 100 <= three["median_ttft_ms"] <= three["p95_ttft_ms"] <= three["max_ttft_ms"]
    # Of three streams in all: more than one alone gives, prompt time and all
    alone = 10 / (0.1 + 10 * 0.006)
    assert alone < three["output_throughput"] < 3 * 10 / 0.1


def test_without_concurrency_there_is_no_such_section() -> None:
    with serving(talks()) as url:
        report = probe.probe(options(url, n=1))
    assert report["concurrency"] == []


def test_the_requests_of_a_round_are_sent_at_one_moment() -> None:
    with serving(talks(first_token_s=0.2)) as url:
        ended = probe.ask_together(options(url), ["a", "b", "c", "d"])
    sent_s = [stream.sent_s for stream in ended if isinstance(stream, Stream)]
    assert len(sent_s) == 4
    assert max(sent_s) - min(sent_s) < 0.1


def test_who_is_refused_in_a_round_is_a_failure_and_the_others_still_count() -> None:
    refused = status(503, b'{"error": {"message": "the queue is full"}}')
    alone = [talks() for _ in range(4)]  # cold, varied, new prefix, known prefix
    with serving(in_turn(*alone, talks(), refused, talks())) as url:
        report = probe.probe(options(url, n=1, concurrency=3))
    (failure,) = report["failures"]
    assert (failure["kind"], failure["section"]) == ("http_status", "concurrency")
    assert report["concurrency"][1]["n"] == 2


# What the samples are


def test_samples_are_kept_apart_and_only_the_known_prefix_is_asked_twice() -> None:
    asked: list[list[str]] = []

    def behave(handler: Any) -> None:
        asked.append(handler.asked)
        # Slow for whatever it has not seen the beginning of
        seen = sum(one[0] == handler.asked[0] for one in asked) > 1
        talks(first_token_s=0.02 if seen else 0.1, length=4)(handler)

    with serving(behave) as url:
        report = probe.probe(options(url, n=3))
    assert report["failures"] == []
    assert len(asked) == 1 + 3 + 1 + 3
    questions = [one[-1] for one in asked]
    assert len(set(questions)) == 8
    assert len({one[0] for one in asked[4:]}) == 1
    for name, n in (("cold", 1), ("varied", 3), ("known_prefix", 3)):
        sample = report[name]
        assert sample["n"] == n
        assert sample["median_ttft_ms"] <= sample["p95_ttft_ms"] <= sample["max_ttft_ms"]
    assert report["varied"]["median_ttft_ms"] >= 100
    assert report["new_prefix_ttft_ms"] >= 100
    assert 20 <= report["known_prefix"]["median_ttft_ms"] < 100
    assert report["median_ttft_ms"] == report["varied"]["median_ttft_ms"]


def test_the_probes_own_time_is_told_apart_from_that_of_its_requests() -> None:
    with serving(talks(first_token_s=0.1)) as url:
        began = time.monotonic()
        report = probe.probe(options(url, n=2))
        took_ms = (time.monotonic() - began) * 1000
    assert report["wall_ms"] <= took_ms
    assert report["wall_ms"] > 6 * 100
    assert 0 <= report["overhead_ms"] < report["wall_ms"] / 2


def test_a_server_elsewhere_is_not_explained_by_this_hosts_state() -> None:
    with serving(talks()) as url:
        here, there = (
            probe.probe(options(url, n=1, elsewhere=elsewhere)) for elsewhere in (False, True)
        )
    assert here["host"].keys() == here["host_before"].keys() == probe.host_state().keys()
    assert there["host"] is None
    assert there["host_before"] is None
