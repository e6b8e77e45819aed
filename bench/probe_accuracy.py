"""python -m bench.probe_accuracy: the probe's TTFT against the packets of the same requests.

A raw socket on the loopback interface gets every packet of the probe's connection with the
kernel's own time stamp: from the first packet that the probe sends to the first that holds
content. It needs root. Also measured: the probe's own time, beside waiting and asking; and whether
servers that are wrong in one way each are called by its name.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import misbehaving, prompts
from bench.load import LoadError
from bench.plan import command_prefix, plan_as_json, plan_for_this_machine, server_environ
from bench.results import Bar, Measure, report_here, table
from bench.server import CACHE, LOAD_DEADLINE_S, RESULTS, kept
from bench.servers import REPO, end, our_server
from bench.stats import Summary, side, spread
from bench.weights import weights
from edgellm_server.probe import Options, ProbeError, ask, host_state, prompt_for

WITHIN_MS = 2.0
OVERHEAD_S = 3.0
FIRST_TOKEN_S = 0.1
TOKEN_S = 0.01
TOKENS = 24

SCRIPTED = Bar(
    key="scripted_p95_ms", label="TTFT, probe - wire, scripted server, p95 ms", limit=WITHIN_MS
)
REAL = Bar(key="real_p95_ms", label="TTFT, probe - wire, real server, p95 ms", limit=WITHIN_MS)
BUSY = Bar(key="busy_p95_ms", label="the same beside two busy processes a core, p95 ms")
OVERHEAD = Bar(
    key="overhead_s", label="probe's own time at its default n, start to end, s", limit=OVERHEAD_S
)

# From linux/if_ether.h and asm-generic/socket.h; Python's socket module names neither.
ETH_P_IP = 0x0800
SO_RCVBUFFORCE = 33
SO_TIMESTAMPNS = 35
CAPTURE_BYTES = 32 << 20
CONTENT = re.compile(rb'"content": ?"[^"]')


class Wire:
    """Every packet on loopback to and from one port, stamped by the kernel as it passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        # Beyond rmem_max, so that nothing is lost while nobody reads
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, CAPTURE_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.bind(("lo", 0))
        self._socket.setblocking(False)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def forget(self) -> None:
        for _ in self._packets():
            pass

    def ttft_ms(self) -> float:
        """Of the one request since `forget`. Raises LoadError where packets of it are missing."""
        sent_ns: int | None = None
        answer = b""
        for at_ns, to_server, payload in self._packets():
            if to_server and sent_ns is None and payload.startswith(b"POST "):
                sent_ns = at_ns
            elif not to_server and sent_ns is not None:
                answer += payload
                if CONTENT.search(answer):
                    return (at_ns - sent_ns) / 1e6
        raise LoadError("the packets of a request are not all there")

    def _packets(self) -> Iterator[tuple[int, bool, bytes]]:
        """(kernel's time, to the server, TCP payload) of each that has a payload."""
        while True:
            try:
                packet, ancillary, _, _ = self._socket.recvmsg(65535, 64)
            except BlockingIOError:
                return
            header = (packet[0] & 15) * 4
            if packet[9] != socket.IPPROTO_TCP or len(packet) < header + 20:
                continue
            source, target = struct.unpack_from("!HH", packet, header)
            payload = packet[header + (packet[header + 12] >> 4) * 4 :]
            if self._port in (source, target) and payload:
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                yield seconds * 10**9 + nanoseconds, target == self._port, payload


def differences_ms(options: Options, port: int, n: int) -> tuple[list[float], list[float]]:
    """-> (probe - wire, probe) of `n` requests, after one that is not counted. Raises LoadError."""
    found: list[float] = []
    told: list[float] = []
    with Wire(port) as wire:
        for number in range(n + 1):
            wire.forget()
            try:
                stream = ask(options, prompt_for(number, secrets.token_hex(4)))
            except ProbeError as error:
                raise LoadError(f"{error.kind}: {error.detail}") from error
            if number > 0:
                found.append(stream.ttft_ms - wire.ttft_ms())
                told.append(stream.ttft_ms)
    return found, told


def measured(
    bar: Bar, found: Sequence[float], told: Sequence[float], load: float | None
) -> Measure:
    distances = [abs(value) for value in found]
    both = side(distances)
    return Measure(
        bar=bar,
        summary=Summary(value=both.p95, n=both.n, spread=spread(distances)),
        details={
            "median_ms": both.median,
            "max_ms": max(distances),
            "lowest_signed_ms": min(found),
            "probe_median_ttft_ms": side(told).median,
            "loadavg_1_before": load,
        },
    )


