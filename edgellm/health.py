"""What the smoke test measured, and whether that is healthy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import ParseError
from edgellm.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeFailure:
    """One request, or the wait for readiness, that went wrong. `kind` is the probe's word."""

    kind: str  # "not_ready", "http_status", "stalled", "empty_answer", ...
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeResult:
    """The probe's JSON line, typed. Times in ms; None where no request gave that figure."""

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

    @classmethod
    def parse(cls, line: str) -> SmokeResult:
        """One line of edgellm_server/probe.py -> SmokeResult. Raises ParseError."""
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raise _unreadable(line) from None
        if not isinstance(raw, dict) or raw.get("schema") != 1:
            raise _unreadable(line)
        host = raw.get("host")
        state: Mapping[str, Any] = host if isinstance(host, dict) else {}
        failures = raw.get("failures")
        try:
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
                temperature_c=_ms(state.get("temperature_c")),
                psi_cpu_some_avg10=_ms(state.get("psi_cpu_some_avg10")),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            raise _unreadable(line) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftBudget:
    """What a healthy host keeps to."""

    median_ttft_ms: float

    @classmethod
    def from_settings(cls, settings: Settings) -> TtftBudget:
        return cls(median_ttft_ms=settings.ttft_budget_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthVerdict:
    """healthy, or every reason why not."""

    healthy: bool
    reasons: tuple[str, ...]


def judge(result: SmokeResult, budget: TtftBudget) -> HealthVerdict:
    """A host is healthy when it became ready, every request was answered, and in time."""
    reasons = [f"{failure.kind}: {failure.detail}" for failure in result.failures]
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
    return HealthVerdict(healthy=not reasons, reasons=tuple(dict.fromkeys(reasons)))


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
        want="one JSON line of probe.py, schema 1",
        have=repr(line[:120]) if line else "no output",
        fix="run the probe by hand on the host: python3 "
        "/opt/edgellm/current/runtime/edgellm_server/probe.py --url http://127.0.0.1:8000",
    )
