"""The release, service and socket, and the operator's own server behind ours."""

from __future__ import annotations

import hashlib
import re

from edgellm import layout
from edgellm.desired import DesiredState
from edgellm.drift.files import path_states
from edgellm.drift.host import changes_of
from edgellm.drift.process import SERVICE_UNIT
from edgellm.drift.verdict import KnobState, Verdict, drifted, in_order, off, unknown
from edgellm.observed import ObservedState, ServiceState

UNIT_PATHS = tuple(f"{layout.UNIT_DIR}/{name}" for name in layout.UNITS)
SOCKET_UNIT = f"{layout.UNIT_DIR}/edgellm.socket"
NOT_ACTIVE, NOT_ENABLED = "not active", "not enabled"


def release_is_new(desired: DesiredState, observed: ObservedState) -> bool:
    found = observed.paths.get(desired.release_directory)
    return found is not None and found.kind == "absent"


def another_release_runs(desired: DesiredState, observed: ObservedState) -> bool:
    """The host is, as a whole, as another release has it: this one is new, or was rolled back."""
    service = observed.service
    if service is None or service.current_release == desired.release_id:
        return False
    if release_is_new(desired, observed):
        return True
    return service.current_release is not None and service.running_release in (
        None,
        service.current_release,
    )


def ends_again_and_again(observed: ObservedState) -> bool:
    """systemd has started it again by itself, and it is not ready."""
    effective = observed.effective
    return (
        effective is not None
        and effective.service_state == "activating"
        and (effective.n_restarts or 0) > 0
    )


def release_state(desired: DesiredState, observed: ObservedState) -> KnobState:
    service = observed.service
    if service is None:
        return unknown("release", "systemd and the link were not read", desired.release_id)
    have = service.current_release
    if have == desired.release_id:
        return in_order("release", desired.release_id, have, by=layout.CURRENT)
    changes = "; ".join(changes_of(observed.profile))
    if have is not None and (release_is_new(desired, observed) or changes):
        changes = changes or "settings, sources or the host have changed"
        why = f"another release is due: {changes}"
    elif release_is_new(desired, observed):
        why = "it is not on the host"
    elif have is None:
        why = f"{layout.CURRENT} leads to no release of ours"
    else:
        why = f"{layout.CURRENT} leads to another release"
    return off(
        "release", desired.release_id, have, why, configured=have or "none", by=layout.CURRENT
    )


def release_paths(
    desired: DesiredState, observed: ObservedState, release: KnobState
) -> tuple[KnobState, ...]:
    """Where the whole release is not there, that is one fault, told by the release's own knob."""
    states = path_states(desired.release, observed.paths)
    if release.verdict is not Verdict.DRIFTED or not release_is_new(desired, observed):
        return states
    root = desired.release_directory
    return tuple(s for s in states if s.knob != root and not s.knob.startswith(f"{root}/"))


def service_states(
    desired: DesiredState, observed: ObservedState, others: tuple[KnobState, ...]
) -> tuple[KnobState, ...]:
    """Service and socket. `others`: all other knobs, of which some are the cause of what is here.

    The socket goes with the service where that is disabled (Also=), the service with the socket
    where that is stopped (Requires=).
    """
    state = observed.service
    if state is None:
        return (unknown("service", "systemd was not asked"), unknown("socket", "as the service"))
    elsewhere = another_release_runs(desired, observed)
    off_already = frozenset(drifted(others))
    of_service = _service_faults(desired, state, off_already, elsewhere)
    if ends_again_and_again(observed) and NOT_ACTIVE not in of_service:
        assert observed.effective is not None
        times = observed.effective.n_restarts
        of_service.append(f"not ready: it has ended and was started again, {times} times")
    sockets = {SOCKET_UNIT, f"{desired.release_directory}/edgellm.socket"}
    of_socket = _socket_faults(state, elsewhere or bool(sockets & off_already))
    # A unit whose file is gone is not enabled either, which its file's own knob tells
    of_service = [f for f in of_service if f != NOT_ENABLED or not _is_gone(SERVICE_UNIT, observed)]
    of_socket = [f for f in of_socket if f != NOT_ENABLED or not _is_gone(SOCKET_UNIT, observed)]
    stopped_with_socket = of_service == [NOT_ACTIVE] and NOT_ACTIVE in of_socket
    with_service = bool(of_socket) and set(of_socket) <= set(of_service)
    with_service = with_service and not stopped_with_socket
    if with_service:
        of_service = [*of_service, f"its socket likewise {' and '.join(of_socket)}"]
    wanted = f"active, enabled, runs {desired.release_id}"
    have = ", ".join(
        (
            "active" if state.active else _inactive(observed),
            "enabled" if state.enabled else NOT_ENABLED,
            f"runs {state.running_release or 'nothing'}",
        )
    )
    states = []
    if not stopped_with_socket:
        states.append(
            off("service", wanted, have, "; ".join(of_service))
            if of_service
            else in_order("service", wanted, have)
        )
    if not with_service:
        wanted = "active, enabled"
        why = "; ".join([*of_socket, *(["and the service with it"] * stopped_with_socket)])
        states.append(
            off("socket", wanted, ", ".join(of_socket), why)
            if of_socket
            else in_order("socket", wanted, wanted)
        )
    return tuple(states)


