"""Compressed swap of our own. Another manager's, or another program's device, is never touched."""

from __future__ import annotations

import posixpath
from collections.abc import Generator
from dataclasses import dataclass

from pyinfra import host
from pyinfra.api import StringCommand

from edgellm import layout
from edgellm.facts.paths import PathStates
from edgellm.facts.reading import read
from edgellm.facts.zram import OwnZram, OwnZramState
from edgellm.operations.containment import host_operation
from edgellm.tuning import ZramPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ZramUnit:
    """The systemd unit that makes the device, and the device where the unit's name tells it."""

    name: str
    device: str | None
    can_be_enabled: bool


OWN = ZramUnit(name=posixpath.basename(layout.ZRAM_UNIT), device=None, can_be_enabled=True)
GENERATED = ZramUnit(name="systemd-zram-setup@zram0.service", device="zram0", can_be_enabled=False)


def unit_of(plan: ZramPlan) -> ZramUnit | None:
    """None: zram is not ours to set up on this host."""
    return {"own-unit": OWN, "zram-generator": GENERATED}.get(plan.manager)


@host_operation()
def in_force(plan: ZramPlan) -> Generator[StringCommand]:
    """Our zram swap has the planned size and priority, now and after a boot."""
    unit = unit_of(plan)
    if unit is None:
        host.noop(f"zram: left to {plan.adopted_manager or 'nobody'}")
        return
    own = _state(unit)
    if unit.can_be_enabled and not own.enabled:
        yield StringCommand("systemctl", "enable", unit.name)
    if own.matches(plan):
        host.noop(f"zram swap of {(plan.size_bytes or 0) >> 20} MiB already on")
        return
    yield StringCommand("systemctl", "daemon-reload")
    yield StringCommand("systemctl", "restart", unit.name)
    if not unit.can_be_enabled:
        yield StringCommand("systemctl", "start", f"dev-{unit.device}.swap")


@host_operation()
def own_absent(planned: ZramPlan | None = None) -> Generator[StringCommand]:
    """No zram swap of ours is on, or comes on at boot, but the planned one; others' are left alone.

    Before the files of those that are not planned are removed: systemd stops what it knows.
    """
    kept = None if planned is None else unit_of(planned)
    stale = False
    if kept != OWN:
        own = _state(OWN)
        if own.enabled or own.size_bytes is not None:
            stale = True
            yield StringCommand("systemctl", "disable", "--now", OWN.name)
    if kept != GENERATED:
        states = read(PathStates, paths=(layout.ZRAM_GENERATOR_CONF,))
        if states[layout.ZRAM_GENERATOR_CONF].kind != "absent":
            stale = True
            yield StringCommand("systemctl", "stop", f"dev-{GENERATED.device}.swap", GENERATED.name)
    if not stale:
        host.noop("no zram swap of ours beside the plan")


def _state(unit: ZramUnit) -> OwnZramState:
    return read(OwnZram, unit=unit.name, device=unit.device)
