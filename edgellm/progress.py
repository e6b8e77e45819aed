"""How far each host is in a run -> the rows of the live table. Pure.

Where there are more hosts than lines, a group is one line, and only hosts that need a person keep
lines of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MOST_FAILED_ROWS = 8  # of those that have failed, where groups are summed up


class Standing(str, Enum):
    """A host in the run, in the order of the headline."""

    FAILED = "failed"
    AT_WORK = "at work"
    DONE = "done"
    HELD_BACK = "held back"
    WAITING = "waiting"


# The order of the table's lines
RANKS = {
    Standing.FAILED: 0,
    Standing.AT_WORK: 1,
    Standing.WAITING: 1,
    Standing.HELD_BACK: 2,
    Standing.DONE: 3,
}


class Mark(str, Enum):
    """A host in one stage."""

    DONE = "done"
    NOW = "now"
    FAILED = "failed"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProgress:
    """One host. `stage`: index of the one it is in, None before the first."""

    name: str
    group: str  # "site_hall_a"
    stage: int | None = None
    is_done: bool = False
    failed: str | None = None  # "failed", "unreachable"
    is_held_back: bool = False  # by a wave before its own: nothing failed on it
    transfer: str | None = None  # "model m: 120 of 429 MB"

    @property
    def standing(self) -> Standing:
        if self.failed is not None:
            return Standing.FAILED
        if self.is_done:
            return Standing.DONE
        if self.is_held_back:
            return Standing.HELD_BACK
        return Standing.WAITING if self.stage is None else Standing.AT_WORK

    def mark(self, stage: int) -> Mark:
        if self.is_done or (self.stage is not None and stage < self.stage):
            return Mark.DONE
        if stage == (self.stage or 0) and self.standing is Standing.FAILED:
            return Mark.FAILED
        at_work = stage == self.stage and self.standing is Standing.AT_WORK
        return Mark.NOW if at_work else Mark.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line. `cells`: a Mark a stage, or of a group how many hosts have done it ("118")."""

    name: str
    cells: tuple[Mark | str, ...]
    note: str
    failed: bool = False


def stages_of(names: Iterable[str]) -> tuple[str, ...]:
    """Names of operations in their order -> stages: 'Model | Model file present' -> 'Model'."""
    found = (name.partition(" | ") for name in names)
    return tuple(dict.fromkeys(stage for stage, bar, _ in found if bar))


def group_of(groups: Sequence[str]) -> str:
    """The site where there is one, else the first group."""
    sites = [name for name in groups if name.startswith("site_")]
    return next(iter((*sites, *groups)), "all")


def rows(
    hosts: Iterable[HostProgress], stages: Sequence[str], *, most_rows: int
) -> tuple[Row, ...]:
    """Failures first, then who is at work, then who is held back, then who is done."""
    ordered = sorted(hosts, key=_order)
    if len(ordered) <= most_rows:
        return tuple(_row(host, stages) for host in ordered)
    groups: dict[str, list[HostProgress]] = {}
    for host in sorted(ordered, key=lambda host: host.name):
        groups.setdefault(host.group, []).append(host)
    room = max(1, min(MOST_FAILED_ROWS, most_rows - len(groups) - 1))
    failed = [host for host in ordered if host.failed is not None]
    found = [_row(host, stages) for host in failed[:room]]
    if len(failed) > room:
        more = f"and {len(failed) - room} more"
        found.append(Row(name=more, cells=("",) * len(stages), note="", failed=True))
    summaries = sorted(
        (_summary(name, members, stages) for name, members in groups.items()),
        key=lambda row: not row.failed,
    )
    left = max(1, most_rows - len(found))
    if len(summaries) > left:
        summaries = [*summaries[: left - 1], _summary("all hosts", ordered, stages)]
    return (*found, *summaries)


def headline(hosts: Iterable[HostProgress]) -> str:
    """'500 hosts: 2 failed, 31 at work, 300 done'."""
    hosts = tuple(hosts)
    return f"{len(hosts)} hosts: {_counts(hosts)}"


def _order(host: HostProgress) -> tuple[int, str]:
    return RANKS[host.standing], host.name


def _row(host: HostProgress, stages: Sequence[str]) -> Row:
    has_ended = host.standing in (Standing.DONE, Standing.HELD_BACK)
    return Row(
        name=host.name,
        cells=tuple(host.mark(index) for index in range(len(stages))),
        note=host.failed or (host.standing.value if has_ended else host.transfer or ""),
        failed=host.standing is Standing.FAILED,
    )


def _summary(name: str, members: Sequence[HostProgress], stages: Sequence[str]) -> Row:
    cells = tuple(
        str(sum(host.mark(index) is Mark.DONE for host in members)) for index in range(len(stages))
    )
    return Row(
        name=f"{name} ({len(members)})",
        cells=cells,
        note=_counts(members),
        failed=any(host.failed is not None for host in members),
    )


def _counts(hosts: Iterable[HostProgress]) -> str:
    found = Counter(host.standing for host in hosts)
    return ", ".join(f"{found[each]} {each.value}" for each in Standing if found[each])
