"""What the smoke test measured, whether that is healthy, and who is slower than its like."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgellm.errors import ParseError
from edgellm.settings import Settings

SCHEMAS = (1, 2)  # of the probe's line; 1 is that of releases before samples were kept apart

# Slower by less than this is nothing that a person at the machine notices.
NOTICEABLE_MS = 50.0
DEFAULT_REGRESSION_PERCENT = 50.0
# Pressure of others before the first request from which a slow answer says little of the release.
BUSY_PSI_PERCENT = 40.0
# Of fewer peers a median says little.
MIN_PEERS = 4
OUTLIER_RATIO = 1.5
# Median absolute deviations, scaled to standard deviations of a normal distribution: 1.4826.
OUTLIER_DEVIATIONS = 4.0
MAD_TO_SIGMA = 1.4826

# What explains a slow host, and from where on
PSI_WORTH_TELLING_PERCENT = 10.0
HOT_C = 75.0  # a Raspberry Pi slows down from 80 on, many x86 boards from 85
CLOCK_HELD_DOWN = 0.85
# https://www.raspberrypi.com/documentation/computers/os.html#get_throttled: the low bits are now
THROTTLE_FLAGS = (
    (0x4, "throttled"),
    (0x1, "under-voltage"),
    (0x2, "clock capped"),
    (0x8, "at its soft temperature limit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeFailure:
    """One request, or the wait for readiness, that went wrong. `kind` is the probe's word."""

    kind: str  # "not_ready", "http_status", "stalled", "empty_answer", ...
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Requests of one kind. `output_throughput`: tokens/s of one stream."""

    n: int
    median_ttft_ms: float | None
    p95_ttft_ms: float | None
    max_ttft_ms: float | None
    median_tpot_ms: float | None
    output_throughput: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTogether(Sample):
    """`k` streams at once. `output_throughput`: tokens/s of all of them in all."""

    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The host's load and heat at one moment; None for what it does not tell."""

    psi_cpu_some_avg10: float | None = None
    psi_memory_some_avg10: float | None = None
    psi_io_some_avg10: float | None = None
    loadavg_1: float | None = None
    temperature_c: float | None = None
    cpu_freq_khz: float | None = None
    cpu_freq_max_khz: float | None = None
    throttled: str | None = None  # "0x50005", a Raspberry Pi's flags
    cooling_state: float | None = None  # steps by which the kernel holds the clock down
    throttle_count: float | None = None  # of an x86 host, since it started

    def causes(self) -> tuple[str, ...]:
        """What of this makes a host slow: ("throttled", "82 °C")."""
        found = list(self._held_down())
        if self.temperature_c is not None and (self.temperature_c >= HOT_C or found):
            found.append(f"{self.temperature_c:.0f} °C")
        for name, value in (
            ("CPU", self.psi_cpu_some_avg10),
            ("memory", self.psi_memory_some_avg10),
            ("I/O", self.psi_io_some_avg10),
        ):
            if value is not None and value >= PSI_WORTH_TELLING_PERCENT:
                found.append(f"{name} pressure {value:.0f} %")
        return tuple(found)

    @property
    def is_throttled(self) -> bool:
        return bool(self._held_down())

    def _held_down(self) -> tuple[str, ...]:
        flags = _flags(self.throttled)
        found = [word for bit, word in THROTTLE_FLAGS if flags & bit]
        if self.cooling_state and "throttled" not in found:
            found.insert(0, "throttled")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeResult:
    """The probe's JSON line, typed. Times in ms; None where no request gave that figure.

    The figures without a sample's name are those of `varied`: what is judged.
    """

    ready: bool
    ready_after_ms: float | None
    n: int
    cold_ttft_ms: float | None
    median_ttft_ms: float | None
    p95_ttft_ms: float | None
    median_tpot_ms: float | None
    output_throughput: float | None  # tokens/s of one stream
    answer_sample: str
    failures: tuple[SmokeFailure, ...]
    temperature_c: float | None
    psi_cpu_some_avg10: float | None
    max_ttft_ms: float | None = None
    new_prefix_ttft_ms: float | None = None
    varied: Sample | None = None
    known_prefix: Sample | None = None
    concurrency: tuple[SampleTogether, ...] = ()
    host_before: HostState | None = None
    host: HostState | None = None
    held_up_ms: float | None = None  # the longest that the probe waited for a core in a request
    overhead_ms: float | None = None  # the probe's own time, beside waiting and asking
    wall_ms: float | None = None  # of the whole probe

    @classmethod
    def parse(cls, line: str) -> SmokeResult:
        """One line of edgellm_server/probe.py -> SmokeResult. Raises ParseError."""
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raise _unreadable(line) from None
        if not isinstance(raw, dict) or raw.get("schema") not in SCHEMAS:
            raise _unreadable(line)
        failures = raw.get("failures")
        try:
            host = _host_state(raw.get("host"))
            return cls(
                ready=raw["ready"] is True,
                ready_after_ms=_ms(raw.get("ready_after_ms")),
                n=int(raw["n"]),
                cold_ttft_ms=_ms(raw.get("cold_ttft_ms")),
                median_ttft_ms=_ms(raw.get("median_ttft_ms")),
                p95_ttft_ms=_ms(raw.get("p95_ttft_ms")),
                median_tpot_ms=_ms(raw.get("median_tpot_ms")),
                output_throughput=_ms(raw.get("output_throughput")),
                answer_sample=str(raw.get("answer_sample") or "")[:80],
                failures=tuple(
                    SmokeFailure(kind=str(item["kind"]), detail=str(item.get("detail", "")))
                    for item in (failures if isinstance(failures, list) else ())
                ),
                temperature_c=None if host is None else host.temperature_c,
                psi_cpu_some_avg10=None if host is None else host.psi_cpu_some_avg10,
                max_ttft_ms=_ms(raw.get("max_ttft_ms")),
                new_prefix_ttft_ms=_ms(raw.get("new_prefix_ttft_ms")),
                varied=_sample(raw.get("varied")),
                known_prefix=_sample(raw.get("known_prefix")),
                concurrency=_samples_together(raw.get("concurrency")),
                host_before=_host_state(raw.get("host_before")),
                host=host,
                held_up_ms=_ms(raw.get("held_up_ms")),
                overhead_ms=_ms(raw.get("overhead_ms")),
                wall_ms=_ms(raw.get("wall_ms")),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise _unreadable(line) from None

    def to_json(self) -> dict[str, Any]:
        """A host's `smoke` in fleet.json."""
        host = self.host or HostState()
        return {
            "n": self.n,
            "cold_ttft_ms": self.cold_ttft_ms,
            "median_ttft_ms": self.median_ttft_ms,
            "p95_ttft_ms": self.p95_ttft_ms,
            "max_ttft_ms": self.max_ttft_ms,
            "median_tpot_ms": self.median_tpot_ms,
            "output_throughput": self.output_throughput,
            "new_prefix_ttft_ms": self.new_prefix_ttft_ms,
            "known_prefix": None if self.known_prefix is None else asdict(self.known_prefix),
            "varied": None if self.varied is None else asdict(self.varied),
            "concurrency": [asdict(sample) for sample in self.concurrency],
            "temperature_c": self.temperature_c,
            "throttled": host.throttled,
            "cpu_freq_khz": host.cpu_freq_khz,
            "psi_cpu_some_avg10": self.psi_cpu_some_avg10,
            "host_before": None if self.host_before is None else asdict(self.host_before),
            "host": None if self.host is None else asdict(self.host),
            "overhead_ms": self.overhead_ms,
            "wall_ms": self.wall_ms,
            "answer_sample": self.answer_sample,
            "failures": [asdict(failure) for failure in self.failures],
        }

    def causes(self) -> tuple[str, ...]:
        """What of the host's state makes it slow: pressure as it was before the first request,
        since the requests make their own; heat and clock as they were after the last."""
        after = self.host or HostState()
        before = self.host_before or after
        causes = [cause for cause in after.causes() if "pressure" not in cause]
        from_others = [cause for cause in before.causes() if "pressure" in cause]
        clock, most = after.cpu_freq_khz, after.cpu_freq_max_khz
        if causes and clock is not None and most is not None and clock < CLOCK_HELD_DOWN * most:
            causes.append(f"clock at {clock / 1000:.0f} of {most / 1000:.0f} MHz")
        if after.throttle_count is not None and before.throttle_count is not None:
            times = after.throttle_count - before.throttle_count
            if times > 0:
                causes.insert(0, f"slowed down by heat {times:.0f} times meanwhile")
        return (*causes, *from_others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGood:
    """The same host's last healthy run with the same model."""

    median_ttft_ms: float
    n: int
    at: str  # ISO 8601
    kernel: str | None = None
    release: str | None = None


PROVING_N = 3  # requests on both sides, below which a slower median fails no host


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftBudget:
    """What a healthy host keeps to: a bound for all, and its own last good run."""

    median_ttft_ms: float
    regression_percent: float | None = DEFAULT_REGRESSION_PERCENT  # None: not compared
    last_good: LastGood | None = None

    @classmethod
    def from_settings(cls, settings: Settings, last_good: LastGood | None = None) -> TtftBudget:
        return cls(
            median_ttft_ms=settings.ttft_budget_ms,
            regression_percent=settings.ttft_regression_percent,
            last_good=last_good,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """healthy, or every reason why not. A warning asks for a person and fails nothing."""

    healthy: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def judge(result: SmokeResult, budget: TtftBudget, *, kernel: str | None = None) -> HealthVerdict:
    """A host is healthy when it became ready, every request was answered, and in time.

    `kernel`: the one that runs now, named where a host is slower than it was under another.
    """
    reasons = list(_failures(result.failures))
    warnings: list[str] = []
    if not result.ready and not reasons:
        reasons.append("not_ready: the server never said that it is ready")
    if result.median_ttft_ms is None:
        if not reasons:
            reasons.append("no_token: no request gave a first token")
    elif result.median_ttft_ms > budget.median_ttft_ms:
        reasons.append(
            f"slow: median TTFT {result.median_ttft_ms:.0f} ms is over the budget of "
            f"{budget.median_ttft_ms:.0f} ms (n={result.n})"
        )
    if (regression := _regression(result, budget, kernel)) is not None:
        # A neighbour's load or a hot summer day is no fault of a release; one request is no proof.
        told = budget.last_good is not None and min(result.n, budget.last_good.n) >= PROVING_N
        (reasons if told and not _is_disturbed(result) else warnings).append(regression)
    if result.host is not None and result.host.is_throttled:
        warnings.append(f"held down while it was measured: {', '.join(result.causes())}")
    return HealthVerdict(healthy=not reasons, reasons=tuple(reasons), warnings=tuple(warnings))


def seen_from_elsewhere(result: SmokeResult) -> tuple[str, ...]:
    """What went wrong as seen from the control machine, as warnings: a slow link holds packets
    back and breaks off, and neither is a fault of the release."""
    return tuple(
        f"as seen from the control machine: {reason}" for reason in _failures(result.failures)
    )


def _failures(failures: Iterable[SmokeFailure]) -> Iterable[str]:
    """One reason a kind: the first request's words, and how many more there were."""
    by_kind: dict[str, list[str]] = {}
    for failure in failures:
        by_kind.setdefault(failure.kind, []).append(failure.detail)
    for kind, details in by_kind.items():
        others = len(details) - 1
        more = f" (and {others} more of this kind)" if len(set(details)) > 1 else ""
        yield f"{kind}: {details[0]}{more}"


def _regression(result: SmokeResult, budget: TtftBudget, kernel: str | None) -> str | None:
    now_ms, last = result.median_ttft_ms, budget.last_good
    if now_ms is None or last is None or budget.regression_percent is None:
        return None
    if last.median_ttft_ms <= 0 or now_ms - last.median_ttft_ms < NOTICEABLE_MS:
        return None
    over_percent = (now_ms / last.median_ttft_ms - 1) * 100
    if over_percent <= budget.regression_percent:
        return None
    since = f"{last.at}, n={last.n}"
    if last.release is not None:
        since += f", release {last.release}"
    text = (
        f"regressed: median TTFT {now_ms:.0f} ms (n={result.n}) is {over_percent:.0f} % over this "
        f"host's last good {last.median_ttft_ms:.0f} ms ({since}), "
        f"more than {budget.regression_percent:.0f} % are allowed"
    )
    if kernel is not None and last.kernel is not None and kernel != last.kernel:
        text += f"; the kernel was {last.kernel} and is {kernel}"
    if causes := result.causes():
        text += f"; {', '.join(causes)}"
    return text


def _is_disturbed(result: SmokeResult) -> bool:
    before, after = result.host_before or HostState(), result.host or HostState()
    busy = before.psi_cpu_some_avg10 is not None and before.psi_cpu_some_avg10 >= BUSY_PSI_PERCENT
    return busy or before.is_throttled or after.is_throttled


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One host's result, and what makes another host its peer: the same of all of these."""

    host: str
    hardware_class: str  # "Raspberry Pi 5"
    result: SmokeResult
    model: str | None = None


def compare_with_peers(peers: Iterable[Peer]) -> dict[str, str]:
    """Host -> the warning that it is slower than the others of its hardware and model.

    A host is an outlier when its median TTFT is 1.5 times that of its peers (itself not counted)
    and more than 4 scaled median absolute deviations and 50 ms above it: a class whose members
    differ anyway has no outliers. Fewer than 4 peers are not compared.
    """
    classes: dict[tuple[str, str | None], list[tuple[str, float, SmokeResult]]] = {}
    for peer in peers:
        ttft_ms = peer.result.median_ttft_ms
        if ttft_ms is not None and ttft_ms > 0:
            key = (peer.hardware_class, peer.model)
            classes.setdefault(key, []).append((peer.host, ttft_ms, peer.result))
    warnings = {}
    for (hardware_class, _), members in classes.items():
        for host, ttft_ms, result in members:
            others_ms = [other_ms for name, other_ms, _ in members if name != host]
            if len(others_ms) < MIN_PEERS:
                continue
            middle_ms = statistics.median(others_ms)
            mad_ms = statistics.median(abs(value - middle_ms) for value in others_ms)
            over_ms = ttft_ms - middle_ms
            if (
                ttft_ms >= OUTLIER_RATIO * middle_ms
                and over_ms >= NOTICEABLE_MS
                and over_ms > OUTLIER_DEVIATIONS * MAD_TO_SIGMA * mad_ms
            ):
                causes = ", ".join(result.causes()) or "nothing in its load, heat or clock says why"
                warnings[host] = (
                    f"{host} is {ttft_ms / middle_ms:.1f} times slower than its {len(others_ms)} "
                    f"peers ({hardware_class}): {causes}; median TTFT {ttft_ms:.0f} ms, theirs "
                    f"{middle_ms:.0f} ms (median absolute deviation {mad_ms:.0f} ms)"
                )
    return warnings


def _sample(raw: object) -> Sample | None:
    return Sample(**_figures(raw)) if isinstance(raw, dict) else None


def _samples_together(raw: object) -> tuple[SampleTogether, ...]:
    if not isinstance(raw, list):
        return ()
    return tuple(SampleTogether(k=int(item["k"]), **_figures(item)) for item in raw)


def _figures(raw: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("median_ttft_ms", "p95_ttft_ms", "max_ttft_ms"),
        *("median_tpot_ms", "output_throughput"),
    )
    return {"n": int(raw["n"]), **{name: _ms(raw.get(name)) for name in names}}


def _host_state(raw: object) -> HostState | None:
    if not isinstance(raw, dict):
        return None
    throttled = raw.get("throttled")
    return HostState(
        psi_cpu_some_avg10=_ms(raw.get("psi_cpu_some_avg10")),
        psi_memory_some_avg10=_ms(raw.get("psi_memory_some_avg10")),
        psi_io_some_avg10=_ms(raw.get("psi_io_some_avg10")),
        loadavg_1=_ms(raw.get("loadavg_1")),
        temperature_c=_ms(raw.get("temperature_c")),
        cpu_freq_khz=_ms(raw.get("cpu_freq_khz")),
        cpu_freq_max_khz=_ms(raw.get("cpu_freq_max_khz")),
        throttled=throttled[:20] if isinstance(throttled, str) else None,
        cooling_state=_ms(raw.get("cooling_state")),
        throttle_count=_ms(raw.get("throttle_count")),
    )


def _flags(throttled: str | None) -> int:
    try:
        return int(throttled or "0", 16)
    except ValueError:
        return 0


def _ms(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)  # NaN compares as within every budget
    return number


def _unreadable(line: str) -> ParseError:
    return ParseError(
        what="smoke test",
        want=f"one JSON line of probe.py, schema {' or '.join(map(str, SCHEMAS))}",
        have=repr(line[:120]) if line else "no output",
        fix="run the probe by hand on the host: python3 "
        "/opt/edgellm/current/runtime/edgellm_server/probe.py --url http://127.0.0.1:8000",
    )
