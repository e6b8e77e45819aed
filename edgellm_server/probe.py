"""Ask a server for a few streamed answers and time them. THE definition of TTFT.

    python3 probe.py --url http://127.0.0.1:8000 --model NAME [--n 5] [--concurrency 4]

TTFT is the time from just before the request is sent, on an open connection, until the first
chunk with content that is not empty was read: not the first byte, not the role chunk. Prints one
JSON line and exits 0: failures are data. Exits 2 on wrong usage. docs/verification.md has the
fields of the line and every way to fail.

Standard library only and imports nothing of its package: it runs by itself on any host with
Python >= 3.10, and the smoke test and the bench both use it, so there is one stopwatch.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import http.client
import json
import math
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

SCHEMA = 2

# No CPU gives one stream a thousand tokens a second from a language model worth the name: chunks
# closer than this left a buffer together.
MIN_TOKEN_GAP_MS = 1.0
# From this many content chunks on, on average this many in a burst make a stream a buffered one.
BUFFERED_BURST = 6
# Where this program waited for a core for so much of a request, bursts may be its own doing.
HELD_UP_FRACTION = 0.25
# A first token takes a pass through the model at the least, as every later one does. Far less of
# it: the answer was there before. Nothing but a cache was seen below a third.
IMPOSSIBLE_TTFT_OF_TPOT = 0.1
# Empty chunks between tokens are a character's first bytes, or a keep-alive. Not so many of them.
EMPTY_CHUNKS = 8
EMPTY_PER_CONTENT = 4
REPEATED_TOKENS = 8
# Alike beginnings ("Sure! Here are") are cut from different answers; this much of one is not.
TELLING_ANSWER_CHARS = 40
LONG_ANSWER_CHARS = 24
# A random token of a vocabulary of many languages is in a script of its own.
MOST_SCRIPTS = 3
ONE_WRITING = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HANGUL": "CJK", "KATAKANA-HIRAGANA": "CJK"}

POLL_S = 0.25
READ_BYTES = 65536
COLD = 0  # the number of the request before the timed ones
# Enough to tell a stream from a buffer; what is timed behind a known prefix is its first token.
KNOWN_PREFIX_TOKENS = 8
FAILURES_IN_A_ROW = 3
FACT = "What is the capital of France? Answer in one word."

Kind = Literal[
    "not_ready",  # /health did not turn 200 before the load deadline
    "load_failed",  # /health says the load failed, and why
    "http_status",  # the answer's status is not 200
    "error_body",  # status 200, and an error in the body or in the stream
    "garbage_body",  # status 200, and no answer at all: a page, bytes, events of another protocol
    "stalled",  # tokens came, then none for the stall deadline
    "no_token",  # connected, and no content before the first-token deadline
    "empty_chunks",  # chunk after chunk with nothing in it
    "empty_answer",  # complete, and without any content
    "garbled_answer",  # content that is no text
    "cached_answer",  # one text for different questions, or a first token that no model computed
    "unexpected_answer",  # none of the words that --expect wants
    "buffered_stream",  # content that came in bursts, or in one piece: its TTFT says nothing
    "timeout",  # tokens still come at the request deadline
    "connection",  # refused, reset, or ended in mid-answer
]

# Varied, so that no cached answer and no cached prefix of the question can be measured twice; each
# asks for more tokens than --max-tokens lets through, so that there is a stream to time.
PROMPTS = (
    "Count up from {a} in steps of {b}, one number a line.",
    "What is {a} plus {b}? Explain each step.",
    "List ten words that rhyme with day.",
    "What is {a} times {b}? Show how you get there.",
    "Describe the sea to a child in three sentences.",
    "Name {b} things found in a kitchen.",
    "Count down from {a} to zero, one number a line.",
    "Explain in a few sentences why the sky is blue.",
)


# What all requests of the known-prefix sample begin with, behind a nonce of this run.
KNOWN_PREFIX = (
    "[{nonce}] You are the assistant of a machine. Operators ask you while they stand at it, often "
    "with gloves on and little time. Answer in one or two short sentences, in plain words. Where "
    "you do not know, say so and tell them whom to ask."
)


class ProbeError(Exception):
    """One request failed, in one of the ways named by Kind."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Failure:
    """`request`: 0 the cold one, 1.. those after it in their order, None for none or all of them.

    `section`: "cold", "varied", "new_prefix", "known_prefix", "concurrency" or "expect"; None: of
    none, or of several.
    """

    kind: Kind
    detail: str
    request: int | None
    section: str | None = None


@dataclass(frozen=True)
class Options:
    """Deadlines in seconds. The stall deadline is the longest silence between two tokens.

    `n`: requests of the varied and of the known-prefix sample each. `concurrency`: streams at
    once in a sample of its own; 1: none. `elsewhere`: the server is not on this host, whose state
    then explains nothing.
    """

    url: str
    model: str
    n: int = 5
    max_tokens: int = 24
    load_deadline_s: float = 120.0
    first_token_deadline_s: float = 30.0
    stall_deadline_s: float = 10.0
    request_deadline_s: float = 60.0
    api_key: str | None = None
    concurrency: int = 1
    expect: tuple[str, ...] = ()
    expect_prompt: str = FACT
    elsewhere: bool = False


