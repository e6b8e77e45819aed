"""Memory and CPU time of a process with all its descendants, from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    rss_bytes: int
    pss_bytes: int


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """`pid` and its descendants, those alive."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in (proc / str(parent) / "task").iterdir():
                found.extend(int(child) for child in (task / "children").read_text().split())
    return found


def memory(pid: int, proc: Path = PROC) -> Memory:
    """Sums over the tree, by smaps_rollup. Raises OSError where `pid` may not be read."""
    rss_kb = pss_kb = 0
    for member in tree(pid, proc):
        try:
            rollup = parse_rollup((proc / str(member) / "smaps_rollup").read_text())
        except OSError:
            if member == pid:
                raise
            continue  # ended meanwhile
        rss_kb += rollup["Rss"]
        pss_kb += rollup["Pss"]
    return Memory(rss_bytes=rss_kb * 1024, pss_bytes=pss_kb * 1024)


def parse_rollup(text: str) -> dict[str, int]:
    """'Rss:  123 kB' lines -> {'Rss': 123, …}. Format: Documentation/filesystems/proc.rst."""
    values = {}
    for line in text.splitlines():
        name, separator, rest = line.partition(":")
        words = rest.split()
        if separator and len(words) == 2 and words[1] == "kB":
            values[name] = int(words[0])
    return values


def cpu_s(pid: int, proc: Path = PROC) -> float:
    """User and system time of the tree so far, that of ended children too."""
    ticks = 0
    for member in tree(pid, proc):
        with contextlib.suppress(OSError):
            ticks += parse_stat_ticks((proc / str(member) / "stat").read_text())
    return ticks / _TICKS_PER_S


def parse_stat_ticks(stat: str) -> int:
    """utime + stime + cutime + cstime, fields 14 to 17 of proc(5)'s stat.

    Field 2, the command's name, is in parentheses and may hold anything: split behind it.
    """
    fields = stat.rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15])


def open_fds(pid: int, proc: Path = PROC) -> int:
    return sum(1 for _ in (proc / str(pid) / "fd").iterdir())
