"""Earlier runs of a host: lines of history.jsonl, and what they say of this run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from edgellm.reports.schema import Fleet, Host, PastRun, Status, without_halves

KEPT_RUNS = 20  # of a host, in fleet.json and in the page
# A run is compared with the median of this many before it: one slow run does not move a median.
COMPARED_RUNS = 5
MIN_RUNS = 3  # below that their spread is not known
# Two runs of one unchanged host were seen up to a tenth apart (a smoke test asks few times).
FLAT_WITHIN = 0.10
# A change of kernel is blamed on the machine's owner in writing: it must stand out more.
STEP_WITHIN = 0.15
NOISE_SPREADS = 3.0  # so many standard deviations; 99.7 % of what does not change lies within
MAD_TO_DEVIATION = 1.4826  # of normal noise: median absolute deviation -> standard deviation
AFTER_RUNS = 2  # a single run after a change says nothing of the change


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """This run's median TTFT against the runs before. "up" is slower."""

    direction: Literal["up", "down", "flat"]
    change: float  # 0.23: 23 % slower than `usual_ms`
    usual_ms: float
    noise: float  # what had to be exceeded, as `change`
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerSince:
    """The median TTFT went up with a change of kernel or release, and stayed up."""

    run_id: str  # the first run after the change
    at: str
    what: Literal["kernel", "release"]
    before: str
    after: str
    before_ms: float
    after_ms: float
    runs_before: int
    runs_after: int

    @property
    def text(self) -> str:
        """'slower since 2026-11-24: kernel 6.6.31 -> 6.12.1: 140 -> 190 ms (+36 %, ...)'."""
        return (
            f"slower since {self.at[:10]}: {self.what} {self.before} -> {self.after}: median TTFT "
            f"{self.before_ms:.0f} -> {self.after_ms:.0f} ms "
            f"(+{100 * (self.after_ms / self.before_ms - 1):.0f} %, {self.runs_before} runs before, "
            f"{self.runs_after} after)"
        )


def line_of(fleet: Fleet, host: Host) -> PastRun:
    """What is remembered of a host in this run."""
    measured = host.measured
    return PastRun(
        run_id=fleet.run_id,
        at=fleet.ended_at,
        host=host.name,
        deploy=fleet.deploy,
        status=host.status.value,
        hardware_class=host.hardware_class,
        kernel=host.kernel,
        release=host.release,
        median_ttft_ms=measured.median_ttft_ms,
        p95_ttft_ms=measured.p95_ttft_ms,
        output_throughput=measured.output_throughput,
    )


def lines(fleet: Fleet) -> str:
    """To be appended to history.jsonl, in one write.

    The line break comes first as well: what a cut run left of its last line stays by itself.
    """
    told = [
        json.dumps(line_of(fleet, host).model_dump(exclude_none=True), separators=(",", ":"))
        for host in fleet.hosts
        if host.status is not Status.PENDING
    ]
    return "\n" + "\n".join(told) + "\n" if told else ""


def read(text: str, *, runs: int = KEPT_RUNS) -> dict[str, tuple[PastRun, ...]]:
    """history.jsonl, or its tail -> the last `runs` of each host, the oldest first.

    Lines that are cut, damaged or of another program are left out; of two lines of one host and
    run the later counts.
    """
    found: dict[str, dict[str, PastRun]] = {}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            past = PastRun.model_validate(without_halves(json.loads(line)))
        except (ValueError, RecursionError, ValidationError):
            continue
        found.setdefault(past.host, {})[past.run_id] = past
    return {
        host: tuple(sorted(past.values(), key=lambda run: run.at)[-runs:])
        for host, past in found.items()
    }


def add_to(fleet_json: dict[str, Any], earlier: dict[str, tuple[PastRun, ...]]) -> None:
    """Puts each host's earlier runs into the dict of fleet.json."""
    for host in fleet_json["hosts"]:
        host["history"] = [
            past.model_dump(exclude_none=True)
            for past in earlier.get(host["name"], ())
            if past.run_id != fleet_json["run_id"]
        ]


def trend(now_ms: float | None, earlier: Iterable[PastRun]) -> Trend | None:
    """None where there is too little to compare. The rule is written in docs/reports.md."""
    usual = [ms for past in earlier if (ms := _counted(past)) is not None][-COMPARED_RUNS:]
    if now_ms is None or len(usual) < MIN_RUNS:
        return None
    usual_ms = statistics.median(usual)
    noise = _noise(usual, FLAT_WITHIN)
    change = now_ms / usual_ms - 1
    # Up and down alike: twice as slow and half as slow are as far from what is usual.
    direction: Literal["up", "down", "flat"] = "flat"
    if change > noise:
        direction = "up"
    elif 1 / (1 + change) - 1 > noise:
        direction = "down"
    return Trend(
        direction=direction, change=change, usual_ms=usual_ms, noise=noise, runs=len(usual)
    )


def slower_since(runs: Sequence[PastRun]) -> SlowerSince | None:
    """`runs`: the oldest first, this one last. The change with the largest step, or None."""
    counted = [(past, ms) for past in runs if (ms := _counted(past)) is not None]
    steps: list[SlowerSince] = []
    for index in range(MIN_RUNS, len(counted) - AFTER_RUNS + 1):
        last, first = counted[index - 1][0], counted[index][0]
        change = _changed(last, first)
        if change is None:
            continue
        before, after = [ms for _, ms in counted[:index]], [ms for _, ms in counted[index:]]
        before = before[-2 * COMPARED_RUNS :]
        before_ms, after_ms = statistics.median(before), statistics.median(after)
        # Also the runs of late: what was mended since is no news.
        lately_ms = statistics.median(after[-COMPARED_RUNS:])
        limit_ms = before_ms * (1 + _noise(before, STEP_WITHIN))
        if min(after_ms, lately_ms) > limit_ms:
            what, old, new = change
            steps.append(
                SlowerSince(
                    run_id=first.run_id,
                    at=first.at,
                    what=what,
                    before=old,
                    after=new,
                    before_ms=before_ms,
                    after_ms=after_ms,
                    runs_before=len(before),
                    runs_after=len(after),
                )
            )
    return max(steps, key=lambda step: step.after_ms / step.before_ms, default=None)


def _counted(past: PastRun) -> float | None:
    """The median TTFT of a run that says something: a failed host's figures are its failure's."""
    ms = past.median_ttft_ms
    if past.status not in (Status.OK.value, Status.DRIFTED.value):
        return None
    return ms if ms is not None and math.isfinite(ms) and ms > 0 else None


def _changed(
    last: PastRun, first: PastRun
) -> tuple[Literal["kernel", "release"], str, str] | None:
    """A kernel's change before a release's: the release often follows from it."""
    if last.kernel and first.kernel and last.kernel != first.kernel:
        return "kernel", last.kernel, first.kernel
    if last.release and first.release and last.release != first.release:
        return "release", last.release[:8], first.release[:8]
    return None


def _noise(values: Sequence[float], at_least: float) -> float:
    """What runs of one state differ by, as a part of their median."""
    middle = statistics.median(values)
    deviation = MAD_TO_DEVIATION * statistics.median(abs(value - middle) for value in values)
    return max(at_least, NOISE_SPREADS * deviation / middle)