def overhead(options: Options, runs: int) -> Measure:
    """The probe as a host runs it, a process of its own: what it takes beside its requests."""
    probe = REPO / "edgellm_server" / "probe.py"
    command = [sys.executable, "-B", str(probe), "--url", options.url, "--model", options.model]
    own_s = []
    told: dict[str, Any] = {}
    for _ in range(runs):
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        took_s = time.monotonic() - began
        told = json.loads(done.stdout)
        if told["failures"]:
            raise LoadError(f"{told['failures'][0]}")
        asked_s = (told["wall_ms"] - told["overhead_ms"]) / 1000  # waiting and asking
        own_s.append(took_s - asked_s)
    return Measure(
        bar=OVERHEAD,
        summary=Summary(value=max(own_s), n=runs, spread=spread(own_s)),
        details={"inside_the_process_ms": told["overhead_ms"], "n_requested": told["n_requested"]},
    )


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    """Two a core that compute for ever, beside this process and not below it in weight."""
    with contextlib.ExitStack() as started:
        for _ in range(2 * len(os.sched_getaffinity(0))):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", "while True: pass"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            started.callback(end, process)
        time.sleep(0.5)
        yield


# The scripted server: what it does is known beforehand


@contextlib.contextmanager
def scripted_server() -> Iterator[int]:
    """A process that answers after FIRST_TOKEN_S, then every TOKEN_S -> its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listening,))
        process.start()
        try:
            yield port
        finally:
            process.terminate()
            process.join()


def serve(listening: socket.socket) -> None:
    """One connection after another: the probe's requests come in turn."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer(connection)


def answer(connection: socket.socket) -> None:
    request = b""
    while b"\r\n\r\n" not in request:
        request += connection.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    if head.startswith(b"GET "):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        return
    length = int(re.search(rb"(?i)content-length: *([0-9]+)", head)[1])  # type: ignore[index]
    while len(body) < length:
        body += connection.recv(65536)
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        + event({"role": "assistant", "content": ""})
    )
    words = hashlib.sha512(body).hexdigest()  # of the question, as an answer is
    until = time.monotonic() + FIRST_TOKEN_S
    for number in range(TOKENS):
        time.sleep(max(0.0, until - time.monotonic()))
        until += TOKEN_S
        connection.sendall(event({"content": f"{words[4 * number : 4 * number + 4]} "}))
    connection.sendall(event({}, "stop") + b"data: [DONE]\n\n")


def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


# All of it


def accuracy(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """-> the report. Ends what it started."""
    measures = misbehaving.measures()
    say(f"servers that misbehave: {measures[0].as_json()['value']:.0%} named right")
    with scripted_server() as port:
        scripted = Options(url=f"http://127.0.0.1:{port}", model="scripted", max_tokens=TOKENS)
        load = host_state()["loadavg_1"]
        measures.append(measured(SCRIPTED, *differences_ms(scripted, port, options.n), load))
        say(f"scripted server: {measures[-1].as_json()['value']} ms at p95")
        measures.append(overhead(scripted, options.runs))
        say(f"the probe's own time: {measures[-1].as_json()['value']} s")
        with busy_processes():
            load = host_state()["loadavg_1"]
            measures.append(measured(BUSY, *differences_ms(scripted, port, options.n), load))
        say(f"beside busy processes: {measures[-1].as_json()['value']} ms at p95")
    model = weights("small", CACHE, Path(sys.executable), say)
    settings, plan = plan_for_this_machine(model)
    with contextlib.ExitStack() as started:
        directory = Path(started.enter_context(TemporaryDirectory(prefix="edgellm-probe-")))
        environ = server_environ(plan, settings, model)
        prompt = directory / "system_prompt.txt"
        prompt.write_text(prompts.SYSTEM_PROMPT)
        environ["EDGELLM_SYSTEM_PROMPT_FILE"] = str(prompt)
        prefix = command_prefix(plan)
        server = started.enter_context(our_server("ours", model, environ, prefix, directory))
        server.wait_until_ready(LOAD_DEADLINE_S)
        real = Options(url=server.url, model=server.model, max_tokens=4)
        load = host_state()["loadavg_1"]
        measures.append(measured(REAL, *differences_ms(real, server.port, options.n), load))
        say(f"real server: {measures[-1].as_json()['value']} ms at p95")
    print("\n" + table(measures), flush=True)
    return report_here(
        measures,
        about={
            "weights": model.as_json(),
            "plan": plan_as_json(plan),
            "requests": options.n,
            "scripted_first_token_ms": FIRST_TOKEN_S * 1000,
            "wire": "AF_PACKET on lo, SO_TIMESTAMPNS: first packet sent to first with content",
        },
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.probe_accuracy", description=__doc__)
    parser.add_argument("--n", type=int, default=40, help="requests of each comparison")
    parser.add_argument("--runs", type=int, default=3, help="whole runs of the probe")
    parser.add_argument("--out", type=Path, help="default: bench/results/probe.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    whole = options.n >= 30
    path = options.out or (RESULTS / "probe.json" if whole else CACHE / "bench" / "probe.json")
    told = kept("bench.probe_accuracy", lambda say: accuracy(options, say), path)
    return 1 if any(m["met"] is False for m in told["measures"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
