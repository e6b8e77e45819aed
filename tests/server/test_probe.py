"""The probe against a real server, and against servers that fail in each of the ways it knows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm_server import probe
from edgellm_server.probe import Options, Stream

from .conftest import API_KEY, REPO, RunningServer, free_port
from .scripted import (
    END,
    READY,
    WORDS,
    event,
    says_nothing,
    sends,
    serving,
    slowly,
    status,
    talks,
    trickles,
)

# Against the real server

# Numbers that the small model answers each question to at length: to others it may say all that it
# has to say in fewer tokens than a test asks for.
TALKATIVE_NONCES = ("00011668", "0001eef1")


def always_ask_with(nonce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.secrets, "token_hex", lambda _n_bytes: nonce)


def test_a_healthy_server_gives_figures_and_no_failures(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ask_with(TALKATIVE_NONCES[0], monkeypatch)
    report = probe.probe(Options(url=server.url, model="small", n=4, max_tokens=12))
    assert report["failures"] == []
    assert report["schema"] == 2
    assert report["ready"] is True
    assert report["n"] == report["n_requested"] == 4
    for key in ("ttft_ms", "tpot_ms", "e2el_ms", "output_tokens"):
        assert len(report[key]) == 4
        assert all(value > 0 for value in report[key])
    assert report["output_tokens"] == [12] * 4
    assert all(ttft < e2el for ttft, e2el in zip(report["ttft_ms"], report["e2el_ms"], strict=True))
    assert report["p95_ttft_ms"] == max(report["ttft_ms"])
    assert report["cold_ttft_ms"] > 0
    assert report["output_throughput"] > 1
    assert report["answer_sample"]


def test_its_ttft_agrees_with_the_servers_own(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_ask_with(TALKATIVE_NONCES[1], monkeypatch)
    n_tokens = 7  # by which they are told from a request that another test left behind
    earlier = {event["id"] for event in server.events("request")}
    report = probe.probe(Options(url=server.url, model="small", n=3, max_tokens=n_tokens))

    def own_ttft_ms() -> list[float]:
        return [
            event["ttft_ms"]
            for event in server.events("request")
            if event["id"] not in earlier and event["completion_tokens"] == n_tokens
        ]

    # The server writes its line after the last byte: the probe can be here first.
    deadline = time.monotonic() + 5
    while len(own_ttft_ms()) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    own_ms = own_ttft_ms()[1:4]  # the first was the cold one, the last are behind a prefix
    # Beside the server's: a loopback round trip and the parsing of HTTP at both ends. The least
    # of them, since another process may hold the probe up.
    more_ms = [probed - own for probed, own in zip(report["ttft_ms"], own_ms, strict=True)]
    assert all(more > 0 for more in more_ms)
    assert min(more_ms) < 50


def test_it_needs_nothing_but_the_standard_library(server: RunningServer, tmp_path: Path) -> None:
    alone = shutil.copy(REPO / "edgellm_server" / "probe.py", tmp_path / "probe.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", alone, "--url", server.url, "--model", "small", "--n", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["failures"] == []


def test_it_reads_the_key_from_a_file(keyed_server: RunningServer, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(API_KEY + "\n")
    arguments = ["--url", keyed_server.url, "--model", "small", "--n", "1"]
    with_key = probe.probe(probe.parse_options([*arguments, "--api-key-file", str(key_file)]))
    assert with_key["failures"] == []
    without = probe.probe(probe.parse_options(arguments))
    assert [failure["kind"] for failure in without["failures"]] == ["http_status"] * 3
    assert "401" in without["failures"][0]["detail"]


def test_a_model_of_another_name_is_an_http_status(server: RunningServer) -> None:
    report = probe.probe(Options(url=server.url, model="other", n=1))
    assert report["failures"][0]["kind"] == "http_status"
    assert "404" in report["failures"][0]["detail"]
    assert "'small'" in report["failures"][0]["detail"]
    assert report["median_ttft_ms"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "http://127.0.0.1:1"],
        ["--url", "ftp://127.0.0.1", "--model", "m"],
        ["--url", "127.0.0.1:8000", "--model", "m"],
        ["--url", "http://h:99999", "--model", "m"],
        ["--url", "http://h", "--model", "m", "--n", "0"],
        ["--url", "http://h", "--model", "m", "--request-deadline-s", "-1"],
        ["--url", "http://h", "--model", "m", "--load-deadline-s", "nan"],
        ["--url", "http://h", "--model", "m", "--api-key-file", "/nonexistent"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.parse_options(arguments)
    assert ended.value.code == 2


# Against scripted servers


def options(url: str, **changes: Any) -> Options:
    chosen: dict[str, Any] = {
        "n": 1,
        "load_deadline_s": 1.0,
        "first_token_deadline_s": 1.0,
        "stall_deadline_s": 1.0,
        "request_deadline_s": 2.0,
    }
    return Options(url=url, model="m", **(chosen | changes))


def test_a_failed_request_gives_no_figures_and_its_number() -> None:
    with serving(sends(0.1, b"".join(map(event, WORDS)) + END)) as url:
        report = probe.probe(options(url, n=2))
    failed = [f for f in report["failures"] if f["kind"] == "buffered_stream"]
    assert [failure["request"] for failure in failed] == [0, 1, 2, 3, 4, 5]
    assert [failure["section"] for failure in failed] == [
        *("cold", "varied", "varied", "new_prefix", "known_prefix", "known_prefix"),
    ]
    assert report["ready"] is True
    assert report["n"] == report["known_prefix"]["n"] == 0
    assert report["ttft_ms"] == []
    assert report["median_ttft_ms"] is None
    assert report["p95_ttft_ms"] is None
    assert report["output_throughput"] is None


def test_it_gives_up_after_three_failures_in_a_row() -> None:
    with serving(status(500, b"{}")) as url:
        report = probe.probe(options(url, n=9))
    assert [failure["request"] for failure in report["failures"]] == [0, 1, 2]


def test_ttft_is_the_first_content_and_not_the_first_byte() -> None:
    chat = sends(event(None), event(""), b": ping\n\n", 0.3, *slowly(*WORDS, pause_s=0.02), END)
    with serving(chat) as url:
        stream = probe.ask(options(url), "Hi")
    assert 300 <= stream.ttft_ms < 900
    assert stream.output_tokens == 10
    assert (stream.tpot_ms or 0) > 15


def test_an_event_split_over_reads_is_one_event() -> None:
    whole = event("Hello") + event(" you") + END
    with serving(sends(whole[:9], 0.05, whole[9:70], 0.05, whole[70:])) as url:
        assert probe.ask(options(url), "Hi").answer == "Hello you"


def test_nobody_there_is_not_ready_yet() -> None:
    report = probe.probe(options(f"http://127.0.0.1:{free_port()}", load_deadline_s=0.6))
    assert report["ready"] is False
    assert report["ready_after_ms"] is None
    (failure,) = report["failures"]
    assert failure["kind"] == "not_ready"
    assert "Connection refused" in failure["detail"]
    assert failure["request"] is None


def test_a_server_that_keeps_loading_is_not_ready() -> None:
    with serving(says_nothing, health=status(503, b'{"state": "loading"}')) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=0.6))["failures"]
    assert failure["kind"] == "not_ready"
    assert '503 {"state": "loading"}' in failure["detail"]


def test_a_health_answer_that_trickles_is_not_ready() -> None:
    began = time.monotonic()
    with serving(says_nothing, health=trickles) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=0.6))["failures"]
    assert failure["kind"] == "not_ready"
    assert time.monotonic() - began < 3


def test_a_failed_load_is_told_at_once_with_its_reason() -> None:
    began = time.monotonic()
    body = b'{"state": "failed", "why": "want a GGUF model"}'
    with serving(says_nothing, health=status(503, body)) as url:
        (failure,) = probe.probe(options(url, load_deadline_s=30.0))["failures"]
    assert time.monotonic() - began < 5
    assert (failure["kind"], failure["detail"]) == ("load_failed", "want a GGUF model")


def test_a_server_that_becomes_ready_is_waited_for() -> None:
    answers = iter([status(503, b"{}"), status(503, b"{}")])
    with serving(talks(), health=lambda handler: next(answers, READY)(handler)) as url:
        report = probe.probe(options(url, load_deadline_s=10.0))
    assert report["ready"] is True
    assert report["ready_after_ms"] >= 2 * probe.POLL_S * 1000
    assert report["failures"] == []


# Its pure parts


@pytest.mark.parametrize(
    ("values", "percent", "want"),
    [
        ([], 95, None),
        ([7.0], 95, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 95, 5.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
        ([float(n) for n in range(1, 21)], 95, 19.0),
    ],
)
def test_percentile_is_the_nearest_rank(
    values: list[float], percent: float, want: float | None
) -> None:
    assert probe.percentile(values, percent) == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('data: {"a": 1}', '{"a": 1}'),
        ("data:[DONE]\r", "[DONE]"),
        ("data:  two", " two"),
        ("", None),
        (": ping", None),
        ("event: x", None),
        ("database: x", None),
    ],
)
def test_parse_sse_line(line: str, want: str | None) -> None:
    assert probe.parse_sse_line(line) == want


@pytest.mark.parametrize(
    "text",
    [
        *("", "Yes.", "42", "1\n2\n3\n4\n5", "haha haha", "Да, снег.", "......", "晴れ"),
        "|---|---|---| is a line of a table in Markdown",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14",
        "日本語ではカタカナとひらがなと漢字を使う (three scripts and Latin)",
        "π ≈ 3.14, Ω is the ohm, ™ and µ are signs, да is Russian",
        "नमस्ते, आप कैसे हैं? मैं ठीक हूँ",
    ],
)
def test_an_odd_but_sound_answer_is_not_garbled(text: str) -> None:
    assert probe.looks_garbled(text) is None


def test_a_short_answer_in_one_burst_is_not_called_buffered() -> None:
    stream = Stream(content_s=[0.1] * 5, text=["a", "b"], finished_s=0.1, done=True)
    assert probe.classify(stream) is None


def burst_at(*times_s: float) -> Stream:
    text = ["a"] * (8 * len(times_s))
    content_s = [at for at in times_s for _ in range(8)]
    return Stream(content_s=content_s, text=text, finished_s=times_s[-1], done=True)


def steady() -> Stream:
    content_s = [0.1 + 0.01 * index for index in range(24)]
    return Stream(content_s=content_s, text=["a"] * 24, finished_s=0.4, done=True)


def test_bursts_in_one_answer_of_five_are_the_busy_host_and_count() -> None:
    streams = {1: steady(), 2: burst_at(0.6, 0.7, 0.8), 3: steady(), 4: steady(), 5: steady()}
    counted, failures = probe.split_buffered(streams)
    assert failures == []
    assert len(counted) == 5


def test_bursts_in_most_answers_are_a_buffer_and_do_not_count() -> None:
    streams = {0: burst_at(0.5), 1: steady(), 2: burst_at(0.6), 3: burst_at(0.6)}
    counted, failures = probe.split_buffered(streams)
    assert [failure.request for failure in failures] == [0, 2, 3]
    assert {failure.kind for failure in failures} == {"buffered_stream"}
    assert counted == [streams[1]]


def test_no_two_prompts_share_a_beginning() -> None:
    prompts = [probe.prompt_for(n, f"{n:08x}") for n in range(20)]
    assert len({prompt[:10] for prompt in prompts}) == 20


def test_the_host_tells_what_it_has_and_null_for_the_rest() -> None:
    host = probe.host_state()
    assert set(host) == {
        "psi_cpu_some_avg10",
        "psi_memory_some_avg10",
        "psi_io_some_avg10",
        "loadavg_1",
        "temperature_c",
        "cpu_freq_khz",
        "cpu_freq_max_khz",
        "throttled",
        "cooling_state",
        "throttle_count",
    }
    assert host["loadavg_1"] >= 0
    json.dumps(host)