def _is_gone(path: str, observed: ObservedState) -> bool:
    found = observed.paths.get(path)
    return found is not None and found.kind == "absent"


def _inactive(observed: ObservedState) -> str:
    """'not active (failed)', as systemd calls it."""
    effective = observed.effective
    if effective is None or effective.service_state in (None, "active", "inactive"):
        return NOT_ACTIVE
    return f"{NOT_ACTIVE} ({effective.service_state})"


def _service_faults(
    desired: DesiredState, state: ServiceState, off_already: frozenset[str], elsewhere: bool
) -> list[str]:
    faults = []
    if not state.active:
        faults.append(NOT_ACTIVE)
    if not state.enabled:
        faults.append(NOT_ENABLED)
    if state.active and state.running_release != desired.release_id and not elsewhere:
        faults.append(f"runs {state.running_release or 'something else'}")
    if state.runs_replaced_files and not {"model", "runtime"} & off_already:
        faults.append("maps files that were replaced since it started")
    units_off = bool({*UNIT_PATHS, "drop_ins"} & off_already) or elsewhere
    if state.needs_daemon_reload and not units_off and not state.socket_stale:
        faults.append("systemd has not read its unit files again")
    return faults


def _socket_faults(state: ServiceState, told: bool) -> list[str]:
    """`told`: why it is not the one of its unit file is another knob's to say."""
    faults = []
    if not state.socket_active:
        faults.append(NOT_ACTIVE)
    if not state.socket_enabled:
        faults.append(NOT_ENABLED)
    if state.socket_stale and state.socket_active and not told:
        faults.append("not the one of its unit file")
    return faults


def upstream_states(desired: DesiredState, observed: ObservedState) -> tuple[KnobState, ...]:
    """The operator's own server, where it has a drop-in of ours."""
    unit, drop_in = desired.upstream_unit, desired.upstream_drop_in
    if unit is None or drop_in is None:
        return ()
    by = layout.drop_in_path(unit)
    wanted = f"{unit} runs with our drop-in"
    state = observed.upstream
    if state is None:
        return (unknown("upstream", f"{unit} was not asked", wanted),)
    fingerprint = re.search(r"\bEDGELLM_TUNING=(\w+)", drop_in)
    faults = []
    if not state.known:
        faults.append("no unit of that name")
    if state.drop_in_sha256 != hashlib.sha256(drop_in.encode()).hexdigest():
        faults.append("its drop-in is another or none")
    elif state.needs_daemon_reload:
        faults.append("systemd has not read its drop-in")
    elif state.active and fingerprint and state.tuning not in (None, fingerprint[1]):
        faults.append("its process was started without the drop-in")
    if not state.active and not state.idle:
        faults.append("not active")
    have = "; ".join(faults) or wanted
    if faults:
        return (off("upstream", wanted, have, have, by=by),)
    note = f"{unit} does not run now, and need not: its next start is tuned" if state.idle else None
    return (in_order("upstream", wanted, have, note, by=by),)
