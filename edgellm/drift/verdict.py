"""What is said of one knob, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from edgellm.cpuset import CpuSet
from edgellm.tuning import TuningPlan


class Verdict(str, Enum):
    """What a knob needs. Only DRIFTED and UNKNOWN need somebody."""

    IN_ORDER = "in order"  # with a reason: a note
    DRIFTED = "drifted"  # not as a roll-out leaves it, and put right by one
    LIMITED = "limited"  # configured as it should be; the host caps it or cannot have it
    LEFT_ALONE = "left alone"  # the plan does not touch it
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobState:
    """One knob of one host. All values as text, for people to read."""

    knob: str
    desired: str | None
    configured: str | None
    configured_by: str | None  # the file that decides it
    effective: str | None
    verdict: Verdict
    reason: str | None  # why they differ, why it was left alone, or a note


def drifted(states: Iterable[KnobState]) -> tuple[str, ...]:
    """Names of the knobs that a roll-out puts right."""
    return tuple(state.knob for state in states if state.verdict is Verdict.DRIFTED)


def state_of(
    knob: str,
    desired: str | None,
    effective: str | None,
    verdict: Verdict,
    reason: str | None,
    *,
    configured: str | None = None,
    by: str | None = None,
) -> KnobState:
    return KnobState(
        knob=knob,
        desired=desired,
        configured=configured,
        configured_by=by,
        effective=effective,
        verdict=verdict,
        reason=reason,
    )


def in_order(
    knob: str,
    desired: str | None,
    effective: str | None,
    note: str | None = None,
    *,
    configured: str | None = None,
    by: str | None = None,
) -> KnobState:
    """`by` alone: the file says what is desired, which has been looked at."""
    if configured is None and by is not None:
        configured = desired
    return state_of(knob, desired, effective, Verdict.IN_ORDER, note, configured=configured, by=by)


def off(
    knob: str,
    desired: str | None,
    effective: str | None,
    why: str,
    *,
    configured: str | None = None,
    by: str | None = None,
) -> KnobState:
    return state_of(knob, desired, effective, Verdict.DRIFTED, why, configured=configured, by=by)


def limited(
    knob: str,
    desired: str | None,
    effective: str | None,
    why: str,
    *,
    configured: str | None = None,
    by: str | None = None,
) -> KnobState:
    return state_of(knob, desired, effective, Verdict.LIMITED, why, configured=configured, by=by)


def unknown(
    knob: str, why: str, desired: str | None = None, effective: str | None = None
) -> KnobState:
    return state_of(knob, desired, effective, Verdict.UNKNOWN, why)


def left_alone(
    plan: TuningPlan, knob: str, effective: str | None, name: str | None = None
) -> KnobState:
    """`name`: the knob's own, where the plan has one reason for several."""
    return state_of(name or knob, None, effective, Verdict.LEFT_ALONE, reason_of(plan, knob))


def reason_of(plan: TuningPlan, knob: str) -> str:
    """The plan's own reason for a knob."""
    texts = [reason.text for reason in plan.reasons if reason.knob == knob]
    return "; ".join(texts) or "the plan says nothing of it"


def text(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else str(cpus)


def counted(values: Iterable[str]) -> str:
    """'batch' where all are alike, else 'batch x 11, other x 1'."""
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} x {n}" for value, n in sorted(counts.items(), key=lambda i: -i[1]))
