"""The measurements: one function a row or a few rows of the table, each in rounds of turns.

In a round both servers do the same thing one after the other, and who begins changes with each
round. The ratio is taken within the round; while one works, the other does nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bench import process_tree, prompts
from bench.load import Answer, ask, ask_together, throughput_tokens_per_s
from bench.neighbours import GroupError, Groups, busy_neighbours, cpu_groups
from bench.results import Bar, Measure
from bench.servers import (
    REPO,
    Server,
    ServerError,
    free_port,
    our_command,
    our_environ,
    running,
)
from bench.stats import Summary, p95_ratio, pair_ratios, side, summary

T = TypeVar("T")

LONG_TOKENS = 445
PREFILL_TOKENS = 900
SETTLE_S = 0.15  # OpenMP's threads spin for some milliseconds after their work
READY_DEADLINE_S = 180.0
READY_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many rounds of each, and tokens of the timed answers."""

    cold_starts: int = 7
    known_prefix: int = 20
    cold: int = 16
    cold_5: int = 8
    cold_other: int = 4
    long: int = 5
    rate: int = 8
    rate_tokens: int = 48
    throughput: int = 5
    throughput_tokens: int = 32
    prefill: int = 6
    conversations: int = 4
    conversation_tokens: int = 24
    neighbour_rounds: int = 4
    neighbour_requests: int = 6
    neighbour_common: int = 5


