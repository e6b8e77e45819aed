"""Which knobs win on one host, by trials on that host: candidates, the choice, and its result.

`deploys/tune.py` measures and stores, `deploys/qwen.py` applies. The rule against noise and its
figures are in docs/measured-choice.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgellm.cpuset import CpuSet
from edgellm.errors import EdgellmError
from edgellm.hardware import Arch, HostProfile, plain
from edgellm.settings import Settings
from edgellm.tuning import (
    HEADROOM_FRACTION,
    MAX_DECODE_THREADS,
    MIN_HEADROOM_BYTES,
    Reason,
    Scheduling,
    TuningPlan,
    physical_cores,
    plan_affinity,
    plan_allowed_cpus,
    quota_threads,
    total_memory,
    visible_cpus,
)

SCHEMA_VERSION = 1
PLANNED = "planned"
MOST_CANDIDATES = 8
# Ten times the weight of others is planned. At 3000 a host under full load keeps 3 % for the rest
# of itself; at systemd's highest, 10000, sshd would wait with it.
HIGHER_CPU_WEIGHT = 3000
FEW_THREADS = 8  # above it one thread less tells nothing: half of them
MORE_BY = 1.25  # the same, upwards

# A typical request: its first token, and 24 more.
TOKENS_AFTER_FIRST = 24
MIN_ROUNDS = 5
# Less than this nobody notices, and a kernel update moves as much.
MIN_GAIN = 0.03
# One-sided t quantiles for n pairs (n - 1 degrees of freedom) at 0.05 / 21: one false winner in
# twenty runs at most over 7 candidates and 3 conditions together (Bonferroni).
CRITICAL_T = {
    5: 5.67,
    6: 4.83,
    7: 4.36,
    8: 4.07,
    9: 3.87,
    10: 3.72,
    11: 3.61,
    12: 3.52,
}

# Where a board must not be driven to: most ARM boards throttle at 80 to 85 C, x86 from 95 to 105.
HOT_C = {Arch.ARM64: 80.0, Arch.X86_64: 95.0}

Value = int | str | None
Changes = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run the server. `changes`: knob -> value, sorted; () is the plan as it is."""

    name: str  # "threads 3"
    changes: Changes

    @classmethod
    def of(cls, name: str, **changes: Value) -> Candidate:
        return cls(name=name, changes=tuple(sorted(changes.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate, one round, one condition; times are means over its requests."""

    candidate: str
    round: int
    condition: str  # "idle", "crowded", "loaded"
    ttft_ms: float
    tpot_ms: float
    throttled: bool = False
    disturbed: bool = False  # the live service had requests of its own meanwhile
    temperature_c: float | None = None

    @property
    def request_ms(self) -> float:
        """The time of a typical request."""
        return self.ttft_ms + TOKENS_AFTER_FIRST * self.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A candidate's time over the baseline's under one condition; below 1 it is faster."""

    candidate: str
    condition: str
    n: int
    ratio: float  # the median of the rounds
    low: float  # quartiles of them; lowest and highest of fewer than 4
    high: float
    faster: bool  # by more than the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`candidate`: the winner, or the baseline, for the reason that `why` says."""

    candidate: str
    changes: Changes
    why: str
    conclusive: bool  # False: there were too few rounds to tell, or the host throttled
    standings: tuple[Standing, ...]

    @property
    def keeps_the_plan(self) -> bool:
        return not self.changes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultKey:
    """What a result holds for. Any other kernel, model, runtime or plan has to be measured anew."""

    kernel: str  # "6.6.31+rpt-rpi-2712"
    model_sha256: str
    runtime_id: str
    plan_digest: str

    def changed_since(self, measured: ResultKey) -> tuple[str, ...]:
        """What is no longer as it was measured, in words; () where it all is."""
        said = []
        if self.kernel != measured.kernel:
            said.append(f"kernel {measured.kernel} -> {self.kernel}")
        if self.model_sha256 != measured.model_sha256:
            said.append("another model")
        if self.runtime_id != measured.runtime_id:
            said.append("another runtime")
        if self.plan_digest != measured.plan_digest:
            said.append("another plan")
        return tuple(said)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredResult:
    """What lies at layout.MEASURED on a host."""

    key: ResultKey
    choice: Choice
    measured_on: str  # UTC date, "2026-12-02"
    duration_s: float
    ended: str  # why no more was measured

    def to_json_text(self) -> str:
        """One text for one result."""
        values = {"schema_version": SCHEMA_VERSION, **plain(self)}
        values["choice"]["changes"] = dict(self.choice.changes)
        return json.dumps(values, indent=1, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str | None) -> MeasuredResult | None:
        """None for what is no result of this version: it is as good as none."""
        try:
            values = json.loads(text or "")
            if values.pop("schema_version") != SCHEMA_VERSION:
                return None
            choice = values.pop("choice")
            changes = choice.pop("changes")
            standings = choice.pop("standings")
            key = ResultKey(**values.pop("key"))
            result = cls(
                key=key,
                choice=Choice(
                    changes=tuple(sorted(changes.items())),
                    standings=tuple(Standing(**item) for item in standings),
                    **choice,
                ),
                **values,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return result if _is_sound(result) else None


def _is_sound(result: MeasuredResult) -> bool:
    texts = (*(getattr(result.key, f.name) for f in fields(ResultKey)), result.measured_on)
    numbers = [result.duration_s]
    for standing in result.choice.standings:
        texts = (*texts, standing.candidate, standing.condition)
        numbers += [standing.n, standing.ratio, standing.low, standing.high]
    return (
        all(isinstance(text, str) for text in (*texts, result.choice.candidate, result.choice.why))
        and all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
        and isinstance(result.choice.conclusive, bool)
        and all(_is_allowed(knob, value) for knob, value in result.choice.changes)
    )


def _is_allowed(knob: str, value: object) -> bool:
    if knob == "cpus":
        return isinstance(value, str) and _is_cpulist(value)
    if knob == "scheduling":
        return value in ("other", "batch")
    if knob == "omp_wait_policy":
        return value in ("PASSIVE", None)
    highest = {"threads": 1024, "threads_batch": 1024, "cpu_weight": 10000, "n_batch": 2048}
    return type(value) is int and 1 <= value <= highest.get(knob, 0)


def _is_cpulist(text: str) -> bool:
    try:
        return len(CpuSet.parse(text)) > 0
    except EdgellmError:
        return False


# --- what to try ----------------------------------------------------------------------------------


def candidates(plan: TuningPlan, profile: HostProfile, settings: Settings) -> tuple[Candidate, ...]:
    """The plan first, then what may beat it on this host. What the inventory sets is not tried.

    Each changes one knob: what two of them do together is not told by these trials.
    """
    default = _Untouched(settings)
    found = [Candidate.of(PLANNED)]
    if default("threads"):
        found += _thread_candidates(plan, profile)
    if default("cpus") and default("threads"):
        found += _all_cpus(plan, profile)
    if default("scheduling") and plan.use_chrt and plan.scheduling.policy == "batch":
        found.append(Candidate.of("scheduling other", scheduling="other"))
    if default("cpu_weight") and plan.cpu_weight is not None:
        weight = HIGHER_CPU_WEIGHT
        found.append(Candidate.of(f"cpu_weight {weight}", cpu_weight=weight))
    if not plan.scheduling.is_realtime and profile.cgroup.quota_cpus is None:
        other = "PASSIVE" if plan.omp_wait_policy is None else None
        name = f"omp_wait_policy {other or 'not set'}"
        found.append(Candidate.of(name, omp_wait_policy=other))
    if default("n_batch"):
        for n_batch in (plan.engine.n_batch * 2, plan.engine.n_batch // 2):
            found.append(Candidate.of(f"n_batch {n_batch}", n_batch=n_batch))
    return tuple(found[:MOST_CANDIDATES])


class _Untouched:
    """default("threads"): the inventory leaves this setting as it comes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._defaults = {f.name: f.default for f in fields(Settings)}

    def __call__(self, name: str) -> bool:
        return bool(getattr(self._settings, name) == self._defaults[name])


def _thread_candidates(plan: TuningPlan, profile: HostProfile) -> list[Candidate]:
    """Fewer threads; and more, where a worker's mask has CPUs without one."""
    threads = plan.engine.n_threads
    found = []
    if threads > 1:
        fewer = threads - 1 if threads <= FEW_THREADS else threads // 2
        found.append(Candidate.of(f"threads {fewer}", threads=fewer))
    if quota_threads(profile) is not None or not plan.worker_cpus:
        return found  # a thread above the quota stalls all the others
    cores = min(len(physical_cores(profile, part)) for part in plan.worker_cpus)
    if threads < cores:  # it was capped
        more = min(cores, 2 * threads)
        found.append(Candidate.of(f"threads {more}", threads=more))
        return found
    siblings = min(min(len(part) for part in plan.worker_cpus), MAX_DECODE_THREADS)
    if siblings >= MORE_BY * threads:
        found.append(Candidate.of(f"threads {siblings}", threads=siblings, threads_batch=siblings))
    return found


def _all_cpus(plan: TuningPlan, profile: HostProfile) -> list[Candidate]:
    """Small or housekeeping cores as well. Not on several nodes, where memory has its say."""
    every = visible_cpus(profile) - profile.kernel.isolated_cpus
    if plan.workers != 1 or plan.numa is not None or not every - plan.cpus:
        return []
    if quota_threads(profile) is not None or plan.reserved_cpus is not None:
        return []
    cores = len(physical_cores(profile, every))
    decode = min(cores, MAX_DECODE_THREADS)
    if decode <= plan.engine.n_threads:
        return []
    return [
        Candidate.of(
            f"cpus {every}, threads {decode}", cpus=str(every), threads=decode, threads_batch=cores
        )
    ]


def plain_start(profile: HostProfile, plan: TuningPlan) -> Candidate:
    """The server as it starts by itself, in system.slice: llama.cpp's own threads and batch, every
    CPU, and no knob of ours. To be measured against the plan, never to be stored."""
    every = visible_cpus(profile)
    threads = min(len(every), 512)  # the most that the server takes
    return Candidate.of(
        "plain start",
        cpus=str(every) if plan.workers == 1 else str(plan.cpus),
        threads=threads,
        threads_batch=threads,
        n_batch=2048,
        omp_wait_policy=None,
        use_chrt=0,
        mlock=0,
    )


def conditions(plan: TuningPlan) -> tuple[str, ...]:
    """Idle; with another request's long prompt ahead, where slots allow two; busy neighbours."""
    return ("idle", "crowded", "loaded") if plan.engine.n_parallel > 1 else ("idle", "loaded")


def fits_beside_the_service(plan: TuningPlan, profile: HostProfile) -> bool:
    """Whether a second server has room while the live one stays up."""
    total_bytes = total_memory(profile)
    headroom_bytes = max(MIN_HEADROOM_BYTES, int(total_bytes * HEADROOM_FRACTION))
    now_bytes = min(profile.mem_available_bytes, total_bytes)
    return plan.memory_needed_bytes <= now_bytes - headroom_bytes


def changed_plan(plan: TuningPlan, profile: HostProfile, changes: Changes) -> TuningPlan:
    """The plan with these knobs, and with what follows from them. Its reasons stay."""
    values = dict(changes)
    engine = replace(
        plan.engine,
        n_threads=_whole(values.get("threads", plan.engine.n_threads)),
        n_threads_batch=_whole(values.get("threads_batch", plan.engine.n_threads_batch)),
        n_batch=_whole(values.get("n_batch", plan.engine.n_batch)),
        mlock=bool(values.get("mlock", plan.engine.mlock)),
    )
    weight = values.get("cpu_weight", plan.cpu_weight)
    omp = values.get("omp_wait_policy", plan.omp_wait_policy)
    changed = replace(
        plan,
        engine=engine,
        cpu_weight=None if weight is None else _whole(weight),
        omp_wait_policy=None if omp is None else str(omp),
        use_chrt=bool(values.get("use_chrt", plan.use_chrt)),
    )
    if "scheduling" in values:
        policy = Scheduling(policy=str(values["scheduling"]), priority=0)
        changed = replace(changed, scheduling=policy)
    if "cpus" in values:
        cpus = CpuSet.parse(str(values["cpus"]))
        allowed, _ = plan_allowed_cpus(profile, cpus)
        affinity, _ = plan_affinity(profile, cpus, allowed, plan.numa, plan.use_chrt)
        changed = replace(
            changed, cpus=cpus, worker_cpus=(cpus,), allowed_cpus=allowed, affinity=affinity
        )
    return changed


def _whole(value: Value) -> int:
    assert isinstance(value, int)  # MeasuredResult.parse lets nothing else through
    return value


# --- which one wins -------------------------------------------------------------------------------


def choose(trials: Iterable[Trial], tried: Sequence[Candidate]) -> Choice:
    """The candidate that is faster than the first one by more than the noise, or that first one.

    Under each condition the times of one round are compared with each other only. A candidate is
    faster where the median of the rounds' ratios is at least MIN_GAIN below 1 and the mean of
    their logarithms lies further below 0 than chance puts it (CRITICAL_T standard errors). It wins
    where it is faster under one condition and under no other slower than MIN_GAIN. Of several the
    one that is fastest over all conditions. What was measured from the first throttled round on
    does not count.
    """
    trials = tuple(trials)
    baseline = tried[0]
    end = min((trial.round for trial in trials if trial.throttled), default=None)
    kept = [t for t in trials if not t.disturbed and (end is None or t.round < end)]
    ratios = _ratios(kept, baseline.name)
    standings = {
        (name, condition): _standing(name, condition, values)
        for (name, condition), values in ratios.items()
    }
    in_order = [c.name for c in tried]
    ordered = tuple(
        standings[key] for key in sorted(standings, key=lambda k: (in_order.index(k[0]), k[1]))
    )

    def stays(why: str, *, conclusive: bool = True) -> Choice:
        return Choice(
            candidate=baseline.name,
            changes=(),
            why=why,
            conclusive=conclusive,
            standings=ordered,
        )

    measured = {trial.condition for trial in kept}
    by_name = {
        c.name: [standings[key] for key in sorted(standings) if key[0] == c.name] for c in tried[1:]
    }
    whole = {
        name: found
        for name, found in by_name.items()
        if found and len(found) == len(measured) and min(s.n for s in found) >= MIN_ROUNDS
    }
    rounds = max((s.n for s in ordered), default=0)
    if not whole:
        if end is not None:
            why = f"the host began to throttle in round {end + 1}: cool it, measure again"
            return stays(why, conclusive=False)
        if _all_slower(by_name):
            return stays("no candidate was faster in the first rounds")
        return stays(
            f"{rounds} rounds of the {MIN_ROUNDS} that tell something from noise: "
            "a larger tune_budget_s gives more",
            conclusive=False,
        )
    winners = [name for name, found in whole.items() if _wins(found)]
    if not winners:
        return stays(f"no candidate was faster by more than the noise (n={rounds})")
    best = min(winners, key=lambda name: math.fsum(math.log(s.ratio) for s in whole[name]))
    winner = next(c for c in tried if c.name == best)
    return Choice(
        candidate=best,
        changes=winner.changes,
        why=_gain(whole[best]),
        conclusive=True,
        standings=ordered,
    )


def _ratios(trials: Iterable[Trial], baseline: str) -> dict[tuple[str, str], list[float]]:
    """(candidate, condition) -> its time over the baseline's of the same round, round by round."""
    times = {(t.candidate, t.condition, t.round): t.request_ms for t in trials}
    ratios: dict[tuple[str, str], list[float]] = {}
    for (name, condition, number), time_ms in times.items():
        base_ms = times.get((baseline, condition, number))
        if name != baseline and base_ms:
            ratios.setdefault((name, condition), []).append(time_ms / base_ms)
    return ratios


def _standing(name: str, condition: str, ratios: Sequence[float]) -> Standing:
    if len(ratios) < 4:
        low, high = min(ratios), max(ratios)
    else:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    median = statistics.median(ratios)
    return Standing(
        candidate=name,
        condition=condition,
        n=len(ratios),
        ratio=round(median, 4),
        low=round(low, 4),
        high=round(high, 4),
        faster=median <= 1 - MIN_GAIN and high < 1 and _beyond_noise(ratios),
    )


def _beyond_noise(ratios: Sequence[float]) -> bool:
    n = len(ratios)
    if n < MIN_ROUNDS:
        return False
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(n)
    return statistics.fmean(logs) < -CRITICAL_T[min(n, max(CRITICAL_T))] * error


def _wins(standings: Sequence[Standing]) -> bool:
    return any(s.faster for s in standings) and all(
        s.faster or s.ratio <= 1 + MIN_GAIN for s in standings
    )


def _all_slower(by_name: Mapping[str, Sequence[Standing]]) -> bool:
    """Each was let go for being faster nowhere or far slower somewhere, not for want of time."""
    measured = [found for found in by_name.values() if found]
    return bool(measured) and all(
        min(s.ratio for s in found) >= 1 - MIN_GAIN or max(s.ratio for s in found) > 1 + MIN_GAIN
        for found in measured
    )


def _gain(standings: Sequence[Standing]) -> str:
    said = [
        f"{_percent(s.ratio)} {s.condition} (quartiles {_percent(s.high)} to {_percent(s.low)}, "
        f"n={s.n})"
        for s in standings
    ]
    return "time of a request against the plan's: " + ", ".join(said)


def _percent(ratio: float) -> str:
    """0.88 -> '-12 %'."""
    return f"{round((ratio - 1) * 100):+d} %"


# --- what is done with it -------------------------------------------------------------------------

# Of no consequence to which candidate is faster, or following from what is digested.
_NOT_DIGESTED = frozenset(
    {"reasons", "packages", "memory_needed_bytes", "kv_cache_bytes", "limits"}
    | {"swappiness", "sysctl_name", "zram"}
)


def result_key(
    profile: HostProfile, *, model_sha256: str, runtime_id: str, plan: TuningPlan
) -> ResultKey:
    """`plan`: as planned, before any result is applied."""
    knobs = {k: v for k, v in plain(plan).items() if k not in _NOT_DIGESTED}
    text = json.dumps(knobs, sort_keys=True, separators=(",", ":"))
    return ResultKey(
        kernel=profile.kernel.release,
        model_sha256=model_sha256,
        runtime_id=runtime_id,
        plan_digest=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def apply_measured(
    plan: TuningPlan, profile: HostProfile, key: ResultKey
) -> tuple[TuningPlan, str | None]:
    """The plan with what this host's own result changes, and what there is to say of it.

    A result of another kernel, model, runtime or plan is not used. Reasons say either.
    """
    if profile.measured_json is None:
        return plan, None
    result = MeasuredResult.parse(profile.measured_json)
    if result is None:
        return _unused(plan, "the stored result cannot be read; deploys/tune.py measures anew")
    changed = key.changed_since(result.key)
    if changed:
        return _unused(
            plan,
            f"the result of {result.measured_on} is not used ({', '.join(changed)}): "
            "deploys/tune.py measures anew",
        )
    choice = result.choice
    if choice.keeps_the_plan:
        text = f"the plan stands, as measured here on {result.measured_on}: {choice.why}"
        return _with_reasons(plan, (), (Reason(knob="measured", text=text),)), text
    tuned = changed_plan(plan, profile, choice.changes)
    if not _fits(tuned, profile):
        text = "the stored result asks for CPUs that are not here; deploys/tune.py measures anew"
        return _unused(plan, text)
    said = tuple(
        Reason(
            knob=knob,
            text=f"{value if value is not None else 'not set'}: measured on this host on "
            f"{result.measured_on}",
        )
        for knob, value in choice.changes
    )
    text = f"{choice.candidate}, measured on this host on {result.measured_on}; {choice.why}"
    gone = {knob for knob, _ in choice.changes}
    if "cpus" in gone:
        gone |= {"allowed_cpus", "affinity"}
        _, why_allowed = plan_allowed_cpus(profile, tuned.cpus)
        _, why_affinity = plan_affinity(
            profile, tuned.cpus, tuned.allowed_cpus, tuned.numa, tuned.use_chrt
        )
        said = (*said, *(r for r in (*why_allowed, *why_affinity) if r.knob in gone))
    return _with_reasons(tuned, gone, (Reason(knob="measured", text=text), *said)), text


def _fits(plan: TuningPlan, profile: HostProfile) -> bool:
    most = min((len(part) for part in plan.worker_cpus), default=0)
    return not plan.cpus - visible_cpus(profile) and plan.engine.n_threads <= most


def _unused(plan: TuningPlan, text: str) -> tuple[TuningPlan, str]:
    return _with_reasons(plan, (), (Reason(knob="measured", text=text, left_alone=True),)), text


def _with_reasons(plan: TuningPlan, gone: Iterable[str], added: tuple[Reason, ...]) -> TuningPlan:
    """Without the reasons of `gone` knobs, which no longer hold."""
    gone = frozenset(gone)
    return replace(plan, reasons=(*added, *(r for r in plan.reasons if r.knob not in gone)))


def table_lines(result: MeasuredResult) -> tuple[str, ...]:
    """For the terminal: every candidate that was measured, and the choice."""
    by_name: dict[str, list[Standing]] = {}
    for standing in result.choice.standings:
        by_name.setdefault(standing.candidate, []).append(standing)
    lines = []
    for name, found in by_name.items():
        cells = [
            f"{s.condition} {_percent(s.ratio)} ({_percent(s.low)} to {_percent(s.high)}, n={s.n})"
            for s in found
        ]
        mark = "*" if name == result.choice.candidate else " "
        lines.append(f"{mark} {name}: {', '.join(cells)}")
    if result.choice.keeps_the_plan:
        lines.append(f"the plan stands: {result.choice.why}")
    else:
        lines.append(f"{result.choice.candidate} wins; {result.choice.why}")
    return tuple(lines)


def progress_line(event: Mapping[str, Any]) -> str | None:
    """One event of edgellm_server/trial.py as a line for the operator; None: nothing to say."""
    kind = event.get("event")
    number = int(event.get("round", 0)) + 1
    name = event.get("candidate", "")
    if kind == "trial":
        heat = event.get("temperature_c")
        flags = [f"{heat:.0f} C"] if heat is not None else []
        flags += ["throttled"] if event.get("throttled") else []
        flags += ["disturbed, not counted"] if event.get("disturbed") else []
        more = f" [{', '.join(flags)}]" if flags else ""
        return (
            f"round {number}, {name}, {event['condition']}: TTFT {event['ttft_ms']:.0f} ms, "
            f"then {event['tpot_ms']:.1f} ms a token{more}; {event['left_s']} s left"
        )
    if kind == "failed":
        return f"round {number}, {name}: failed: {event.get('why')}"
    if kind == "dropped":
        return f"round {number}: {name} is measured no further"
    if kind == "service":
        return f"the live service is {event.get('state')}"
    return None


def trials_of(events: Iterable[Mapping[str, Any]]) -> tuple[Trial, ...]:
    """The trials among the events of edgellm_server/trial.py."""
    names = {f.name for f in fields(Trial)}
    return tuple(
        Trial(**{key: value for key, value in event.items() if key in names})
        for event in events
        if event.get("event") == "trial"
    )
