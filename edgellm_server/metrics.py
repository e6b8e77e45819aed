"""What a worker measures of itself, and its exposition in Prometheus' text format.

Kept in plain Python and given to prometheus-client only when scraped: its import takes as long as
a tenth of a model's load. With several workers each leaves its state in the runtime directory, and
whichever is scraped answers for all, each under its own `worker` label.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Another worker's state that is older than this is a dead worker's.
STALE_S: Final = 15.0
LATENCY_BUCKETS_S: Final = (
    0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TPOT_BUCKETS_S: Final = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)

HISTOGRAMS: Final = {
    "ttft_seconds": ("Request received to first token.", LATENCY_BUCKETS_S),
    "tpot_seconds": ("Mean time of an answer's tokens after its first.", TPOT_BUCKETS_S),
    "queue_seconds": ("Request received to slot acquired.", LATENCY_BUCKETS_S),
    "request_duration_seconds": ("Request received to answer complete.", LATENCY_BUCKETS_S),
}
COUNTERS: Final = {
    "prompt_tokens": "Tokens of prompts, cached ones included.",
    "prompt_tokens_cached": "Tokens of prompts that were in a KV cache already.",
    "prompt_cache_hits": "Answers whose prompt began with something cached.",
    "prompt_cache_misses": "Answers whose prompt had to be computed whole.",
    "generation_tokens": "Tokens generated.",
    "cancelled": "Requests whose client went away before the answer was complete.",
    "engine_errors": "Answers that the engine failed on.",
}


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound, not cumulative; the last is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Counts of one worker. Changed on its event loop only."""

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker
        self.ready = False
        self.load_seconds = 0.0
        self.n_slots = self.n_busy = self.n_waiting = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.requests: dict[str, int] = {}  # "<endpoint> <status>" -> count
        self.rejected: dict[str, int] = {}  # reason -> count

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def observe(self, name: str, value_s: float | None) -> None:
        if value_s is not None:
            self.histograms[name].observe(value_s)

    def request(self, endpoint: str, status: int) -> None:
        key = f"{endpoint} {status}"
        self.requests[key] = self.requests.get(key, 0) + 1

    def reject(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON holds it, with what /proc says of this process now."""
        return {
            "worker": self.worker,
            "written": time.time(),
            "ready": self.ready,
            "load_seconds": self.load_seconds,
            "n_slots": self.n_slots,
            "n_busy": self.n_busy,
            "n_waiting": self.n_waiting,
            "counters": self.counters,
            "histograms": {n: [h.counts, h.total] for n, h in self.histograms.items()},
            "requests": self.requests,
            "rejected": self.rejected,
            "rss_bytes": rss_bytes(),
            "cpu_seconds": cpu_seconds(),
            "run_queue_seconds": run_queue_seconds(),
            "open_fds": len(os.listdir("/proc/self/fd")),
        }


def write_snapshot(folder: Path, metrics: Metrics) -> None:
    """Leaves a worker's state for the others."""
    path = folder / f"metrics-{metrics.worker}.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(metrics.snapshot()))
    temporary.replace(path)


def read_snapshots(folder: Path, except_worker: int) -> list[dict[str, Any]]:
    """The other workers' states, those of dead ones left out."""
    found = []
    for path in sorted(folder.glob("metrics-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads(path.read_text())
            if state["worker"] != except_worker and time.time() - state["written"] < STALE_S:
                found.append(state)
    return found


def exposition(states: Sequence[dict[str, Any]], model: str) -> tuple[bytes, str]:
    """Workers' states -> (text, content type)."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    class Collected:
        def collect(self) -> Iterator[Metric]:
            return _families(states, model)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _families(states: Sequence[dict[str, Any]], model: str) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
    )

    info = InfoMetricFamily("edgellm_model", "The model served.")
    info.add_metric([], {"name": model})
    yield info

    for name, (about, bounds) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"edgellm_{name}", about, labels=["worker"])
        for state in states:
            counts, total = state["histograms"][name]
            running, buckets = 0, []
            for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            histogram.add_metric([str(state["worker"])], buckets, total)
        yield histogram

    def gauge(name: str, about: str, key: str) -> Metric:
        family = GaugeMetricFamily(f"edgellm_{name}", about, labels=["worker"])
        for state in states:
            family.add_metric([str(state["worker"])], float(state[key]))
        return family

    def counter(name: str, about: str, values: Sequence[float]) -> Metric:
        family = CounterMetricFamily(f"edgellm_{name}", about, labels=["worker"])
        for state, value in zip(states, values, strict=True):
            family.add_metric([str(state["worker"])], float(value))
        return family

    for name, about in COUNTERS.items():
        yield counter(name, about, [state["counters"][name] for state in states])

    requests = CounterMetricFamily(
        "edgellm_requests",
        "Requests by endpoint and status.",
        labels=["worker", "endpoint", "code"],
    )
    rejected = CounterMetricFamily(
        "edgellm_rejected", "Requests refused before an answer began.", labels=["worker", "reason"]
    )
    for state in states:
        for key, count in state["requests"].items():
            endpoint, _, code = key.rpartition(" ")
            requests.add_metric([str(state["worker"]), endpoint, code], count)
        for reason, count in state["rejected"].items():
            rejected.add_metric([str(state["worker"]), reason], count)
    yield requests
    yield rejected

    yield gauge("ready", "1 once the worker has generated a real token.", "ready")
    yield gauge("model_load_seconds", "Process start to ready.", "load_seconds")
    yield gauge("slots", "Answers that can be generated at a time.", "n_slots")
    yield gauge("slots_busy", "Answers being generated.", "n_busy")
    yield gauge("queue_depth", "Requests that wait for a slot.", "n_waiting")
    yield gauge("resident_memory_bytes", "Memory resident, of this worker.", "rss_bytes")
    yield gauge("open_fds", "Open file descriptors.", "open_fds")
    yield counter("cpu_seconds", "CPU time used.", [state["cpu_seconds"] for state in states])
    yield counter(
        "run_queue_seconds",
        "Time that threads were ready to run and had to wait for a CPU (schedstat).",
        [state["run_queue_seconds"] for state in states],
    )
    yield from _of_the_host()


def _of_the_host() -> Iterator[Metric]:
    """What concerns all workers alike. What this kernel does not tell is left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    throttled = cgroup_throttled()
    if throttled is not None:
        periods, seconds = throttled
        yield CounterMetricFamily(
            "edgellm_cgroup_nr_throttled", "Periods in which a CPU quota ran out.", value=periods
        )
        yield CounterMetricFamily(
            "edgellm_cgroup_throttled_seconds", "Time lost to a CPU quota.", value=seconds
        )
    stall = GaugeMetricFamily(
        "edgellm_pressure_some_avg10_ratio",
        "PSI of the host: share of the last 10 s in which some task waited.",
        labels=["resource"],
    )
    total = CounterMetricFamily(
        "edgellm_pressure_some_seconds", "PSI of the host, as a sum.", labels=["resource"]
    )
    for name in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            line = Path(f"/proc/pressure/{name}").read_text().splitlines()[0]
            values = dict(part.split("=") for part in line.split()[1:])
            stall.add_metric([name], float(values["avg10"]) / 100)
            total.add_metric([name], float(values["total"]) / 1e6)
    if stall.samples:
        yield stall
        yield total


def rss_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_queue_seconds() -> float:
    """Second number of /proc/<pid>/task/*/schedstat (nanoseconds), over all threads; 0 without."""
    waited_ns = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited_ns += int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1])
    return waited_ns / 1e9


def cgroup_throttled(
    proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[int, float] | None:
    """(nr_throttled, seconds) of this process's cgroup, version 2 or 1; None where not told."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            stat = mount / path.lstrip("/") / "cpu.stat"
        elif "cpu" in controllers.split(","):
            stat = mount / "cpu" / path.lstrip("/") / "cpu.stat"
        else:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            values = dict(row.split() for row in stat.read_text().splitlines())
            if "throttled_usec" in values:
                return int(values["nr_throttled"]), int(values["throttled_usec"]) / 1e6
            return int(values["nr_throttled"]), int(values["throttled_time"]) / 1e9
    return None