@dataclass
class Stream:
    """What was seen of one answer. Times are monotonic seconds since the request was sent."""

    content_s: list[float] = field(default_factory=list)  # one a chunk with content
    text: list[str] = field(default_factory=list)
    finished_s: float | None = None  # the chunk with a finish_reason
    completion_tokens: int | None = None  # as the server counts, if it says so
    done: bool = False
    finish_reason: str | None = None
    answer_id: str | None = None
    empty_chunks: int = 0  # without content, the one that tells the role aside
    no_event: str | None = None  # a line that is not of an event stream
    sent_s: float = 0.0  # on time.monotonic()'s clock
    held_up_s: float = 0.0  # how long this program waited for a core meanwhile

    @property
    def answer(self) -> str:
        return "".join(self.text)

    @property
    def output_tokens(self) -> int:
        return self.completion_tokens or len(self.content_s)

    @property
    def ttft_ms(self) -> float:
        return self.content_s[0] * 1000

    @property
    def e2el_ms(self) -> float:
        return self._end_s * 1000

    @property
    def decode_s(self) -> float:
        """From the first token to the end of the answer."""
        return self._end_s - self.content_s[0]

    @property
    def tpot_ms(self) -> float | None:
        """None for an answer of one token: it has no time between tokens."""
        return self.decode_s * 1000 / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def _end_s(self) -> float:
        return self.finished_s if self.finished_s is not None else self.content_s[-1]


