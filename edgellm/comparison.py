"""The plan against a plain start on one host, from interleaved trials: ratios and spread. Pure.

A round has one turn of each; only times of one round are divided by each other, so that what slows
the host for a while slows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from edgellm.hardware import plain
from edgellm.measured import MIN_ROUNDS, PLANNED, Trial

SCHEMA_VERSION = 1
PLAIN = "plain start"  # the name that measured.plain_start gives
METRICS: tuple[tuple[str, Callable[[Trial], float]], ...] = (
    ("ttft_ms", lambda trial: trial.ttft_ms),
    ("tpot_ms", lambda trial: trial.tpot_ms),
    ("request_ms", lambda trial: trial.request_ms),  # the first token, and 24 more
)
WORDS = {"ttft_ms": "TTFT", "tpot_ms": "time per token", "request_ms": "request"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure under one condition. `ratio`: plain start over plan, above 1: it is faster."""

    condition: str  # "idle", "crowded", "loaded"
    metric: str
    n: int  # rounds
    plain_ms: float  # medians over them
    planned_ms: float
    ratio: float  # the median of the rounds' own ratios
    low: float  # quartiles of them; lowest and highest of fewer than 4
    high: float

    @property
    def outcome(self) -> str:
        """A difference is one only where three quarters of the rounds agree on its sign."""
        if self.n < MIN_ROUNDS:
            return f"{self.n} rounds tell nothing"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one host showed."""

    ratios: tuple[Ratio, ...]
    left_out: int  # trials that somebody else's requests, or heat, had disturbed
    ended: str  # why no more was measured
    duration_s: float

    def to_json(self) -> dict[str, Any]:
        """A host in bench.json."""
        told = [{**plain(ratio), "outcome": ratio.outcome} for ratio in self.ratios]
        return {**plain(self), "ratios": told}


def compare(trials: Iterable[Trial], *, ended: str, duration_s: float) -> Comparison:
    """From the first throttled round on nothing counts, for either."""
    trials = tuple(trials)
    end = min((trial.round for trial in trials if trial.throttled), default=None)
    kept = [t for t in trials if not t.disturbed and (end is None or t.round < end)]
    by_key = {(t.condition, t.round, t.candidate): t for t in kept}
    conditions = dict.fromkeys(trial.condition for trial in kept)
    ratios = []
    for condition in conditions:
        numbers = sorted({number for c, number, _ in by_key if c == condition})
        pairs = [
            (by_key[condition, number, PLAIN], by_key[condition, number, PLANNED])
            for number in numbers
            if (condition, number, PLAIN) in by_key and (condition, number, PLANNED) in by_key
        ]
        if pairs:
            ratios += [_ratio(condition, metric, value, pairs) for metric, value in METRICS]
    return Comparison(
        ratios=tuple(ratios), left_out=len(trials) - len(kept), ended=ended, duration_s=duration_s
    )


def _ratio(
    condition: str, metric: str, value: Callable[[Trial], float], pairs: list[tuple[Trial, Trial]]
) -> Ratio:
    found = [value(plain_one) / value(planned) for plain_one, planned in pairs]
    if len(found) < 4:
        low, high = min(found), max(found)
    else:
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return Ratio(
        condition=condition,
        metric=metric,
        n=len(found),
        plain_ms=round(statistics.median(value(one) for one, _ in pairs), 2),
        planned_ms=round(statistics.median(value(one) for _, one in pairs), 2),
        ratio=round(statistics.median(found), 3),
        low=round(low, 3),
        high=round(high, 3),
    )


def table(comparison: Comparison) -> tuple[str, ...]:
    """For the terminal: one line a condition and figure."""
    rows = [("", "", "plain start", "plan", "ratio (quartiles)", "rounds", "the plan is")]
    for one in comparison.ratios:
        rows.append(
            (
                one.condition,
                WORDS[one.metric],
                f"{one.plain_ms:.1f} ms",
                f"{one.planned_ms:.1f} ms",
                f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})",
                str(one.n),
                one.outcome,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if comparison.left_out:
        lines.append(f"{comparison.left_out} trials were disturbed and do not count")
    return tuple(lines)
