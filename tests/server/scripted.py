"""A local server that answers as a test tells it to: well, or badly in one of many ways."""

from __future__ import annotations

import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[[BaseHTTPRequestHandler], None]


def event(content: Any, finish_reason: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage(completion_tokens: int) -> bytes:
    chunk = {"choices": [], "usage": {"completion_tokens": completion_tokens}}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


END = event(None, "stop") + b"data: [DONE]\n\n"


def head(handler: BaseHTTPRequestHandler, content_type: str = "text/event-stream") -> None:
    handler.send_response(200)
    handler.send_header("content-type", content_type)
    handler.end_headers()


def sends(*pieces: bytes | float, content_type: str = "text/event-stream") -> Behaviour:
    """Answers with the bytes; a number is a pause in seconds."""

    def behave(handler: BaseHTTPRequestHandler) -> None:
        head(handler, content_type)
        for piece in pieces:
            if isinstance(piece, bytes):
                handler.wfile.write(piece)
            else:
                time.sleep(piece)

    return behave


def status(code: int, body: bytes) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def resets(*pieces: bytes) -> Behaviour:
    def behave(handler: BaseHTTPRequestHandler) -> None:
        head(handler)
        for piece in pieces:
            handler.wfile.write(piece)
        time.sleep(0.05)
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 s: close() resets
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()

    return behave


def breaks_a_chunk(handler: BaseHTTPRequestHandler) -> None:
    """Chunked transfer that ends in the middle of a chunk."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"40\r\n" + event("Hello")[:20])
    handler.close_connection = True


def trickles(handler: BaseHTTPRequestHandler) -> None:
    """A header line that never ends, a byte at a time: never silent, never there."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nx-slow: ")
    for _ in range(100):
        handler.wfile.write(b"x")
        time.sleep(0.05)


def says_nothing(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(4)


READY = status(200, b'{"state": "ready"}')


@contextmanager
def serving(chat: Behaviour, health: Behaviour = READY) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            health(self)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.asked = [message["content"] for message in asked["messages"]]
            try:
                chat(self)
            except OSError:
                self.close_connection = True  # the probe hung up

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}"
        finally:
            httpd.shutdown()
            thread.join()


def slowly(*contents: Any, pause_s: float = 0.01) -> list[bytes | float]:
    return [piece for content in contents for piece in (event(content), pause_s)]


WORDS = ["the", "sea", "is", "wide", "and", "blue", "and", "very", "deep", "indeed"]


def answer_to(question: str, length: int = 12) -> list[str]:
    """Words that depend on the question, as a model's do."""
    seed = random.Random(question)
    return [seed.choice(WORDS) + " " for _ in range(length)]


def talks(
    *,
    first_token_s: float = 0.03,
    pause_s: float = 0.006,
    length: int = 12,
    together: Callable[[int], int] = lambda number: 1,
) -> Behaviour:
    """A sound server. `together`: how many words leave at once in its answer of this number."""
    numbers = itertools.count()

    def behave(handler: Any) -> None:
        at_once = together(next(numbers))
        words = answer_to(handler.asked[-1], length)
        head(handler)
        handler.wfile.write(event(None, role="assistant"))
        time.sleep(first_token_s)
        for start in range(0, length, at_once):
            handler.wfile.write(b"".join(map(event, words[start : start + at_once])))
            time.sleep(pause_s * at_once)
        handler.wfile.write(END)

    return behave


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Another one for each request, the last one for all that follow."""
    left = list(behaviours)

    def behave(handler: Any) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return behave