# Pure


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank: the smallest value that at least `percent` % of them do not exceed.

    Always one of the values, and for p95 of fewer than 20 simply the largest: state n beside it.
    """
    if not values:
        return None
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


def parse_sse_line(line: str) -> str | None:
    """'data: {...}' -> '{...}'; comments, blank lines and other fields -> None.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. OpenAI's streams keep
    each event to one data line, so lines need no joining.
    """
    if not line.startswith("data:"):
        return None
    data = line[len("data:") :].rstrip("\r\n")
    return data[1:] if data.startswith(" ") else data


def is_sse_line(line: str) -> bool:
    """Whether a line can be of an event stream: blank, a comment, or one of its fields."""
    name = line.rstrip("\r\n").partition(":")[0]
    return name in ("", "data", "event", "id", "retry")


def looks_garbled(text: str) -> str | None:
    """Why `text` is no answer, or None. Knows what broken weights, builds and proxies give, and
    nothing of what is right: bytes, signs, one word for ever, letters of all the world, a page."""
    if not text:
        return None
    bad = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\t\n\r") for char in text)
    if bad * 10 > len(text) * 3:
        return f"{bad} of {len(text)} characters are control or replacement characters"
    visible = "".join(text.split())
    if len(visible) >= 8 and len(set(visible)) == 1:
        return f"{visible[0]!r} {len(visible)} times"
    words = text.split()
    if len(words) >= REPEATED_TOKENS and len(set(words)) == 1:
        return f"{words[0]!r} {len(words)} times"
    if text.lstrip()[:9].lower().startswith(("<!doctype", "<html")):
        return f"a page: {_cut(text, 60)}"
    # Marks belong to the letters of Indic and other scripts.
    readable = sum(char.isalnum() or unicodedata.category(char)[0] == "M" for char in visible)
    if len(visible) >= LONG_ANSWER_CHARS and readable * 5 < len(visible):
        return f"{readable} of {len(visible)} characters are letters or digits: {_cut(text, 60)}"
    if len(found := scripts(text)) > MOST_SCRIPTS:
        return f"{len(found)} scripts in one answer ({', '.join(sorted(found))}): {_cut(text, 60)}"
    return None


def scripts(text: str) -> set[str]:
    """The writings its letters are of: 'Да, snow' -> {"CYRILLIC", "LATIN"}."""
    first_words = (
        unicodedata.name(char, "UNNAMED").split()[0]
        for char in text
        # Letters that are signs, as those of units are, are of no writing.
        if unicodedata.category(char) in ("Lu", "Ll", "Lo")
        and unicodedata.normalize("NFKC", char) == char
    )
    return {ONE_WRITING.get(word, word) for word in first_words}


def repeats_one_token(pieces: Sequence[str]) -> str | None:
    """Why a stream of these contents is no answer: one token from its first to its last."""
    tokens = [piece.strip() for piece in pieces if piece.strip()]
    if len(tokens) >= REPEATED_TOKENS and len(set(tokens)) == 1:
        return f"{tokens[0]!r} {len(tokens)} times"
    return None


def bursts(content_s: Sequence[float]) -> int:
    """How many groups of chunks arrived together, closer than MIN_TOKEN_GAP_MS to the one before.

    [0.30, 0.30, 0.30] -> 1;  [0.30, 0.33, 0.36] -> 3.
    """
    return sum(
        index == 0 or (at - content_s[index - 1]) * 1000 >= MIN_TOKEN_GAP_MS
        for index, at in enumerate(content_s)
    )


def classify(stream: Stream) -> ProbeError | None:
    """What is wrong with an answer that ended, or None."""
    if not stream.content_s and stream.no_event is not None:
        return ProbeError("garbage_body", f"no event stream: {stream.no_event}")
    if not stream.done and stream.finished_s is None:
        return ProbeError(
            "connection",
            f"the stream broke off after {len(stream.content_s)} chunks: no finish_reason, no DONE",
        )
    contents = len(stream.content_s)
    if stream.empty_chunks >= max(EMPTY_CHUNKS, EMPTY_PER_CONTENT * contents):
        return ProbeError("empty_chunks", f"{stream.empty_chunks} empty ones, {contents} with text")
    if not stream.content_s:
        return ProbeError("empty_answer", "the stream ended without any content")
    if not stream.answer.strip():
        return ProbeError("empty_answer", f"only white space, {len(stream.answer)} characters")
    if why := looks_garbled(stream.answer) or repeats_one_token(stream.text):
        return ProbeError("garbled_answer", why)
    return None


def came_in_bursts(stream: Stream) -> bool:
    """Whether the chunks of one answer came many at a time, though this program was there to read.

    One chunk with a whole answer of many tokens, as the server counts them, is a burst as well.
    """
    chunks, groups = len(stream.content_s), bursts(stream.content_s)
    enough_ms = max(HELD_UP_FRACTION * stream.e2el_ms, MIN_TOKEN_GAP_MS * chunks)
    if stream.held_up_s * 1000 >= enough_ms:
        return False
    in_bursts = chunks >= BUFFERED_BURST and groups * BUFFERED_BURST <= chunks
    # A token without a text of its own was not held back.
    tokens = max(stream.output_tokens - stream.empty_chunks, len(stream.answer.split()))
    return in_bursts or (groups == 1 and tokens >= BUFFERED_BURST)


def split_buffered(
    streams: Mapping[int, Stream], section_of: Callable[[int], str | None] = lambda number: None
) -> tuple[list[Stream], list[Failure]]:
    """Answers by number, the cold one too -> (timed ones that count, a failure for each buffered).

    A buffer holds back every answer. A busy host does it to one now and then, when the server or
    this program had to wait for a core: so bursts are believed where most answers have them.
    """
    bursty = [number for number, stream in streams.items() if came_in_bursts(stream)]
    if 2 * len(bursty) <= len(streams):
        bursty = []
    failures = []
    for number in bursty:
        stream = streams[number]
        groups, chunks = bursts(stream.content_s), len(stream.content_s)
        detail = (
            f"{chunks} chunk{'s' if chunks > 1 else ''} came in "
            f"{groups} burst{'s' if groups > 1 else ''}, "
            f"the first after {stream.ttft_ms:.0f} ms: something between buffers the stream"
        )
        failures.append(Failure("buffered_stream", detail, number, section_of(number)))
    counted = [s for number, s in streams.items() if number != COLD and number not in bursty]
    return counted, failures


def find_cached(streams: Mapping[int, Stream]) -> str | None:
    """Answers to prompt_for(number) -> why they were not computed, or None.

    Evidence is one text for most of them, to questions that have nothing in common; or first
    tokens in a fraction of the time that every later token of the same answers takes.
    """
    given = Counter(" ".join(stream.answer.split()) for stream in streams.values())
    if not given:
        return None
    text, times = given.most_common(1)[0]
    same = {n: s for n, s in streams.items() if " ".join(s.answer.split()) == text}
    questions = len({number % len(PROMPTS) for number in same})
    ended = all(stream.finish_reason == "stop" for stream in same.values())
    telling = len(text) >= TELLING_ANSWER_CHARS or (ended and questions >= 3)
    one_id = len({stream.answer_id for stream in same.values()} - {None}) == 1
    if times * 2 > len(streams) and questions >= 2 and telling:
        under = f" under one id, {next(iter(same.values())).answer_id}" if one_id else ""
        return f"one answer to {questions} different questions{under}: {_cut(text, 80)!r}"
    paced = [stream for stream in streams.values() if stream.tpot_ms is not None]
    if len(paced) >= 3:
        ttft_ms = statistics.median(stream.ttft_ms for stream in paced)
        tpot_ms = statistics.median(stream.tpot_ms or 0.0 for stream in paced)
        if tpot_ms >= MIN_TOKEN_GAP_MS and ttft_ms < IMPOSSIBLE_TTFT_OF_TPOT * tpot_ms:
            return (
                f"the first token after {ttft_ms:.1f} ms, each later one after {tpot_ms:.1f} ms: "
                "no model computed it"
            )
    return None


def figures(streams: Sequence[Stream]) -> dict[str, Any]:
    """One sample in short. `output_throughput`: the median stream's, from its first token on."""
    ttft_ms = [stream.ttft_ms for stream in streams]
    tpot_ms = [stream.tpot_ms for stream in streams if stream.tpot_ms is not None]
    throughput = [
        (stream.output_tokens - 1) / stream.decode_s
        for stream in streams
        if stream.output_tokens > 1 and stream.decode_s > 0
    ]
    return {
        "n": len(streams),
        "median_ttft_ms": _round(statistics.median(ttft_ms)) if ttft_ms else None,
        "p95_ttft_ms": _round(percentile(ttft_ms, 95)),
        "max_ttft_ms": _round(max(ttft_ms, default=None)),
        "median_tpot_ms": _round(statistics.median(tpot_ms)) if tpot_ms else None,
        "output_throughput": _round(statistics.median(throughput)) if throughput else None,
    }


