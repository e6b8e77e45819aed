"""Clients: chats sent and timed by probe.py's stopwatch, alone or several at the same moment."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from bench.prompts import Chat
from bench.servers import Server
from edgellm_server.probe import (
    READ_BYTES,
    ProbeError,
    Stream,
    classify,
    connect,
    parse_sse_line,
    read_chunk,
)

SILENCE_DEADLINE_S = 600.0


class LoadError(Exception):
    """A request failed, so the figures would be of something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`stream` is probe.py's. `sent_s` is on time.monotonic()'s clock."""

    stream: Stream
    sent_s: float
    request_id: str | None

    @property
    def ttft_ms(self) -> float:
        return self.stream.ttft_ms

    @property
    def ended_s(self) -> float:
        return self.sent_s + self.stream.e2el_ms / 1000

    @property
    def tokens_per_s(self) -> float:
        """From the first token on. Raises LoadError for an answer too short to tell."""
        if self.stream.output_tokens < 2 or self.stream.decode_s <= 0:
            raise LoadError(f"an answer of {self.stream.output_tokens} tokens has no rate")
        return (self.stream.output_tokens - 1) / self.stream.decode_s


def ask(server: Server, chat: Chat, start: threading.Barrier | None = None) -> Answer:
    """One streamed chat over a connection of its own, opened before the clock starts.

    Raises LoadError. `start`: where several clients wait for each other before they send.
    """
    url = urlsplit(server.url)
    body = json.dumps(
        {
            "model": server.model,
            "messages": list(chat.messages),
            "max_tokens": chat.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    connection = connect(url, SILENCE_DEADLINE_S)
    stream = Stream()
    try:
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if start is not None:
            start.wait()
        sent_s = time.monotonic()
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise LoadError(f"{server.name}: {response.status} {response.read(500)!r}")
        request_id = response.headers.get("x-request-id")
        rest = b""
        while not stream.done and (piece := response.read1(READ_BYTES)):
            at_s = time.monotonic() - sent_s
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if (data := parse_sse_line(line.decode("utf-8", "replace"))) is not None:
                    read_chunk(data, at_s, stream)
        if (wrong := classify(stream)) is not None:
            raise wrong
    except ProbeError as error:
        raise LoadError(f"{server.name}: {error.kind}: {error.detail}") from error
    except (OSError, http.client.HTTPException) as error:
        raise LoadError(f"{server.name}: {type(error).__name__} {error}") from error
    finally:
        connection.close()
    return Answer(stream=stream, sent_s=sent_s, request_id=request_id)


def ask_together(server: Server, chats: Sequence[Chat]) -> list[Answer]:
    """One client a chat, all sending at the same moment. Raises LoadError."""
    start = threading.Barrier(len(chats))
    answers: list[Answer | Exception | None] = [None] * len(chats)

    def client(index: int) -> None:
        try:
            answers[index] = ask(server, chats[index], start)
        except Exception as error:
            start.abort()
            answers[index] = error

    # Daemons: after Ctrl-C nobody waits for the answers.
    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(len(chats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [answer for answer in answers if not isinstance(answer, Answer)]
    for failure in failed:
        if isinstance(failure, LoadError):
            raise failure
    if failed:
        raise LoadError(f"{server.name}: {failed[0]!r}")
    return [answer for answer in answers if isinstance(answer, Answer)]


def throughput_tokens_per_s(answers: Sequence[Answer]) -> float:
    """All their tokens over the time from the first request to the last token."""
    began_s = min(answer.sent_s for answer in answers)
    ended_s = max(answer.ended_s for answer in answers)
    return sum(answer.stream.output_tokens for answer in answers) / (ended_s - began_s)
