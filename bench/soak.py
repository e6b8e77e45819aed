"""python -m bench.soak: our server for half an hour under eight clients, many of which misbehave.

Memory is compared between two moments of rest: after the warm-up, and at the end. Before, long
prompts fill llama.cpp's prompt cache, which grows up to its limit (cache_ram_mib) and stays there:
what grows after that is a leak.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import process_tree, prompts
from bench.clients import Crowd, faults
from bench.common_venv import common_venv
from bench.load import LoadError, ask_together
from bench.neighbours import DEFAULT_WEIGHT, GroupError, cpu_groups
from bench.plan import command_prefix, plan_as_json, plan_for_this_machine, server_environ
from bench.results import Bar, Measure, report_here, table
from bench.server import CACHE, LOAD_DEADLINE_S, RESULTS, kept
from bench.servers import Server, ServerError, our_server
from bench.stats import Summary
from bench.weights import weights

SAMPLE_S = 15.0
REST_S = 3.0
# What is cancelled in prefill is let go of after its batch, what is queued after that.
FREE_DEADLINE_S = 60.0
WARM_UP_FRACTION = 0.2
WARM_UP_S = (30.0, 360.0)
FILL_MAX_ROUNDS = 12
FILL_FULL_BELOW = 0.005  # a round that adds less than this has pushed out as much as it put in

GROWTH = Bar(key="pss_growth_percent", label="PSS growth since the warm-up, %", limit=2)
BAD = Bar(key="faults", label="5xx but 503, and answers that broke", limit=0)
STUCK = Bar(key="stuck_slots", label="slots still busy at the end", limit=0)
BURST = Bar(key="burst_unanswered", label="of a burst of one request a slot: unanswered", limit=0)
FDS = Bar(key="open_fds_growth", label="open file descriptors more than after warm-up", limit=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The server with nothing to do."""

    pss_bytes: int
    rss_bytes: int
    open_fds: int
    slots_busy: int


def at_rest(server: Server) -> Rest:
    """Waits until no slot is busy, but not for ever: then `slots_busy` says how many are."""
    until = time.monotonic() + FREE_DEADLINE_S
    while (busy := slots_busy(server)) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(REST_S)
    memory = process_tree.memory(server.pid)
    return Rest(
        pss_bytes=memory.pss_bytes,
        rss_bytes=memory.rss_bytes,
        open_fds=process_tree.open_fds(server.pid),
        slots_busy=busy,
    )


def fill(server: Server, n_slots: int, n_ctx: int, say: Callable[[str], None]) -> None:
    """Prompts nearly as long as the context, into every slot, until memory stays as it is."""
    before_bytes = 0
    for number in range(FILL_MAX_ROUNDS):
        chats = [
            prompts.long_cold(f"fill {number} {slot}", round(n_ctx * 0.85), 2)
            for slot in range(n_slots)
        ]
        ask_together(server, chats)
        pss_bytes = process_tree.memory(server.pid).pss_bytes
        say(f"filling the caches: PSS {pss_bytes / 1e6:.0f} MB")
        # The first round fills the slots; only from the second on is anything pushed out.
        if number >= 2 and pss_bytes < before_bytes * (1 + FILL_FULL_BELOW):
            return
        before_bytes = pss_bytes


def slots_busy(server: Server) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return parse_slots_busy(connection.getresponse().read().decode())


def parse_slots_busy(exposition: str) -> int:
    """'edgellm_slots_busy{worker="0"} 1.0' -> 1, over all workers. Raises ValueError without."""
    found = re.findall(r"^edgellm_slots_busy(?:\{[^}]*\})? ([0-9.]+)$", exposition, re.MULTILINE)
    if not found:
        raise ValueError("no edgellm_slots_busy among the metrics")
    return round(sum(map(float, found)))


