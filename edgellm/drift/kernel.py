"""The kernel's settings: swappiness, zram, the clock's governor, cores kept for the server."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm import layout
from edgellm.desired import ZRAM_FILES, DesiredState
from edgellm.drift.files import file_faults, only
from edgellm.drift.process import slice_cpus
from edgellm.drift.verdict import (
    KnobState,
    Verdict,
    in_order,
    left_alone,
    limited,
    off,
    reason_of,
    state_of,
    text,
    unknown,
)
from edgellm.observed import EffectiveState, PathState, ZramSwap
from edgellm.tuning import TuningPlan, ZramPlan

Paths = Mapping[str, PathState]


def kernel_states(
    desired: DesiredState, paths: Paths, effective: EffectiveState
) -> tuple[KnobState, ...]:
    return (
        _swappiness(desired, paths, effective),
        _zram(desired, paths, effective),
        _governor(desired, paths, effective),
        *_reserved(desired, paths, effective),
    )


def _swappiness(desired: DesiredState, paths: Paths, effective: EffectiveState) -> KnobState:
    plan = desired.plan
    sysctl_files = only(desired.kernel, (layout.SYSCTL_CONF, layout.SYSCTL_CONF_LAST))
    faults, not_read = file_faults(sysctl_files, paths)
    winner = effective.swappiness_lines[-1] if effective.swappiness_lines else None
    now = None if effective.swappiness is None else str(effective.swappiness)
    wanted = None if plan.swappiness is None else str(plan.swappiness)
    configured = None if winner is None else _said(winner.value)

    def state(verdict: Verdict, reason: str | None) -> KnobState:
        by = None if winner is None else winner.path
        return state_of("swappiness", wanted, now, verdict, reason, configured=configured, by=by)

    if wanted is None:
        if faults:
            return state(Verdict.DRIFTED, "; ".join(faults))
        return state(Verdict.LEFT_ALONE, reason_of(plan, "swappiness"))
    own = f"{layout.SYSCTL_DIR}/{plan.sysctl_name}"
    overridden = winner is not None and winner.path != own and configured != wanted
    if now is None:
        return state(Verdict.UNKNOWN, "/proc/sys/vm/swappiness cannot be read")
    if overridden and winner is not None and faults:
        faults.insert(0, f"{winner.path} wins with {configured}")
    if now != wanted:
        faults.append(f"{now} now")
    if faults:
        return state(Verdict.DRIFTED, "; ".join(faults))
    if not_read is not None:
        return state(Verdict.UNKNOWN, not_read)
    if winner is None:
        return state(Verdict.UNKNOWN, "which file decides it at boot was not read")
    if overridden:
        why = f"{winner.path} sets {configured} again at boot, after ours: remove it"
        return state(Verdict.LIMITED, why)
    if effective.swappiness_of_kernel is False:
        why = "/proc/sys/vm is a copy on this host: it is read and written, without effect"
        return state(Verdict.LIMITED, why)
    if effective.swappiness_of_kernel is None:
        return state(Verdict.UNKNOWN, "whether /proc/sys/vm is the kernel's own was not read")
    return state(Verdict.IN_ORDER, None)


def _said(value: int | None) -> str:
    """What a sysctl.d file gives; None: it takes the key out, or gives what is no number."""
    return "nothing" if value is None else str(value)


def _zram(desired: DesiredState, paths: Paths, effective: EffectiveState) -> KnobState:
    plan = desired.plan.zram
    faults, not_read = file_faults(desired.zram, paths)
    have = "; ".join(map(_swap, effective.zram_swaps)) or "none"
    if plan.manager not in ZRAM_FILES:
        if faults:
            # Why it is not wanted any longer: the kernel has no such module, another one is there
            faults.append(reason_of(desired.plan, "zram"))
            return off("zram", "none of ours", have, "; ".join(faults))
        if not_read is not None:
            return unknown("zram", not_read, effective=have)
        return left_alone(desired.plan, "zram", have)
    path, _ = ZRAM_FILES[plan.manager]
    wanted = f"{_mib(plan.size_bytes)} {plan.algorithm or 'any'} priority {plan.priority}"
    silent = [] if not_read is None else [not_read]
    if plan.manager == "own-unit":
        device = effective.zram_device
        if effective.zram_unit_enabled is False:
            faults.append("its unit is not enabled")
        if effective.zram_unit_enabled is None:
            silent.append("whether its unit is enabled was not told")
    else:
        device = "zram0"  # as our file for the generator says
    faults += _swap_faults(plan, device, effective)
    if faults:
        return off("zram", wanted, have, "; ".join(faults), by=path)
    if silent:
        return unknown("zram", "; ".join(silent), wanted, have)
    return in_order("zram", wanted, have, by=path)


def _swap_faults(plan: ZramPlan, device: str | None, effective: EffectiveState) -> list[str]:
    swap = next((swap for swap in effective.zram_swaps if swap.device == device), None)
    if swap is None and device is None and effective.zram_swaps:
        return ["it has noted no device, so none of these is known as ours"]
    if swap is None:
        return ["not on"]
    faults = []
    if swap.size_bytes != plan.size_bytes:
        faults.append(f"{_mib(swap.size_bytes)}, not {_mib(plan.size_bytes)}")
    if swap.priority != plan.priority:
        faults.append(f"priority {swap.priority}, not {plan.priority}")
    if plan.algorithm is not None and swap.algorithm != plan.algorithm:
        faults.append(f"{swap.algorithm}, not {plan.algorithm}")
    return faults


def _swap(swap: ZramSwap) -> str:
    algorithm = swap.algorithm or "?"
    return f"{swap.device} {_mib(swap.size_bytes)} {algorithm} priority {swap.priority}"


def _mib(size_bytes: int | None) -> str:
    return "? MiB" if size_bytes is None else f"{size_bytes >> 20} MiB"


def _governor(desired: DesiredState, paths: Paths, effective: EffectiveState) -> KnobState:
    plan, by = desired.plan, layout.GOVERNOR_CONF
    faults, not_read = file_faults(only(desired.kernel, (by,)), paths)
    have = ", ".join(effective.governors) or "none"
    wanted = plan.cpu_governor
    if wanted is None:
        if faults:
            return off("cpu_governor", None, have, "; ".join(faults))
        return left_alone(plan, "cpu_governor", have)
    if effective.governors and effective.governors != (wanted,):
        faults.append(f"{have} now")
    if faults:
        return off("cpu_governor", wanted, have, "; ".join(faults), by=by)
    if not_read is not None or not effective.governors:
        return unknown("cpu_governor", not_read or "no governor could be read", wanted)
    return in_order("cpu_governor", wanted, have, by=by)


def _reserved(
    desired: DesiredState, paths: Paths, effective: EffectiveState
) -> tuple[KnobState, ...]:
    """The other slices, kept off our cores where the inventory asks for it."""
    return tuple(_reserved_of(name, desired, paths, effective) for name in layout.RESERVED_SLICES)


def reserved_knob(slice_name: str) -> str:
    return f"reserved_cpus of {slice_name}"


def _reserved_of(
    name: str, desired: DesiredState, paths: Paths, effective: EffectiveState
) -> KnobState:
    plan: TuningPlan = desired.plan
    knob, by = reserved_knob(name), layout.drop_in_path(name)
    faults, not_read = file_faults(only(desired.reserve, (by,)), paths)
    found = effective.slice(name)
    have = None if found is None else text(found.effective_cpus)
    wanted = plan.reserved_cpus
    if faults:
        return off(knob, text(wanted), have, "; ".join(faults), by=by)
    if not_read is not None:
        return unknown(knob, not_read, text(wanted), have)
    if wanted is None:
        return left_alone(plan, "reserved_cpus", have, knob)
    state = slice_cpus(knob, found, wanted, by, effective)
    if state.verdict is not Verdict.IN_ORDER or found is None or found.allowed_cpus == wanted:
        return state
    if found.allowed_cpus is None:
        return off(knob, text(wanted), have, "systemd has not read its drop-in", by=by)
    configured = text(found.allowed_cpus)
    why = f"systemd has {configured} from elsewhere, which its next reload brings back"
    return limited(knob, text(wanted), have, why, configured=configured)
