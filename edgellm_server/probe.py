"""Ask a server for a few streamed answers and time them. THE definition of TTFT.

    python3 probe.py --url http://127.0.0.1:8000 --model NAME [--n 5]

TTFT is the time from just before the request is sent, on an open connection, until the first
chunk with content that is not empty was read: not the first byte, not the role chunk. Prints one
JSON line and exits 0: failures are data. Exits 2 on wrong usage.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

SCHEMA = 1

# No CPU gives one stream a thousand tokens a second from a language model worth the name: chunks
# closer than this left a buffer together.
MIN_TOKEN_GAP_MS = 1.0
# From this many content chunks on, on average this many in a burst make a stream a buffered one.
BUFFERED_BURST = 6

POLL_S = 0.25
READ_BYTES = 65536
COLD = 0  # the number of the request before the timed ones

Kind = Literal[
    "not_ready",  # /health did not turn 200 before the load deadline
    "load_failed",  # /health says the load failed, and why
    "http_status",  # the answer's status is not 200
    "error_body",  # status 200, and an error in the body or in the stream
    "stalled",  # tokens came, then none for the stall deadline
    "no_token",  # connected, and no content before the first-token deadline
    "empty_answer",  # complete, and without any content
    "garbled_answer",  # content that is no text
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


class ProbeError(Exception):
    """One request failed, in one of the ways named by Kind."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Failure:
    """`request`: 0 the cold one, 1.. the timed ones, None before any."""

    kind: Kind
    detail: str
    request: int | None


@dataclass(frozen=True)
class Options:
    """Deadlines in seconds. The stall deadline is the longest silence between two tokens."""

    url: str
    model: str
    n: int = 5
    max_tokens: int = 24
    load_deadline_s: float = 120.0
    first_token_deadline_s: float = 30.0
    stall_deadline_s: float = 10.0
    request_deadline_s: float = 60.0
    api_key: str | None = None


@dataclass
class Stream:
    """What was seen of one answer. Times are monotonic seconds since the request was sent."""

    content_s: list[float] = field(default_factory=list)  # one a chunk with content
    text: list[str] = field(default_factory=list)
    finished_s: float | None = None  # the chunk with a finish_reason
    completion_tokens: int | None = None  # as the server counts, if it says so
    done: bool = False

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


def looks_garbled(text: str) -> str | None:
    """Why `text` is no answer, or None. Knows only two ways: bytes that are no text, and one
    character for ever, which is what a broken quantisation or build gives."""
    if not text:
        return None
    bad = sum(char == "\ufffd" or (ord(char) < 32 and char not in "\t\n\r") for char in text)
    if bad * 10 > len(text) * 3:
        return f"{bad} of {len(text)} characters are control or replacement characters"
    visible = "".join(text.split())
    if len(visible) >= 8 and len(set(visible)) == 1:
        return f"{visible[0]!r} {len(visible)} times"
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
    if not stream.done and stream.finished_s is None:
        return ProbeError(
            "connection",
            f"the stream broke off after {len(stream.content_s)} chunks: no finish_reason, no DONE",
        )
    if not stream.content_s:
        return ProbeError("empty_answer", "the stream ended without any content")
    if not stream.answer.strip():
        return ProbeError("empty_answer", f"only white space, {len(stream.answer)} characters")
    if why := looks_garbled(stream.answer):
        return ProbeError("garbled_answer", why)
    return None


def came_in_bursts(stream: Stream) -> bool:
    """Whether the chunks of one answer came many at a time."""
    chunks = len(stream.content_s)
    return chunks >= BUFFERED_BURST and bursts(stream.content_s) * BUFFERED_BURST <= chunks


def split_buffered(streams: Mapping[int, Stream]) -> tuple[list[Stream], list[Failure]]:
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
        groups = bursts(stream.content_s)
        detail = (
            f"{len(stream.content_s)} chunks came in {groups} burst{'s' if groups > 1 else ''}, "
            f"the first after {stream.ttft_ms:.0f} ms: something between buffers the stream"
        )
        failures.append(Failure("buffered_stream", detail, number))
    counted = [s for number, s in streams.items() if number != COLD and number not in bursty]
    return counted, failures


def summarise(streams: Sequence[Stream]) -> dict[str, Any]:
    """Times of the timed answers -> the report's figures. `n` is how many p95 is taken of."""
    ttft_ms = [stream.ttft_ms for stream in streams]
    tpot_ms = [stream.tpot_ms for stream in streams]
    known_tpot_ms = [value for value in tpot_ms if value is not None]
    # Tokens a second of one stream, from its first token on: the prompt does not count.
    throughput = [
        (stream.output_tokens - 1) / stream.decode_s
        for stream in streams
        if stream.output_tokens > 1 and stream.decode_s > 0
    ]
    return {
        "n": len(streams),
        "ttft_ms": [_round(value) for value in ttft_ms],
        "tpot_ms": [_round(value) for value in tpot_ms],
        "e2el_ms": [_round(stream.e2el_ms) for stream in streams],
        "output_tokens": [stream.output_tokens for stream in streams],
        "median_ttft_ms": _round(statistics.median(ttft_ms)) if ttft_ms else None,
        "p95_ttft_ms": _round(percentile(ttft_ms, 95)),
        "median_tpot_ms": _round(statistics.median(known_tpot_ms)) if known_tpot_ms else None,
        "output_throughput": _round(statistics.median(throughput)) if throughput else None,
        "answer_sample": streams[0].answer[:80] if streams else None,
    }


def prompt_for(number: int, nonce: str) -> str:
    """The nonce comes first, so that nothing of the question is a cached prefix."""
    template = PROMPTS[number % len(PROMPTS)]
    seed = int(nonce, 16)
    return f"[{nonce}] " + template.format(a=13 + seed % 87, b=3 + seed % 7)