QUICK = Sizes(
    cold_starts=2,
    known_prefix=4,
    cold=3,
    cold_5=2,
    cold_other=1,
    long=1,
    rate=2,
    rate_tokens=16,
    throughput=1,
    throughput_tokens=12,
    prefill=2,
    conversations=1,
    conversation_tokens=12,
    neighbour_rounds=1,
    neighbour_requests=4,
    neighbour_common=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Both servers, ready, and how much to measure."""

    ours: Server
    common_way: Server
    sizes: Sizes
    say: Callable[[str], None]


def take_turns(
    bench: Bench, label: str, n: int, once: Callable[[Server, int], T]
) -> tuple[list[T], list[T]]:
    """`n` rounds of `once(server, round)` -> (ours, the common way's)."""
    ours: list[T] = []
    common_way: list[T] = []
    sides = [(bench.ours, ours), (bench.common_way, common_way)]
    for number in range(n):
        bench.say(f"{label}: round {number + 1} of {n}")
        for server, values in sides if number % 2 == 0 else reversed(sides):
            time.sleep(SETTLE_S)
            values.append(once(server, number))
    return ours, common_way


def faster(
    bar: Bar, ours_ms: Sequence[float], common_ms: Sequence[float], **details: object
) -> Measure:
    """How many times shorter our times are, by rounds."""
    return Measure(
        bar=bar,
        summary=summary(pair_ratios(common_ms, ours_ms)),
        unit="ms",
        ours=side(ours_ms),
        common_way=side(common_ms),
        details=details,
    )


# TTFT


KNOWN = Bar(
    key="ttft_known_prefix_1_client",
    label="TTFT known system prompt, short, 1 client: times faster",
    limit=9,
    sense="at_least",
)
LAYER = Bar(
    key="layer_overhead_ms", label="our layer: TTFT less the engine's prompt_ms, ms", limit=10
)


def known_prefix(bench: Bench) -> list[Measure]:
    """A short question behind a known system prompt; and what our own layer adds to the engine."""
    for server in (bench.ours, bench.common_way):
        ask(server, prompts.known_prefix(-1, 2))  # from here on it is known
    ours, common_way = take_turns(
        bench,
        "known system prompt",
        bench.sizes.known_prefix,
        lambda server, number: ask(server, prompts.known_prefix(number, 2)),
    )
    lines = [bench.ours.request_line(answer.request_id) for answer in ours]
    measures = [
        faster(KNOWN, _ttft_ms(ours), _ttft_ms(common_way), **_prompt_tokens(lines)),
    ]
    overheads_ms = [
        answer.ttft_ms - line["prompt_ms"]
        for answer, line in zip(ours, lines, strict=True)
        if line.get("prompt_ms")
    ]
    if overheads_ms:
        found = summary(overheads_ms)
        measures.append(Measure(bar=LAYER, summary=found, unit="ms", ours=side(overheads_ms)))
    else:
        measures.append(_not_measured(LAYER, "no prompt_ms in the log"))
    return measures


COLD = {
    1: Bar(
        key="ttft_cold_1",
        label="TTFT cold, short, 1 client: times faster",
        limit=2.5,
        sense="at_least",
    ),
    5: Bar(
        key="ttft_cold_5",
        label="TTFT cold, short, 5 clients: times faster",
        limit=3,
        sense="at_least",
    ),
    3: Bar(key="ttft_cold_3", label="TTFT cold, short, 3 clients: times faster"),
    8: Bar(key="ttft_cold_8", label="TTFT cold, short, 8 clients: times faster"),
}


def cold(bench: Bench, n_clients: int) -> list[Measure]:
    """Short prompts that nobody has seen, by so many clients at the same moment.

    A round's figure is the median of its clients; p50 and p95 are over all requests.
    """
    sizes = bench.sizes
    rounds = {1: sizes.cold, 5: sizes.cold_5}.get(n_clients, sizes.cold_other)
    chats = [
        [prompts.cold(_nonce(), number * n_clients + i, 4) for i in range(n_clients)]
        for number in range(rounds)
    ]
    ours, common_way = take_turns(
        bench,
        f"cold, {n_clients} client{'s' if n_clients > 1 else ''}",
        rounds,
        lambda server, number: ask_together(server, chats[number]),
    )
    lines = [bench.ours.request_line(answers[0].request_id) for answers in ours]
    return [
        Measure(
            bar=COLD[n_clients],
            summary=summary(pair_ratios(_medians_ms(common_way), _medians_ms(ours))),
            unit="ms",
            ours=side([ms for answers in ours for ms in _ttft_ms(answers)]),
            common_way=side([ms for answers in common_way for ms in _ttft_ms(answers)]),
            details=_prompt_tokens(lines),
        )
    ]


LONG_COLD = Bar(key="ttft_long_cold", label="TTFT cold, long prompt, 1 client: times faster")
LONG_KNOWN = Bar(
    key="ttft_long_known_prefix", label="TTFT known long prefix, 1 client: times faster"
)


def long_prompts(bench: Bench) -> list[Measure]:
    """Some 445 tokens: never seen, and then again with another question at the end."""
    nonces = [_nonce() for _ in range(bench.sizes.long)]
    ours, common_way = take_turns(
        bench,
        "long prompt, cold",
        bench.sizes.long,
        lambda server, number: ask(server, prompts.long_cold(nonces[number], LONG_TOKENS, 2)),
    )
    lines = [bench.ours.request_line(answer.request_id) for answer in ours]
    known, known_common = take_turns(
        bench,
        "long prompt, known",
        bench.sizes.long,
        lambda server, number: ask(server, prompts.long_known(nonces[-1], LONG_TOKENS, number, 2)),
    )
    known_lines = [bench.ours.request_line(answer.request_id) for answer in known]
    return [
        faster(LONG_COLD, _ttft_ms(ours), _ttft_ms(common_way), **_prompt_tokens(lines)),
        faster(LONG_KNOWN, _ttft_ms(known), _ttft_ms(known_common), **_prompt_tokens(known_lines)),
    ]


# Tokens a second


RATE = Bar(
    key="tokens_per_s_request_1",
    label="tokens/s of a request, 1 client: times more",
    limit=9,
    sense="at_least",
)
CPU = Bar(key="cpu_ms_per_token", label="CPU time a token, prompt included: times less")


def rate(bench: Bench) -> list[Measure]:
    """One client's tokens a second from its first token on, and the CPU time each token took."""

    def once(server: Server, number: int) -> tuple[Answer, float]:
        before_s = process_tree.cpu_s(server.pid)
        answer = ask(server, prompts.essay(_nonce(), bench.sizes.rate_tokens))
        return answer, process_tree.cpu_s(server.pid) - before_s

    ours, common_way = take_turns(bench, "tokens/s, 1 client", bench.sizes.rate, once)
    our_rates, common_rates = ([a.tokens_per_s for a, _ in done] for done in (ours, common_way))
    our_cpu, common_cpu = (
        [used_s * 1000 / answer.stream.output_tokens for answer, used_s in done]
        for done in (ours, common_way)
    )
    return [
        _more(RATE, our_rates, common_rates),
        faster(CPU, our_cpu, common_cpu),
    ]


THROUGHPUT = Bar(
    key="throughput_5_clients",
    label="tokens/s of 5 clients in all: times more",
    limit=4,
    sense="at_least",
)


def throughput(bench: Bench) -> list[Measure]:
    tokens = bench.sizes.throughput_tokens
    ours, common_way = take_turns(
        bench,
        "tokens/s, 5 clients",
        bench.sizes.throughput,
        lambda server, number: throughput_tokens_per_s(
            ask_together(server, [prompts.essay(_nonce(), tokens) for _ in range(5)])
        ),
    )
    return [_more(THROUGHPUT, ours, common_way)]


# What others do to a short request


PREFILL = Bar(
    key="short_during_900_token_prefill_ttft_ms",
    label="TTFT of a short request during a 900-token prefill, p95, ms",
    limit=1500,
)


def during_prefill(bench: Bench) -> list[Measure]:
    """A cold short request 100 ms after one of 900 tokens was sent. Judged: ours alone."""

    def once(server: Server, number: int) -> tuple[Answer, Answer]:
        long = prompts.long_cold(_nonce(), PREFILL_TOKENS, 2)
        short = prompts.cold(_nonce(), number, 2)
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(ask(server, long)), daemon=True)
        thread.start()
        time.sleep(0.1)
        answer = ask(server, short)
        thread.join()
        return answers[0], answer

    ours, common_way = take_turns(bench, "short during a prefill", bench.sizes.prefill, once)
    # Only where the long one had not had its first token yet was there anything to wait for.
    our_ms = [s.ttft_ms for lng, s in ours if lng.sent_s + lng.ttft_ms / 1000 > s.sent_s]
    if not our_ms:
        return [_not_measured(PREFILL, "the long prompt was through before the short one came")]
    lines = [bench.ours.request_line(long.request_id) for long, _ in ours]
    figures = side(our_ms)
    return [
        Measure(
            bar=PREFILL,
            summary=Summary(value=figures.p95, n=len(our_ms), spread=(min(our_ms), max(our_ms))),
            unit="ms",
            ours=figures,
            common_way=side([short.ttft_ms for _, short in common_way]),
            details={
                **_prompt_tokens(lines),
                "long_ttft_ms": statistics.median(_ttft_ms([long for long, _ in ours])),
            },
        )
    ]


TURNS = Bar(
    key="conversation_turn10_over_turn2",
    label="conversation of 10 turns: TTFT of turn 10 over turn 2",
    limit=1.2,
)


def conversations(bench: Bench) -> list[Measure]:
    """Ours alone: each turn sends everything before it, the answers as they came."""
    by_turn: list[list[float]] = []
    for number in range(bench.sizes.conversations):
        bench.say(f"conversation {number + 1} of {bench.sizes.conversations}")
        messages = prompts.conversation_start(_nonce())
        times_ms = []
        for turn in range(1, len(prompts.TURNS) + 1):
            chat = prompts.next_turn(messages, turn, bench.sizes.conversation_tokens)
            answer = ask(bench.ours, chat)
            times_ms.append(answer.ttft_ms)
            messages = prompts.answered(chat, answer.stream.answer)
            time.sleep(SETTLE_S)
        by_turn.append(times_ms)
    return [
        Measure(
            bar=TURNS,
            summary=summary([times_ms[9] / times_ms[1] for times_ms in by_turn]),
            unit="ms",
            ours=side([times_ms[9] for times_ms in by_turn]),
            details={
                f"turn_{turn}_ms": statistics.median(times_ms[turn - 1] for times_ms in by_turn)
                for turn in (1, 2, 3, 5, 8, 10)
            },
        )
    ]


PLANNED = Bar(
    key="ttft_p95_busy_neighbours_planned",
    label="TTFT p95 with two busy neighbours over without, planned policy",
    limit=1.3,
)
DEFAULT = Bar(
    key="ttft_p95_busy_neighbours_default",
    label="TTFT p95 with two busy neighbours over without, default policy",
)
NEIGHBOUR_RATE = Bar(
    key="tokens_per_s_busy_neighbours_planned",
    label="tokens/s with two busy neighbours over without, planned policy",
)
NEIGHBOUR_COMMON = Bar(
    key="ttft_p95_busy_neighbours_common_way",
    label="TTFT p95 with two busy neighbours over without, common way",
)


def with_neighbours(bench: Bench, default: Server, server_weight: int) -> list[Measure]:
    """`default` is our server too, started without the plan's policy."""
    try:
        with cpu_groups(server_weight) as groups:
            return _with_neighbours(bench, default, groups)
    except GroupError as error:
        return [_not_measured(bar, str(error)) for bar in (PLANNED, DEFAULT)]


def _with_neighbours(bench: Bench, default: Server, groups: Groups) -> list[Measure]:
    planned = bench.ours
    groups.move(planned.pid, groups.server)
    sizes = bench.sizes
    found: dict[tuple[str, bool], list[list[Answer]]] = {}

    def block(server: Server, loaded: bool, n: int, tokens: int) -> None:
        answers = []
        for number in range(n):
            time.sleep(SETTLE_S)
            answers.append(ask(server, prompts.cold(_nonce(), number, tokens)))
        found.setdefault((server.name, loaded), []).append(answers)

    for number in range(sizes.neighbour_rounds):
        bench.say(f"busy neighbours: round {number + 1} of {sizes.neighbour_rounds}")
        for server in (planned, default):
            block(server, False, sizes.neighbour_requests, 12)
        with busy_neighbours(2, groups.neighbours):
            block(planned, True, sizes.neighbour_requests, 12)
        with busy_neighbours(2, groups.home):
            block(default, True, sizes.neighbour_requests, 12)
    bench.say("busy neighbours: the common way")
    block(bench.common_way, False, sizes.neighbour_common, 2)
    with busy_neighbours(2, groups.home):
        block(bench.common_way, True, sizes.neighbour_common, 2)

    def ratio(bar: Bar, server: Server) -> Measure:
        quiet = [_ttft_ms(answers) for answers in found[server.name, False]]
        loaded = [_ttft_ms(answers) for answers in found[server.name, True]]
        quiet_side = side([ms for times in quiet for ms in times])
        return Measure(
            bar=bar,
            summary=p95_ratio(loaded, quiet),
            unit="ms",
            ours=side([ms for times in loaded for ms in times]),
            details={
                "unloaded_median_ms": quiet_side.median,
                "unloaded_p95_ms": quiet_side.p95,
            },
        )

    rates = {
        loaded: [answer.tokens_per_s for block in found[planned.name, loaded] for answer in block]
        for loaded in (False, True)
    }
    return [
        ratio(PLANNED, planned),
        ratio(DEFAULT, default),
        replace(
            _more(NEIGHBOUR_RATE, rates[True], rates[False]),
            common_way=None,
            details={"unloaded_median_tokens_per_s": statistics.median(rates[False])},
        ),
        _as_common_way(ratio(NEIGHBOUR_COMMON, bench.common_way)),
    ]


# Memory and start


MEMORY = Bar(key="memory_ratio", label="resident memory (RSS) over the common way", limit=0.4)
PSS = Bar(key="memory_pss_ratio", label="proportional memory (PSS) over the common way")


def memory(bench: Bench) -> list[Measure]:
    """After all that load: what each has taken by then."""
    ours = process_tree.memory(bench.ours.pid)
    common_way = process_tree.memory(bench.common_way.pid)

    def ratio(bar: Bar, our_bytes: int, common_bytes: int) -> Measure:
        value = our_bytes / common_bytes
        return Measure(
            bar=bar,
            summary=Summary(value=value, n=1, spread=(value, value)),
            unit="MB",
            ours=side([our_bytes / 1e6]),
            common_way=side([common_bytes / 1e6]),
        )

    return [
        ratio(MEMORY, ours.rss_bytes, common_way.rss_bytes),
        ratio(PSS, ours.pss_bytes, common_way.pss_bytes),
    ]


START = Bar(
    key="cold_start_ratio",
    label="start to ready over the engine's bare load",
    limit=1.3,
)


def cold_start(
    environ: Mapping[str, str],
    prefix: Sequence[str],
    directory: Path,
    n: int,
    say: Callable[[str], None],
) -> list[Measure]:
    """Process start to /health 200, over a script that only loads the model, taking turns."""
    ours_ms: list[float] = []
    bare_ms: list[float] = []
    for number in range(n):
        say(f"cold start: round {number + 1} of {n}")
        order: list[Callable[[], None]] = [
            lambda: ours_ms.append(_start_ms(environ, prefix, directory)),
            lambda: bare_ms.append(_bare_load_ms(environ, prefix, directory)),
        ]
        for once in order if number % 2 == 0 else reversed(order):
            once()
    return [
        Measure(
            bar=START,
            summary=summary(pair_ratios(ours_ms, bare_ms)),
            unit="ms",
            ours=side(ours_ms),
            details={
                "bare_load_median_ms": statistics.median(bare_ms),
                "bare_load_p95_ms": side(bare_ms).p95,
            },
        )
    ]


def _start_ms(environ: Mapping[str, str], prefix: Sequence[str], directory: Path) -> float:
    port = free_port()
    began = time.monotonic()
    with running(our_command(prefix), our_environ(environ, port), directory / "start.log") as (
        process,
        log_path,
    ):
        while time.monotonic() - began < READY_DEADLINE_S and process.poll() is None:
            if _is_ready(port):
                return (time.monotonic() - began) * 1000
            time.sleep(READY_POLL_S)
        raise ServerError("cold start: not ready\n" + log_path.read_text(errors="replace")[-500:])


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_DEADLINE_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _bare_load_ms(environ: Mapping[str, str], prefix: Sequence[str], directory: Path) -> float:
    command = our_command(prefix)
    command[-1] = "bench.bare_load"
    began = time.monotonic()
    with (directory / "bare_load.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=our_environ(environ, 1),
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            took_ms = (time.monotonic() - began) * 1000
            if line != b"loaded\n":
                raise ServerError(f"bare load: exit {process.wait()}")
            return took_ms
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


# Shared by the rows


def _nonce() -> str:
    """'f3a09c5d77e1': some six tokens that no prompt before had."""
    return secrets.token_hex(6)


def _ttft_ms(answers: Sequence[Answer]) -> list[float]:
    return [answer.ttft_ms for answer in answers]


def _medians_ms(rounds: Sequence[Sequence[Answer]]) -> list[float]:
    return [statistics.median(_ttft_ms(answers)) for answers in rounds]


def _prompt_tokens(lines: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """What the prompts were, as our server counted: cached tokens needed no computing."""
    told = {}
    for name in ("prompt_tokens", "cached_tokens", "prompt_ms"):
        values = [value for line in lines if isinstance(value := line.get(name), (int, float))]
        if values:
            told[f"median_{name}"] = statistics.median(values)
    return told


def _more(bar: Bar, ours: Sequence[float], common_way: Sequence[float]) -> Measure:
    return Measure(
        bar=bar,
        summary=summary(pair_ratios(ours, common_way)),
        unit="tok/s",
        ours=side(ours),
        common_way=side(common_way),
    )


def _as_common_way(measure: Measure) -> Measure:
    return replace(measure, ours=None, common_way=measure.ours)


def _not_measured(bar: Bar, why: str) -> Measure:
    return Measure(bar=bar, summary=None, why_not=why)
