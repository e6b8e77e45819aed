"""Earlier runs of a host: lines of history.jsonl, and what they say of this run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from edgellm.health import LastGood
from edgellm.reports.schema import Fleet, Host, PastRun, Status, without_halves

# Their "ok" is that they ran, also on a host that is not well
TELL_NOTHING_OF_HEALTH = frozenset({"bench", "diagnose", "tune"})
KEPT_RUNS = 20  # of a host, in fleet.json and in the page
KEPT_WITHOUT_FIGURES = 5  # audits every night must not push out what was measured
MODEL_DIGITS = 16  # of its sha256
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
            f"(+{100 * (self.after_ms / self.before_ms - 1):.0f} %, "
            f"{self.runs_before} runs before, {self.runs_after} after)"
        )


def line_of(fleet: Fleet, host: Host) -> PastRun:
    """What is remembered of a host in this run."""
    measured = host.measured
    model_sha256 = (host.model or fleet.model).sha256
    return PastRun(
        run_id=fleet.run_id,
        at=fleet.ended_at,
        host=host.name,
        deploy=fleet.deploy,
        status=host.status.value,
        hardware_class=host.hardware_class,
        kernel=host.kernel,
        release=host.release,
        model=model_sha256[:MODEL_DIGITS] if model_sha256 else None,
        n=measured.n,
        median_ttft_ms=measured.median_ttft_ms,
        p95_ttft_ms=measured.p95_ttft_ms,
        output_throughput=measured.output_throughput,
    )


def lines(fleet: Fleet) -> str:
    """To be appended to history.jsonl, in one write.

    The line break comes first as well: what a cut run left of its last line stays by itself.
    """
    if fleet.deploy in TELL_NOTHING_OF_HEALTH:
        return ""
    told = [
        _line(line_of(fleet, host)) for host in fleet.hosts if host.status is not Status.PENDING
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
        host: _last(sorted(past.values(), key=lambda run: run.at), runs)
        for host, past in found.items()
    }


def _last(past: Sequence[PastRun], runs: int) -> tuple[PastRun, ...]:
    figures = [run for run in past if run.median_ttft_ms is not None][-runs:]
    others = [run for run in past if run.median_ttft_ms is None][-KEPT_WITHOUT_FIGURES:]
    return tuple(sorted((*figures, *others), key=lambda run: run.at))


def kept(text: str) -> str:
    """history.jsonl with the last KEPT_RUNS of each host alone, the oldest first."""
    runs = sorted((run for past in read(text).values() for run in past), key=lambda run: run.at)
    return "".join(f"{_line(run)}\n" for run in runs)


def _line(run: PastRun) -> str:
    return json.dumps(run.model_dump(exclude_none=True), separators=(",", ":"))


def trend_of(fleet: Fleet, host: Host) -> Trend | None:
    now = line_of(fleet, host)
    return trend(now.median_ttft_ms, of_the_model(now.model, host.history))


def of_the_model(model: str | None, earlier: Iterable[PastRun]) -> tuple[PastRun, ...]:
    """Another model is no slower host."""
    return tuple(past for past in earlier if past.model == model)


def last_good(runs: Iterable[PastRun], model_sha256: str | None) -> LastGood | None:
    """The last of a host's runs, the oldest first, in which it was ok with this very model.

    A line without a model is of none: neither a version 1 nor `engine: forward` tells of one.
    """
    for past in reversed(tuple(runs)):
        ms = _counted(past)
        if ms is None or past.status != Status.OK.value:
            continue
        if model_sha256 is not None and past.model == model_sha256[:MODEL_DIGITS]:
            return LastGood(
                median_ttft_ms=ms,
                n=past.n or 0,
                at=past.at,
                kernel=past.kernel,
                release=past.release,
            )
    return None


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


def slower_since_of(fleet: Fleet, host: Host) -> SlowerSince | None:
    """As slower_since, this run included; None where it has measured nothing."""
    now = line_of(fleet, host)
    if now.median_ttft_ms is None:
        return None
    return slower_since((*of_the_model(now.model, host.history), now))


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


def _changed(last: PastRun, first: PastRun) -> tuple[Literal["kernel", "release"], str, str] | None:
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
