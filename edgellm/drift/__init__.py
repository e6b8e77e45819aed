"""What is wanted of a host against what was found on it: four states a knob, and why they differ.

Pure, and never in doubt for the good: what could not be read is UNKNOWN. One cause is one knob:
what follows from a fault that has its own line (a unit edited, so that its limits are others) is
told in that line.

    verdict     Verdict, KnobState, and the words for them
    host        the host since its last verified roll-out, its packages, the account
    files       files, directories, links; model and runtime
    kernel      swappiness, zram, governor, cores kept for the server
    process     every thread and process of the service, and its slice
    service     the release, service and socket, the operator's own server
    causes      which drift follows from which
"""

from __future__ import annotations

from collections.abc import Iterable

from edgellm import layout
from edgellm.desired import DesiredState
from edgellm.drift.causes import told_once
from edgellm.drift.files import artifact_states, only, path_fault, path_states
from edgellm.drift.host import (
    ACCOUNT_COMMENT,
    ACCOUNT_SHELL,
    account_state,
    changes_of,
    package_state,
    recorded_state,
)
from edgellm.drift.kernel import kernel_states
from edgellm.drift.process import (
    PROCESS_KNOBS,
    SLICE_KNOBS,
    SLICE_UNIT,
    process_states,
    removable_drop_ins,
)
from edgellm.drift.service import (
    UNIT_PATHS,
    release_is_new,
    release_paths,
    release_state,
    service_states,
    upstream_states,
)
from edgellm.drift.verdict import KnobState, Verdict, drifted, unknown
from edgellm.observed import ObservedState

__all__ = [
    "ACCOUNT_COMMENT",
    "ACCOUNT_SHELL",
    "PROCESS_KNOBS",
    "SLICE_KNOBS",
    "KnobState",
    "Verdict",
    "changes_of",
    "compare",
    "drifted",
    "drifted_before",
    "faults_of_proof",
    "is_first_installation",
    "needs_restart",
    "needs_slice_stopped",
    "path_fault",
    "process_states",
    "removable_drop_ins",
]

# A server that answers, but like this, is not the one that was tuned.
PROOF_KNOBS = frozenset({"scheduling", "cpus", "drop_ins"})


def compare(desired: DesiredState, observed: ObservedState) -> tuple[KnobState, ...]:
    """Every knob of the host, in the order of the table."""
    paths, effective = observed.paths, observed.effective
    release = release_state(desired, observed)
    limits = only(desired.kernel, (layout.LIMITS_CONF,))
    system = [recorded_state(observed.profile), package_state(desired, observed.profile)]
    process: tuple[KnobState, ...] = ()
    if effective is None:
        system.append(unknown("effective state", "its script gave no answer"))
    else:
        system.append(account_state(paths, effective))
        system += kernel_states(desired, paths, effective)
        process = process_states(
            desired.plan,
            effective,
            desired.release_id,
            own_app=desired.settings.server_app is not None,
        )
    before = (
        *system,
        *path_states(limits, paths, "login_limits"),
        *artifact_states(desired, observed),
        *path_states(desired.keys, paths),
        *release_paths(desired, observed, release),
        *path_states(desired.units, paths),
        release,
    )
    states = (
        *before,
        *service_states(desired, observed, (*before, *process)),
        *upstream_states(desired, observed),
        *process,
    )
    return told_once(states, desired, observed)


def needs_restart(states: Iterable[KnobState]) -> bool:
    """Whether the running process or its slice is off, or what it read at its start."""
    names = drifted(states)
    read_at_start = (*UNIT_PATHS, f"{layout.RELEASES}/", "model", "runtime")
    return any(name in PROCESS_KNOBS or name.startswith(read_at_start) for name in names)


def needs_slice_stopped(states: Iterable[KnobState]) -> bool:
    """Whether the slice itself is off: it keeps what it has until it is stopped."""
    return bool({*SLICE_KNOBS, SLICE_UNIT}.intersection(drifted(states)))


def faults_of_proof(states: Iterable[KnobState]) -> tuple[str, ...]:
    """Why a server that answers is not the one that was rolled out; () where it is."""
    return tuple(
        f"{state.knob}: {state.reason}"
        for state in states
        if state.verdict is Verdict.DRIFTED and state.knob in PROOF_KNOBS
    )


def is_first_installation(observed: ObservedState) -> bool:
    """Nothing of ours was there: what is missing has not drifted."""
    service = observed.service
    nothing_runs = service is None or (
        service.current_release is None and service.running_release is None
    )
    return nothing_runs and observed.profile.recorded is None


def drifted_before(desired: DesiredState, observed: ObservedState) -> tuple[str, ...]:
    """The knobs that this run will have repaired.

    A first installation is none, and a release that is due is one only where the host has changed:
    what the operator has changed has not drifted.
    """
    if is_first_installation(observed):
        return ()
    names = drifted(compare(desired, observed))
    service = observed.service
    ran_before = service is not None and service.running_release == desired.release_id
    is_new = release_is_new(desired, observed) and not ran_before
    if is_new and not changes_of(observed.profile):
        return tuple(name for name in names if name != "release")
    return names