def read_chunk(data: str, at_s: float, stream: Stream) -> None:
    """One event's data into `stream`. Raises ProbeError for an error event or none of JSON."""
    if data.strip() == "[DONE]":
        stream.done = True
        return
    try:
        chunk = json.loads(data)
    except ValueError:
        raise ProbeError("error_body", f"an event that is not JSON: {_cut(data)}") from None
    if not isinstance(chunk, dict):
        raise ProbeError("error_body", f"an event that is not an object: {_cut(data)}")
    if chunk.get("error"):
        raise ProbeError("error_body", _error_message(chunk["error"]))
    try:
        for choice in chunk.get("choices") or ():
            # llama.cpp's first chunk has content null; ours and OpenAI's "": neither is a token.
            content = (choice.get("delta") or {}).get("content")
            if content:
                stream.text.append(content + "")
                stream.content_s.append(at_s)
            if choice.get("finish_reason"):
                stream.finished_s = at_s
        if chunk.get("usage"):
            stream.completion_tokens = int(chunk["usage"]["completion_tokens"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ProbeError("error_body", f"not a chunk in OpenAI's shape: {_cut(data)}") from None


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


def ask(options: Options, prompt: str) -> Stream:
    """One streamed chat -> its Stream, sound. Raises ProbeError for every way to fail."""
    url = urlsplit(options.url)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    body = json.dumps(
        {
            "model": options.model,
            "messages": [{"role": "user", "content": prompt}],
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
        with _Shutter(sock, options.request_deadline_s) as shutter:
            deadline = _Deadline(sock, options)
            began = deadline.began
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
    finally:
        connection.close()
    if wrong := classify(stream):
        raise wrong
    return stream


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
        if not stream.content_s:
            return ProbeError("no_token", f"no content within {after_s:.1f} s")
        silent_s = after_s - stream.content_s[-1]
        seen = f"{len(stream.content_s)} chunks"
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
    body = response.read(READ_BYTES).decode("utf-8", "replace")
    answer = _json_object(body)
    if answer.get("error"):
        raise ProbeError("error_body", _error_message(answer["error"]))
    if answer.get("choices"):
        raise ProbeError("buffered_stream", "asked for a stream, answered in one piece")
    raise ProbeError("error_body", f"want text/event-stream, have {content_type}: {_cut(body)}")


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
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if (data := parse_sse_line(line.decode("utf-8", "replace"))) is not None:
                read_chunk(data, at_s, stream)


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
    """Load, pressure, heat and clock now; None for what this host does not tell."""
    return {
        "psi_cpu_some_avg10": _tell(_psi_cpu_some_avg10),
        "loadavg_1": _tell(lambda: os.getloadavg()[0]),
        "temperature_c": _tell(_temperature_c),
        "cpu_freq_khz": _tell(_cpu_freq_khz),
        "throttled": _tell(_throttled),
    }


def _tell(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _first_line(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.readline().strip()


def _psi_cpu_some_avg10() -> float:
    # "some avg10=0.00 avg60=0.12 avg300=0.05 total=123"
    return float(_first_line("/proc/pressure/cpu").split()[1].partition("=")[2])


def _temperature_c() -> float | None:
    """The hottest thermal zone: boards do not agree on which one is the CPU's."""
    found = []
    for path in glob.glob("/sys/class/thermal/thermal_zone*/temp"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(_first_line(path)) / 1000)
    # Absent sensors read as 0 or as far below it.
    plausible = [value for value in found if 0 < value < 150]
    return max(plausible) if plausible else None


def _cpu_freq_khz() -> int | None:
    """The fastest core's clock now."""
    paths = glob.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    return max((int(_first_line(path)) for path in paths), default=None)


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


def probe(options: Options) -> dict[str, Any]:
    """Wait, warm, measure -> the report, ready for JSON. Does not raise for what servers do."""
    failures: list[Failure] = []
    streams: dict[int, Stream] = {}
    ready_after_ms: float | None = None
    try:
        ready_after_ms = wait_until_ready(options)
    except ProbeError as error:
        failures.append(Failure(error.kind, error.detail, None))
    else:
        failed_in_a_row = 0
        for number in range(COLD, options.n + 1):
            try:
                stream = ask(options, prompt_for(number, secrets.token_hex(4)))
            except ProbeError as error:
                failures.append(Failure(error.kind, error.detail, number))
                failed_in_a_row += 1
                if failed_in_a_row == 3:
                    break  # it will not get better, and each may take its whole deadline
                continue
            failed_in_a_row = 0
            streams[number] = stream
    unbuffered, buffered = split_buffered(streams)
    failures.extend(buffered)
    return {
        "schema": SCHEMA,
        "ready": ready_after_ms is not None,
        "ready_after_ms": _round(ready_after_ms),
        "n_requested": options.n,
        "cold_ttft_ms": _round(streams[COLD].ttft_ms) if COLD in streams else None,
        **summarise(unbuffered),
        "failures": [asdict(failure) for failure in failures],
        "host": host_state(),
    }


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

    parser.add_argument("--url", required=True, help="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the id in GET /v1/models")
    parser.add_argument("--n", type=count, default=5, help="timed requests, after one cold one")
    parser.add_argument("--max-tokens", type=count, default=24)
    parser.add_argument("--load-deadline-s", type=seconds, default=120.0)
    parser.add_argument("--first-token-deadline-s", type=seconds, default=30.0)
    parser.add_argument("--stall-deadline-s", type=seconds, default=10.0)
    parser.add_argument("--request-deadline-s", type=seconds, default=60.0)
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