def summarise(streams: Sequence[Stream]) -> dict[str, Any]:
    """Times of the timed answers -> the report's figures. `n` is how many p95 is taken of."""
    return {
        **figures(streams),
        "ttft_ms": [_round(stream.ttft_ms) for stream in streams],
        "tpot_ms": [_round(stream.tpot_ms) for stream in streams],
        "e2el_ms": [_round(stream.e2el_ms) for stream in streams],
        "output_tokens": [stream.output_tokens for stream in streams],
        "answer_sample": streams[0].answer[:80] if streams else None,
    }


def figures_together(k: int, rounds: Sequence[Sequence[Stream]]) -> dict[str, Any]:
    """`k` streams at once, in rounds. `output_throughput` is that of all of them in all: tokens
    over the time from a round's first request to its last token."""
    streams = [stream for one_round in rounds for stream in one_round]
    took_s = sum(
        max(stream.sent_s + stream.e2el_ms / 1000 for stream in one_round)
        - min(stream.sent_s for stream in one_round)
        for one_round in rounds
        if one_round
    )
    tokens = sum(stream.output_tokens for stream in streams)
    return {
        "k": k,
        **figures(streams),
        "output_throughput": _round(tokens / took_s) if took_s > 0 else None,
    }


def prompt_for(number: int, nonce: str) -> str:
    """The nonce comes first, so that nothing of the question is a cached prefix."""
    template = PROMPTS[number % len(PROMPTS)]
    seed = int(nonce, 16)
    return f"[{nonce}] " + template.format(a=13 + seed % 87, b=3 + seed % 7)


