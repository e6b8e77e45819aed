"""How far each host is in a run -> the rows of the live table. Pure.

Where there are more hosts than lines, a group is one line, and only hosts that need a person keep
lines of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MOST_FAILED_ROWS = 8  # of those that have failed, where groups are summed up


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

    def mark(self, stage: int) -> Mark:
        if self.is_done or (self.stage is not None and stage < self.stage):
            return Mark.DONE
        if stage == (self.stage or 0) and self.failed is not None:
            return Mark.FAILED
        return Mark.NOW if stage == self.stage and self.is_at_work else Mark.WAITING

    @property
    def is_at_work(self) -> bool:
        ended = self.is_done or self.is_held_back or self.failed is not None
        return self.stage is not None and not ended


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
    if host.failed is not None:
        return 0, host.name
    return 3 if host.is_done else 2 if host.is_held_back else 1, host.name


def _row(host: HostProgress, stages: Sequence[str]) -> Row:
    return Row(
        name=host.name,
        cells=tuple(host.mark(index) for index in range(len(stages))),
        note=host.failed or _note(host),
        failed=host.failed is not None,
    )


def _note(host: HostProgress) -> str:
    if host.is_held_back:
        return "held back"
    return host.transfer or ("done" if host.is_done else "")


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


def _counts(hosts: Sequence[HostProgress]) -> str:
    failed = sum(host.failed is not None for host in hosts)
    done = sum(host.is_done and host.failed is None for host in hosts)
    at_work = sum(host.is_at_work for host in hosts)
    held_back = sum(host.is_held_back for host in hosts)
    waiting = len(hosts) - failed - done - at_work - held_back
    counts = (
        (failed, "failed"),
        (at_work, "at work"),
        (done, "done"),
        (held_back, "held back"),
        (waiting, "waiting"),
    )
    return ", ".join(f"{n} {word}" for n, word in counts if n)
