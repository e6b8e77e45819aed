"""Waves: a release reaches the next hosts only after the ones before have proven it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyinfra import host
from pyinfra.api import FunctionCommand

from edgellm import recorder
from edgellm.errors import HeldBackError
from edgellm.operations.containment import host_operation

if TYPE_CHECKING:
    from pyinfra.api import State

DEFAULT_WAVE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Hosts that are rolled out at the same time, and those that must be proven before."""

    number: int
    hosts: frozenset[str]
    earlier: frozenset[str]


def waves(state: State) -> tuple[Wave, ...]:
    """The waves of this run's hosts (--limit), by number. A fleet without waves is one."""
    return waves_of(
        (str(member.name), int(member.data.get("wave", DEFAULT_WAVE)))
        for member in state.inventory
        if state.is_host_in_limit(member)
    )


def waves_of(hosts: Iterable[tuple[str, int]]) -> tuple[Wave, ...]:
    """(name, wave number) of each host -> waves in their order."""
    members: dict[int, set[str]] = {}
    for name, number in hosts:
        members.setdefault(number, set()).add(name)
    found: list[Wave] = []
    earlier: frozenset[str] = frozenset()
    for number in sorted(members):
        found.append(Wave(number=number, hosts=frozenset(members[number]), earlier=earlier))
        earlier |= members[number]
    return tuple(found)


@host_operation()
def proven(wave: Wave) -> Generator[FunctionCommand]:
    """Every wave before this one is healthy; else the hosts of this one stay as they are.

    Must be added on all hosts: pyinfra orders operations by what hosts have in common, and a gate
    that only later hosts had would run before the first wave's verification.
    """
    if host.name not in wave.hosts or not wave.earlier:
        return
    against = recorder.evidence_against(wave.earlier)
    if against:
        raise HeldBackError(
            host=host.name,
            what=f"wave {wave.number}",
            want="the waves before it healthy",
            have=against,
            fix="mend that first, then run again; this host was not touched",
        )
    host.noop(f"proven by {', '.join(sorted(wave.earlier))}")
    yield from ()