def read_chunk(data: str, at_s: float, stream: Stream) -> None:
    """One event's data into `stream`. Raises ProbeError for an error, or what is no chunk."""
    if data.strip() == "[DONE]":
        stream.done = True
        return
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ProbeError("garbage_body", f"an event that is not JSON: {_cut(data)}") from None
    if not isinstance(chunk, dict):
        raise ProbeError("garbage_body", f"an event that is not an object: {_cut(data)}")
    if (told := _error_in(chunk)) is not None:
        raise ProbeError("error_body", told)
    try:
        if isinstance(answer_id := chunk.get("id"), str):
            stream.answer_id = answer_id
        for choice in chunk.get("choices") or ():
            # llama.cpp's first chunk has content null; ours and OpenAI's "": neither is a token.
            delta = choice.get("delta") or {}
            content = delta.get("content")
            if content:
                stream.text.append(content + "")
                stream.content_s.append(at_s)
            elif not delta.get("role") and not choice.get("finish_reason"):
                stream.empty_chunks += 1
            if choice.get("finish_reason"):
                stream.finished_s = at_s
                stream.finish_reason = str(choice["finish_reason"])
                if stream.finish_reason in ("error", "abort"):
                    raise ProbeError("error_body", f"finish_reason {stream.finish_reason}")
        if chunk.get("usage"):
            stream.completion_tokens = int(chunk["usage"]["completion_tokens"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ProbeError("garbage_body", f"not a chunk in OpenAI's shape: {_cut(data)}") from None


def _error_in(answer: Mapping[str, Any]) -> str | None:
    """The message of an error in any of the shapes servers of this kind use, or None."""
    if answer.get("error"):
        return _error_message(answer["error"])
    if answer.get("choices") is None:
        for name in ("detail", "message"):  # FastAPI's, vLLM's
            if answer.get(name):
                return _error_message(answer[name])
    return None


def _error_message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return _cut(str(message))


def _cut(text: str, length: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1] + "…"


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


# Over the network


def connect(url: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    assert url.hostname is not None  # checked with the options
    return kind(url.hostname, url.port, timeout=timeout_s)


def wait_until_ready(options: Options) -> float:
    """Poll GET /health until 200 -> milliseconds that took. Raises not_ready or load_failed."""
    url = urlsplit(options.url)
    began = time.monotonic()
    last = "never asked"
    while True:
        left_s = options.load_deadline_s - (time.monotonic() - began)
        if left_s <= 0:
            raise ProbeError(
                "not_ready",
                f"GET /health was not 200 within {options.load_deadline_s:g} s; last: {last}",
            )
        poll_deadline_s = min(5.0, left_s)
        connection = connect(url, poll_deadline_s)
        try:
            connection.connect()
            with _Shutter(connection.sock, poll_deadline_s) as shutter:
                connection.request("GET", url.path.rstrip("/") + "/health")
                response = connection.getresponse()
                body = response.read(4096).decode("utf-8", "replace")
            if shutter.passed:
                raise TimeoutError(f"no whole answer within {poll_deadline_s:.1f} s")
            if response.status == 200:
                return (time.monotonic() - began) * 1000
            last = f"{response.status} {_cut(body)}"
            state = _json_object(body)
            if state.get("state") == "failed":
                raise ProbeError("load_failed", _cut(str(state.get("why", "no reason given"))))
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Refused is "not up yet": the port opens when the process has come that far.
            last = _os_error(error)
        finally:
            connection.close()
        time.sleep(min(POLL_S, max(0.0, left_s)))


def ask(
    options: Options,
    prompt: str,
    *,
    system: str | None = None,
    connected: Callable[[], None] = lambda: None,
) -> Stream:
    """One streamed chat -> its Stream, sound. Raises ProbeError for every way to fail.

    `connected` is called when nothing is left to do but to send.
    """
    url = urlsplit(options.url)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body = json.dumps(
        {
            "model": options.model,
            "messages": messages,
            "max_tokens": options.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    connection = connect(url, min(5.0, options.request_deadline_s))
    stream = Stream()
    try:
        try:
            connection.connect()
        except (OSError, ValueError) as error:  # ValueError: a host name that IDNA refuses
            raise ProbeError("connection", _os_error(error)) from None
        sock = connection.sock
        assert isinstance(sock, socket.socket)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected()
        held_up_s = _held_up_s()
        with _Shutter(sock, options.request_deadline_s) as shutter:
            deadline = _Deadline(sock, options)
            began = stream.sent_s = deadline.began
            try:
                deadline.arm(stream)
                connection.request(
                    "POST", url.path.rstrip("/") + "/v1/chat/completions", body, headers
                )
                response = connection.getresponse()
                _check_head(response)
                _read_stream(response, stream, began, deadline)
                if shutter.passed and not stream.done:
                    raise TimeoutError  # what looked like the end was the shutter's doing
            except TimeoutError:
                raise deadline.error(stream) from None
            except ProbeError:
                # http.client takes a head or body that the shutter cut for a complete one.
                if shutter.passed:
                    raise deadline.error(stream) from None
                raise
            except (OSError, ValueError, http.client.HTTPException) as error:
                if shutter.passed:
                    raise deadline.error(stream) from None
                raise ProbeError(
                    "connection", f"{_os_error(error)} after {len(stream.content_s)} chunks"
                ) from None
        stream.held_up_s = _held_up_s() - held_up_s
    finally:
        connection.close()
    if wrong := classify(stream):
        raise wrong
    return stream


def ask_together(options: Options, prompts: Sequence[str]) -> list[Stream | ProbeError]:
    """A client a prompt, all sending at the same moment -> what became of each, in order."""
    start = threading.Barrier(len(prompts))
    ended: list[Stream | ProbeError] = [ProbeError("connection", "never asked")] * len(prompts)

    def wait_for_all() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            start.wait()

    def client(index: int) -> None:
        try:
            ended[index] = ask(options, prompts[index], connected=wait_for_all)
        except ProbeError as error:
            start.abort()  # without this one, if it did not even connect
            ended[index] = error

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


class _Shutter:
    """Shuts a socket after a time. Its own timeout would only cover silence, and an answer that
    trickles in a byte at a time is never silent."""

    def __init__(self, sock: socket.socket, after_s: float) -> None:
        self._sock = sock
        self._timer = threading.Timer(after_s, self._shut)
        self._timer.daemon = True
        self.passed = False

    def __enter__(self) -> _Shutter:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _shut(self) -> None:
        self.passed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


class _Deadline:
    """The three deadlines of one request: first token, silence between tokens, all of it."""

    def __init__(self, sock: socket.socket, options: Options) -> None:
        self._sock = sock
        self._options = options
        self.began = time.monotonic()

    def arm(self, stream: Stream) -> None:
        """Before each read: how long it may take. Raises TimeoutError when there is no time."""
        now_s = time.monotonic() - self.began
        until_s = self._options.request_deadline_s
        if not stream.content_s:
            until_s = min(until_s, self._options.first_token_deadline_s)
        elif stream.finished_s is None:
            until_s = min(until_s, stream.content_s[-1] + self._options.stall_deadline_s)
        if until_s <= now_s:
            raise TimeoutError
        self._sock.settimeout(until_s - now_s)

    def error(self, stream: Stream) -> ProbeError:
        after_s = time.monotonic() - self.began
        empty = stream.empty_chunks
        if not stream.content_s and empty >= EMPTY_CHUNKS:
            return ProbeError("empty_chunks", f"{empty} chunks within {after_s:.1f} s, all empty")
        if not stream.content_s:
            return ProbeError("no_token", f"no content within {after_s:.1f} s")
        silent_s = after_s - stream.content_s[-1]
        seen = f"{len(stream.content_s)} chunks"
        if empty >= EMPTY_CHUNKS:
            seen += f" and {empty} empty ones"
        if silent_s >= self._options.stall_deadline_s and stream.finished_s is None:
            return ProbeError("stalled", f"{seen}, then none for {silent_s:.1f} s")
        return ProbeError("timeout", f"{seen} and not complete within {after_s:.1f} s")


def _check_head(response: http.client.HTTPResponse) -> None:
    if response.status != 200:
        body = response.read(4096).decode("utf-8", "replace")
        error = _json_object(body).get("error")
        said = _error_message(error) if error else _cut(body)
        raise ProbeError("http_status", f"{response.status}: {said}")
    content_type = response.headers.get_content_type()
    if content_type == "text/event-stream":
        return
    raw = response.read(READ_BYTES)
    body = raw.decode("utf-8", "replace")
    answer = _json_object(body)
    if answer.get("choices") and not answer.get("error"):
        raise ProbeError("buffered_stream", "asked for a stream, answered in one piece")
    if answer:
        raise ProbeError("error_body", _error_in(answer) or _cut(body))
    if content_type == "text/plain" and "error" in body.lower() and looks_garbled(body) is None:
        raise ProbeError("error_body", _cut(body))
    said = _cut(body) if looks_garbled(body[:200]) is None else f"{len(raw)} bytes {raw[:24]!r}"
    if "html" in content_type:
        said = f"a page, {_cut(body)}"
    raise ProbeError("garbage_body", f"want text/event-stream, have {content_type}: {said}")


def _read_stream(
    response: http.client.HTTPResponse, stream: Stream, began: float, deadline: _Deadline
) -> None:
    rest = b""
    while not stream.done:
        deadline.arm(stream)
        # read1 gives what has arrived; read and readline would wait for more.
        piece = response.read1(READ_BYTES)
        at_s = time.monotonic() - began
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if (data := parse_sse_line(text)) is not None:
                read_chunk(data, at_s, stream)
            elif text.startswith("error:"):  # llama.cpp's, before it used data
                raise ProbeError("error_body", _cut(text.partition(":")[2]))
            elif stream.no_event is None and not is_sse_line(text):
                readable = text.rstrip("\r").isprintable() and "\ufffd" not in text
                stream.no_event = _cut(text) if readable else repr(line[:24])
    if not stream.content_s and stream.no_event is None and rest.strip():
        stream.no_event = repr(rest[:24])


def _json_object(body: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _os_error(error: BaseException) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__} {error}".strip()


# The host, beside the figures: a throttled board explains a slow one


def host_state() -> dict[str, Any]:
    """Load, pressure, heat and clock now; None for what this host does not tell.

    `cooling_state`: steps by which the kernel holds the clock down; `throttle_count`: how often an
    x86 core was slowed down by heat since the host started.
    """
    return {
        "psi_cpu_some_avg10": _tell(lambda: _psi_some_avg10("cpu")),
        "psi_memory_some_avg10": _tell(lambda: _psi_some_avg10("memory")),
        "psi_io_some_avg10": _tell(lambda: _psi_some_avg10("io")),
        "loadavg_1": _tell(lambda: os.getloadavg()[0]),
        "temperature_c": _tell(_temperature_c),
        "cpu_freq_khz": _tell(lambda: _highest_khz("scaling_cur_freq")),
        "cpu_freq_max_khz": _tell(lambda: _highest_khz("cpuinfo_max_freq")),
        "throttled": _tell(_throttled),
        "cooling_state": _tell(_cooling_state),
        "throttle_count": _tell(_throttle_count),
    }


def _tell(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _first_line(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.readline().strip()


def _held_up_s() -> float:
    """How long this thread has waited for a core so far; 0 where the kernel does not count it."""
    # "run_ns wait_ns timeslices", docs: Documentation/scheduler/sched-stats.rst
    return (
        float(_tell(lambda: int(_first_line("/proc/thread-self/schedstat").split()[1])) or 0) / 1e9
    )


def _psi_some_avg10(resource: str) -> float:
    # "some avg10=0.00 avg60=0.12 avg300=0.05 total=123"
    return float(_first_line(f"/proc/pressure/{resource}").split()[1].partition("=")[2])


def _temperature_c() -> float | None:
    """The hottest thermal zone: boards do not agree on which one is the CPU's."""
    found = []
    for path in glob.glob("/sys/class/thermal/thermal_zone*/temp"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(_first_line(path)) / 1000)
    # Absent sensors read as 0 or as far below it.
    plausible = [value for value in found if 0 < value < 150]
    return max(plausible) if plausible else None


def _highest_khz(name: str) -> int | None:
    """Of all cores: the fastest one's clock, now or at most."""
    paths = glob.glob(f"/sys/devices/system/cpu/cpu[0-9]*/cpufreq/{name}")
    return max((int(_first_line(path)) for path in paths), default=None)


def _cooling_state() -> int | None:
    """The furthest step of the cooling devices that are CPUs: "thermal-cpufreq-0", "Processor"."""
    states = []
    for directory in glob.glob("/sys/class/thermal/cooling_device*"):
        with contextlib.suppress(OSError, ValueError):
            if "cpu" in (kind := _first_line(f"{directory}/type").lower()) or kind == "processor":
                states.append(int(_first_line(f"{directory}/cur_state")))
    return max(states, default=None)


def _throttle_count() -> int | None:
    paths = glob.glob("/sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/core_throttle_count")
    return sum(int(_first_line(path)) for path in paths) if paths else None


def _throttled() -> str | None:
    """The Raspberry Pi firmware's flags as it writes them: "0x0", "0x50005"; None elsewhere."""
    path = "/sys/devices/platform/soc/soc:firmware/get_throttled"
    if os.path.exists(path):
        return hex(int(_first_line(path), 16))
    if shutil.which("vcgencmd") is None:
        return None
    told = subprocess.run(
        ["vcgencmd", "get_throttled"], capture_output=True, text=True, timeout=2, check=True
    )
    return hex(int(told.stdout.strip().partition("=")[2], 16))


# All of it


class _Samples:
    """Asks, and keeps what came of it: streams by section and number, failures, time spent."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._failed_in_a_row = 0
        self._number = COLD
        self.streams: dict[str, dict[int, Stream]] = {}
        self.rounds: list[list[Stream]] = []
        self.failures: list[Failure] = []
        self.asking_s = 0.0

    @property
    def over(self) -> bool:
        """It will not get better, and each request may take its whole deadline."""
        return self._failed_in_a_row >= FAILURES_IN_A_ROW

    def one(
        self, section: str, prompt: str, *, system: str | None = None, max_tokens: int | None = None
    ) -> None:
        if self.over:
            return
        options = replace(self._options, max_tokens=max_tokens or self._options.max_tokens)
        began = time.monotonic()
        try:
            ended: Stream | ProbeError = ask(options, prompt, system=system)
        except ProbeError as error:
            ended = error
        self.asking_s += time.monotonic() - began
        self._keep(section, ended)

    def together(self, k: int) -> None:
        if self.over:
            return
        asked = [prompt_for(self._number + i, secrets.token_hex(4)) for i in range(k)]
        began = time.monotonic()
        ended = ask_together(self._options, asked)
        self.asking_s += time.monotonic() - began
        for one in ended:
            self._keep("concurrency", one)
        self.rounds.append([one for one in ended if isinstance(one, Stream)])

    def section_of(self, number: int) -> str | None:
        return next((name for name, kept in self.streams.items() if number in kept), None)

    def in_turn(self) -> dict[int, Stream]:
        """Those that had the server for themselves."""
        sections = (kept for name, kept in self.streams.items() if name != "concurrency")
        return {number: stream for kept in sections for number, stream in kept.items()}

    def of(self, *sections: str) -> dict[int, Stream]:
        return {n: s for name in sections for n, s in self.streams.get(name, {}).items()}

    def _keep(self, section: str, ended: Stream | ProbeError) -> None:
        if isinstance(ended, Stream):
            self.streams.setdefault(section, {})[self._number] = ended
            self._failed_in_a_row = 0
        else:
            self.failures.append(Failure(ended.kind, ended.detail, self._number, section))
            self._failed_in_a_row += 1
        self._number += 1


def probe(options: Options) -> dict[str, Any]:
    """Wait, warm, measure -> the report, ready for JSON. Does not raise for what servers do."""
    began = time.monotonic()
    host_before = None if options.elsewhere else host_state()
    samples = _Samples(options)
    ready_after_ms: float | None = None
    try:
        ready_after_ms = wait_until_ready(options)
    except ProbeError as error:
        samples.failures.append(Failure(error.kind, error.detail, None))
    else:
        _ask_all(options, samples)
    host = (
        None if options.elsewhere else host_state()
    )  # while the clock and the heat are the load's
    samples.failures.extend(_failures_of_all(options, samples))
    unbuffered, buffered = split_buffered(samples.in_turn(), samples.section_of)
    samples.failures.extend(buffered)

    sound = set(map(id, unbuffered))

    def counted(section: str) -> list[Stream]:
        return [stream for stream in samples.of(section).values() if id(stream) in sound]

    cold = list(samples.of("cold").values())
    new_prefix = counted("new_prefix")
    concurrency = []
    if options.concurrency > 1:
        concurrency.append({"k": 1, **figures(counted("varied"))})
        concurrency.append(figures_together(options.concurrency, samples.rounds))
    held_up_s = [stream.held_up_s for stream in samples.in_turn().values()]
    wall_ms = (time.monotonic() - began) * 1000
    return {
        "schema": SCHEMA,
        "ready": ready_after_ms is not None,
        "ready_after_ms": _round(ready_after_ms),
        "n_requested": options.n,
        "cold_ttft_ms": _round(cold[0].ttft_ms) if cold else None,
        **summarise(counted("varied")),
        "cold": figures(cold),
        "varied": figures(counted("varied")),
        "new_prefix_ttft_ms": _round(new_prefix[0].ttft_ms) if new_prefix else None,
        "known_prefix": figures(counted("known_prefix")),
        "concurrency": concurrency,
        "failures": [asdict(failure) for failure in samples.failures],
        "host_before": host_before,
        "host": host,
        "held_up_ms": _round(max(held_up_s) * 1000) if held_up_s else None,
        "overhead_ms": _round(wall_ms - (ready_after_ms or 0.0) - samples.asking_s * 1000),
        "wall_ms": _round(wall_ms),
    }


def _ask_all(options: Options, samples: _Samples) -> None:
    samples.one("cold", prompt_for(COLD, secrets.token_hex(4)))
    for number in range(1, options.n + 1):
        samples.one("varied", prompt_for(number, secrets.token_hex(4)))
    prefix = KNOWN_PREFIX.format(nonce=secrets.token_hex(4))
    few = min(options.max_tokens, KNOWN_PREFIX_TOKENS)
    for number in range(options.n + 1):
        samples.one(
            "known_prefix" if number > 0 else "new_prefix",
            prompt_for(number, secrets.token_hex(4)),
            system=prefix,
            max_tokens=few,
        )
    if options.concurrency > 1:
        for _ in range(math.ceil(options.n / options.concurrency)):
            samples.together(options.concurrency)
    if options.expect:
        samples.one("expect", options.expect_prompt)


def _failures_of_all(options: Options, samples: _Samples) -> list[Failure]:
    """What no single answer shows, and what only this one's question can."""
    failures = []
    if (why := find_cached(samples.of("cold", "varied"))) is not None:
        failures.append(Failure("cached_answer", why, None))
    for number, stream in samples.of("expect").items():
        if not any(word.lower() in stream.answer.lower() for word in options.expect):
            wanted = ", ".join(options.expect)
            detail = f"want one of {wanted} for {options.expect_prompt!r}: {_cut(stream.answer)!r}"
            failures.append(Failure("unexpected_answer", detail, number, "expect"))
    return failures


def parse_options(arguments: Sequence[str]) -> Options:
    """Command line -> Options. Ends the process with 2 on wrong usage, as argparse does."""
    parser = argparse.ArgumentParser(
        description="Time to first token of an OpenAI-compatible server, as one JSON line."
    )

    def seconds(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    def count(text: str) -> int:
        value = int(text)
        if value < 1:
            raise ValueError
        return value

    def words(text: str) -> tuple[str, ...]:
        found = tuple(word for part in text.split(",") if (word := part.strip()))
        if not found:
            raise ValueError
        return found

    parser.add_argument("--url", required=True, help="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the id in GET /v1/models")
    parser.add_argument(
        "--n",
        type=count,
        default=5,
        help="timed requests after one cold one, and as many behind a known prefix",
    )
    parser.add_argument(
        "--concurrency",
        type=count,
        default=1,
        help="streams at once, in a sample of its own (1: none)",
    )
    parser.add_argument("--max-tokens", type=count, default=24)
    parser.add_argument("--load-deadline-s", type=seconds, default=120.0)
    parser.add_argument("--first-token-deadline-s", type=seconds, default=30.0)
    parser.add_argument("--stall-deadline-s", type=seconds, default=10.0)
    parser.add_argument("--request-deadline-s", type=seconds, default=60.0)
    parser.add_argument(
        "--expect",
        type=words,
        default=(),
        metavar="WORD[,WORD]",
        help="one more request, whose answer must contain one of these words",
    )
    parser.add_argument("--expect-prompt", default=FACT, help=f"what it asks (default: {FACT})")
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="the server is not on this host: do not tell this host's load and heat",
    )
    parser.add_argument(
        "--api-key-file", help="a file with the key: as an argument, ps would show it to everyone"
    )
    given = vars(parser.parse_args(arguments))

    try:
        url = urlsplit(given["url"])
        sound = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        sound = False
    if not sound:
        parser.error(f"--url: want http://HOST:PORT, have {given['url']!r}")
    api_key = None
    if (path := given.pop("api_key_file")) is not None:
        try:
            with open(path, encoding="ascii") as file:
                api_key = file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--api-key-file: want a readable file, have {path}: {error}")
        if not api_key or len(api_key.split()) != 1:
            parser.error(f"--api-key-file: want one key, have {path} with none or several")
    return Options(api_key=api_key, **given)


def main() -> int:
    print(json.dumps(probe(parse_options(sys.argv[1:]))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