def where_they_left(lines: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Our server's request lines -> how many clients it saw leave in queue, prefill and decode."""
    left: Counter[str] = Counter()
    for line in lines.values():
        if line["status"] == 499 or (line["status"] == 200 and line["finish_reason"] is None):
            if line["queue_ms"] is None:
                left["queue"] += 1
            else:
                left["prefill" if line["ttft_ms"] is None else "decode"] += 1
    return dict(left)


def soak(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """-> the report. Ends what it started."""
    total_s = options.minutes * 60
    warm_up_s = min(max(total_s * WARM_UP_FRACTION, WARM_UP_S[0]), WARM_UP_S[1])
    # Only the Q4_0 file is made by the venv's Python.
    venv_python = common_venv(CACHE, say) if options.weights == "q4_0" else Path(sys.executable)
    model = weights(options.weights, CACHE, venv_python, say)
    settings, plan = plan_for_this_machine(model)
    environ, prefix = server_environ(plan, settings, model), command_prefix(plan)
    say(f"{model.name}, {model.quantisation}; planned: {plan_as_json(plan)}")
    samples: list[dict[str, float]] = []
    with contextlib.ExitStack() as started:
        directory = Path(started.enter_context(TemporaryDirectory(prefix="edgellm-soak-")))
        prompt = directory / "system_prompt.txt"
        prompt.write_text(prompts.SYSTEM_PROMPT)
        environ["EDGELLM_SYSTEM_PROMPT_FILE"] = str(prompt)
        server = started.enter_context(our_server("ours", model, environ, prefix, directory))
        server.wait_until_ready(LOAD_DEADLINE_S)
        # As on a host. Where this user may not make cgroups, it runs without.
        with contextlib.suppress(GroupError):
            groups = started.enter_context(cpu_groups(plan.cpu_weight or DEFAULT_WEIGHT))
            groups.move(server.pid, groups.server)
        fill(server, plan.engine.n_parallel, plan.engine.n_ctx, say)
        crowd = Crowd(server, options.clients, options.seed)
        began = time.monotonic()

        def run_until(end_s: float) -> None:
            crowd.release()
            while (left_s := began + end_s - time.monotonic()) > 0:
                time.sleep(min(SAMPLE_S, left_s))
                if (code := server.process.poll()) is not None:
                    raise ServerError(f"the server ended by itself, exit {code}")
                pss_mb = process_tree.memory(server.pid).pss_bytes / 1e6
                at_s = time.monotonic() - began
                samples.append({"at_s": round(at_s), "pss_mb": round(pss_mb, 1)})
                done = sum(crowd.counts.statuses.values())
                say(f"{at_s / 60:.1f} min: {done} requests, PSS {pss_mb:.0f} MB, {_seen(crowd)}")
            crowd.hold()

        run_until(warm_up_s)
        after_warm_up = at_rest(server)
        say(f"after warm-up, at rest: {after_warm_up}")
        run_until(total_s)
        at_end = at_rest(server)
        say(f"at the end, at rest: {at_end}")
        crowd.stop()
        burst_ms = burst(server, plan.engine.n_parallel)
        measures = judged(
            crowd, after_warm_up, at_end, burst_ms, plan.engine.n_parallel, last_quarter(samples)
        )
        left = where_they_left(server.request_lines())
    print("\n" + table(measures), flush=True)
    return report_here(
        measures,
        about={
            "weights": model.as_json(),
            "plan": plan_as_json(plan),
            "minutes": options.minutes,
            "clients": options.clients,
            "seed": options.seed,
            "requests": sum(crowd.counts.statuses.values()),
            "statuses": dict(sorted(crowd.counts.statuses.items())),
            "manners": dict(sorted(crowd.counts.manners.items())),
            "left_in": left,
            "faults": list(faults(crowd.counts))[:50],
            "samples": samples,
        },
    )


def burst(server: Server, n_slots: int) -> list[float] | None:
    """One request a slot, all at once -> their TTFT in ms; None where one failed."""
    try:
        answers = ask_together(server, [prompts.cold("burst", i, 4) for i in range(n_slots)])
    except LoadError:
        return None
    return [answer.ttft_ms for answer in answers]


def judged(
    crowd: Crowd,
    before: Rest,
    after: Rest,
    burst_ms: Sequence[float] | None,
    n_slots: int,
    last_quarter_percent: float,
) -> list[Measure]:
    def measure(bar: Bar, value: float, n: int, **details: object) -> Measure:
        found = Summary(value=value, n=n, spread=(value, value))
        return Measure(bar=bar, summary=found, details=details)

    n = sum(crowd.counts.statuses.values())
    growth_percent = (after.pss_bytes / before.pss_bytes - 1) * 100
    return [
        measure(
            GROWTH,
            growth_percent,
            n,
            pss_after_warm_up_mb=before.pss_bytes / 1e6,
            pss_at_end_mb=after.pss_bytes / 1e6,
            last_quarter_percent=last_quarter_percent,
        ),
        measure(BAD, len(faults(crowd.counts)), n),
        measure(STUCK, after.slots_busy, n_slots),
        measure(
            BURST,
            0 if burst_ms else 1,
            n_slots,
            **({"median_ttft_ms": statistics.median(burst_ms)} if burst_ms else {}),
        ),
        measure(FDS, max(0, after.open_fds - before.open_fds), n, open_fds=after.open_fds),
    ]


def last_quarter(samples: Sequence[Mapping[str, float]]) -> float:
    """Growth in % of the last quarter's median over the one before: a leak goes on, caches fill."""
    quarter = max(1, len(samples) // 4)
    values = [sample["pss_mb"] for sample in samples]
    third, fourth = values[-2 * quarter : -quarter] or values, values[-quarter:]
    return (statistics.median(fourth) / statistics.median(third) - 1) * 100


def _seen(crowd: Crowd) -> str:
    return ", ".join(f"{status} {n}" for status, n in sorted(crowd.counts.statuses.items()))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", choices=("q4_0", "published", "small"), default="q4_0")
    parser.add_argument("--out", type=Path, help="default: bench/results/soak.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    whole = options.minutes >= 30
    path = options.out or (RESULTS / "soak.json" if whole else CACHE / "bench" / "soak.json")
    told = kept("bench.soak", lambda say: soak(options, say), path)
    return 0 if all(m["met"] for m in told["measures"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
