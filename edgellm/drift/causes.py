"""One cause, one knob: what follows from a drift that has its own line is told in that line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from edgellm import layout
from edgellm.desired import ZRAM_FILES, DesiredState
from edgellm.drift.host import python_update
from edgellm.drift.kernel import reserved_knob
from edgellm.drift.process import OUR_SLICE, PROCESS_KNOBS, SERVICE_UNIT, SLICE_KNOBS, SLICE_UNIT
from edgellm.drift.service import UNIT_PATHS, another_release_runs, ends_again_and_again
from edgellm.drift.verdict import KnobState, Verdict, drifted
from edgellm.observed import ObservedState, PathState
from edgellm.tuning import SWAPPINESS_DISK, SWAPPINESS_ZRAM

# Files of a numeric owner or group: the account that they were given to is gone
_OF_NOBODY = re.compile(r"(owner|group) \d+, not edgellm(; (owner|group) \d+, not edgellm)*")
_HOME_OF_NOBODY = re.compile(rf"{re.escape(layout.STATE_DIR)} is of \d+:\d+")
_SLICE_LIMITS = (SLICE_KNOBS - {"drop_ins"}) | {"cpus"}
_AT_EXEC = frozenset({"scheduling", "cpus", "numa", "mlock"})  # by entrypoint.sh and server.env
_BRIEF = PROCESS_KNOBS | {"swappiness"}  # their values are a word or two


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Where the knob `cause` is off, so are, because of it, the knobs that `follows` says."""

    cause: str
    follows: Callable[[KnobState], bool]


def told_once(
    states: Iterable[KnobState], desired: DesiredState, observed: ObservedState
) -> tuple[KnobState, ...]:
    """Without the drifts that follow from another one, which names them."""
    kept = list(states)
    service = observed.service
    if service is not None and (not service.active or ends_again_and_again(observed)):
        # Nothing of a process that does not stay can be told, and why it is so is
        kept = [s for s in kept if s.knob not in PROCESS_KNOBS or s.verdict is not Verdict.UNKNOWN]
    for rule in _rules(kept, desired, observed):
        if rule.cause in drifted(kept):
            kept = list(_folded(kept, rule))
    return tuple(kept)


def _folded(states: list[KnobState], rule: Rule) -> Iterable[KnobState]:
    following = [
        s
        for s in states
        if s.verdict is Verdict.DRIFTED and s.knob != rule.cause and rule.follows(s)
    ]
    for state in states:
        if state in following:
            continue
        if state.knob == rule.cause and following:
            hence = ", ".join(map(_shortly, following))
            state = replace(state, reason=f"{state.reason}; hence {hence}")
        yield state


def _shortly(state: KnobState) -> str:
    """'nofile 2000'; the name alone of what needs more words."""
    if state.knob in _BRIEF and state.effective is not None and ", " not in state.effective:
        return f"{state.knob} {state.effective}"
    return state.knob


def _rules(
    states: Iterable[KnobState], desired: DesiredState, observed: ObservedState
) -> tuple[Rule, ...]:
    """In the order in which they are asked: the widest cause first."""
    rules = []
    if another_release_runs(desired, observed):
        rules.append(_of_a_release(desired))
    service = observed.service
    if service is not None and service.active and service.running_release != desired.release_id:
        rules.append(_of("service", PROCESS_KNOBS))
    rules += [
        *_drop_in_rules(observed),
        _of(SERVICE_UNIT, PROCESS_KNOBS - {"program", "drop_ins"}),
        _of(SLICE_UNIT, _SLICE_LIMITS),
    ]
    root = f"{desired.release_directory}/"
    rules += [_of(s.knob, _AT_EXEC) for s in states if s.knob.startswith(root)]
    if python_update(observed.profile) is not None:
        rules.append(_of("runtime", {"program"}))
    rules += [
        Rule(cause="user", follows=_was_given_to_nobody),
        Rule(cause="account", follows=_was_given_to_nobody),
    ]
    if _swappiness_is_of_other_zram_plan(desired, observed):
        rules.append(_of("zram", {"swappiness"}))
    return tuple(rules)


def _of(cause: str, knobs: Iterable[str]) -> Rule:
    names = frozenset(knobs)
    return Rule(cause=cause, follows=lambda state: state.knob in names)


def _of_a_release(desired: DesiredState) -> Rule:
    """All that a release decides, in its files, by them or with the plan that it is made from."""
    knobs = PROCESS_KNOBS | {
        *("model", "runtime", "service", "socket", "upstream"),
        *UNIT_PATHS,
        *(file.path for file in desired.keys.files),
        *map(reserved_knob, layout.RESERVED_SLICES),
    }
    # Not there either, they went with it: all of ours was removed
    above = {item.path for item in desired.release.directories}
    return Rule(
        cause="release",
        follows=lambda s: s.knob in knobs or (s.knob in above and s.reason == "not there"),
    )


def _drop_in_rules(observed: ObservedState) -> tuple[Rule, ...]:
    """A drop-in of the slice bears upon its limits, one of the service upon all of the process."""
    if observed.effective is None:
        return ()
    paths = observed.effective.foreign_drop_ins
    knobs: set[str] = set()
    if any(f"/{OUR_SLICE}.d/" in path for path in paths):
        knobs |= _SLICE_LIMITS
    if any("/edgellm.service.d/" in path for path in paths):
        knobs |= PROCESS_KNOBS - {"drop_ins", "program"}
    return (_of("drop_ins", knobs),)


def _was_given_to_nobody(state: KnobState) -> bool:
    pattern = _HOME_OF_NOBODY if state.knob == "account" else _OF_NOBODY
    return pattern.fullmatch(state.reason or "") is not None


def _swappiness_is_of_other_zram_plan(desired: DesiredState, observed: ObservedState) -> bool:
    """zram of ours came or went (another kernel), and swappiness is still as it was right then."""
    effective, plan = observed.effective, desired.plan
    if effective is None or not effective.swappiness_lines:
        return False
    wanted = [ZRAM_FILES[plan.zram.manager][0]] if plan.zram.manager in ZRAM_FILES else []
    absent = PathState(kind="absent")
    there = [
        path for path, _ in ZRAM_FILES.values() if observed.paths.get(path, absent).kind != "absent"
    ]
    winner = effective.swappiness_lines[-1]
    return (
        there != wanted
        and desired.settings.swappiness is None
        and winner.path == f"{layout.SYSCTL_DIR}/{plan.sysctl_name}"
        and winner.value == effective.swappiness
        and {winner.value, plan.swappiness} == {SWAPPINESS_DISK, SWAPPINESS_ZRAM}
    )
