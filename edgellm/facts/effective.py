"""What is in force on a host now, as edgellm/remote/effective_state.py reads it."""

from __future__ import annotations

from typing import Any

from pyinfra.api import FactBase, StringCommand

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError
from edgellm.facts.paths import one_json_object
from edgellm.facts.service import SLICE, UNIT
from edgellm.observed import (
    Account,
    EffectiveState,
    NodePages,
    ProcessState,
    ResourceLimit,
    SliceState,
    SysctlLine,
    ThreadState,
    ZramSwap,
)
from edgellm.remote import script_command

ZRAM_NOTE = "/run/edgellm-zram"  # where our unit notes its device


class Effective(FactBase[EffectiveState]):
    """EffectiveState of a host: one script, one round trip, whoever asks."""

    def command(self) -> StringCommand:
        return script_command(
            "effective_state",
            {
                "service": UNIT,
                "units": layout.UNITS,
                "slices": (SLICE, *layout.RESERVED_SLICES),
                "user": layout.USER,
                "zram_unit": layout.ZRAM_UNIT.rpartition("/")[2],
                "zram_note": ZRAM_NOTE,
                "realtime_confirmed": layout.REALTIME_CONFIRMED,
                "realtime_trial": layout.REALTIME_TRIAL,
            },
        )

    def process(self, output: list[str]) -> EffectiveState:
        return one_json_object(output, effective_state)


def effective_state(found: dict[str, Any]) -> EffectiveState:
    """The script's JSON object. Raises LookupError, TypeError or ValueError where it is another."""
    account = found["account"]
    return EffectiveState(
        account=None if account is None else Account(**account),
        service_state=found["service_state"],
        n_restarts=found["n_restarts"],
        main_pid=found["main_pid"],
        processes=tuple(_process(item) for item in found["processes"]),
        foreign_drop_ins=tuple(found["foreign_drop_ins"]),
        cgroup_version=found["cgroup_version"],
        slices=tuple(_slice(item) for item in found["slices"]),
        nr_throttled=found["nr_throttled"],
        node_pages=tuple(NodePages(**item) for item in found["node_pages"]),
        cpus_online=_cpus(found["cpus_online"]),
        swappiness=found["swappiness"],
        swappiness_of_kernel=found["swappiness_of_kernel"],
        swappiness_lines=tuple(SysctlLine(**item) for item in found["swappiness_lines"]),
        zram_swaps=tuple(ZramSwap(**item) for item in found["zram_swaps"]),
        zram_device=found["zram_device"],
        zram_unit_enabled=found["zram_unit_enabled"],
        governors=tuple(found["governors"]),
        nofile_of_systemd=_limit(found["nofile_of_systemd"]),
        memlock_of_systemd=_limit(found["memlock_of_systemd"]),
        realtime_confirmed=found["realtime_confirmed"],
        realtime_trial=found["realtime_trial"],
    )


def _process(found: dict[str, Any]) -> ProcessState:
    return ProcessState(
        pid=found["pid"],
        uid=found["uid"],
        program=found["program"],
        threads=tuple(
            ThreadState(**{**item, "cpus": _cpus(item["cpus"])}) for item in found["threads"]
        ),
        vm_locked_bytes=found["vm_locked_bytes"],
        nofile=_limit(found["nofile"]),
        memlock=_limit(found["memlock"]),
    )


def _slice(found: dict[str, Any]) -> SliceState:
    sets = {name: _cpus(found[name]) for name in ("allowed_cpus", "effective_cpus", "own_cpus")}
    return SliceState(**{**found, **sets})


def _limit(found: dict[str, Any] | None) -> ResourceLimit | None:
    return None if found is None else ResourceLimit(**found)


def _cpus(cpulist: str | None) -> CpuSet | None:
    """None where it is none: what a kernel writes that we cannot read is not known."""
    try:
        return None if cpulist is None else CpuSet.parse(cpulist)
    except ParseError:
        return None
