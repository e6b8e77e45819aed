"""Measured figures -> what is kept as JSON and shown as a table.

Pure but for `machine` and `report_here`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from bench.stats import Side, Summary

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a measure must reach, and what it is."""

    key: str
    label: str
    limit: float | None = None  # None: shown, not judged
    sense: Literal["at_least", "at_most"] = "at_most"

    def met(self, value: float) -> bool | None:
        if self.limit is None:
            return None
        return value >= self.limit if self.sense == "at_least" else value <= self.limit

    @property
    def text(self) -> str:
        if self.limit is None:
            return ""
        return f"{'>=' if self.sense == 'at_least' else '<='} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """`ours`, `common_way`: what the value is made of, in `unit`. `why_not`: not measured."""

    bar: Bar
    summary: Summary | None
    unit: str = ""
    ours: Side | None = None
    common_way: Side | None = None
    why_not: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        value = None if self.summary is None else self.summary.value
        told: dict[str, Any] = {
            "label": self.bar.label,
            "value": _rounded(value),
            "bar": self.bar.limit,
            "sense": self.bar.sense,
            "met": None if value is None else self.bar.met(value),
            "n": 0 if self.summary is None else self.summary.n,
            "spread": [] if self.summary is None else [_rounded(v) for v in self.summary.spread],
        }
        if self.ours is not None or self.common_way is not None:
            told["unit"] = self.unit
        for name, figures in (("ours", self.ours), ("common_way", self.common_way)):
            if figures is not None:
                told[name] = {
                    "n": figures.n,
                    "median": _rounded(figures.median),
                    "p95": _rounded(figures.p95),
                }
        if self.why_not is not None:
            told["why_not"] = self.why_not
        if self.details:
            told["details"] = {k: _rounded(v) for k, v in self.details.items()}
        return told


def report(
    measures: Iterable[Measure], *, machine: Mapping[str, Any], date: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result. `date` is ISO 8601; `about` says what was run with which settings."""
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "date": date,
        "about": dict(about),
        "measures": {measure.bar.key: measure.as_json() for measure in measures},
    }


def report_here(measures: Iterable[Measure], *, about: Mapping[str, Any]) -> dict[str, Any]:
    """The result of what has just ended on this machine."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return report(measures, machine=machine(), date=now, about=about)


def table(measures: Sequence[Measure], other: str = "common way") -> str:
    rows = [("measure", "value", "bar", "", "spread", "n", "ours p50/p95", f"{other} p50/p95")]
    for measure in measures:
        found = measure.summary
        met = None if found is None else measure.bar.met(found.value)
        rows.append(
            (
                measure.bar.label,
                "-" if found is None else _short(found.value),
                measure.bar.text,
                {True: "met", False: "MISSED", None: ""}[met],
                measure.why_not or "-"
                if found is None
                else f"{_short(found.spread[0])}..{_short(found.spread[1])}",
                "" if found is None else str(found.n),
                _side_text(measure.ours, measure.unit),
                _side_text(measure.common_way, measure.unit),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def machine() -> dict[str, Any]:
    """What the figures depend on. No host name, no path."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return {
        "cpu": _cpu_model(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "vector_flags": vector_flags(cpuinfo),
    }


def vector_flags(cpuinfo: str) -> list[str]:
    """Those of /proc/cpuinfo's flags that decide how fast matrices are multiplied."""
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [flag for flag in known if flag in flags]
    return []


def _cpu_model(cpuinfo: str) -> str:
    """'AMD EPYC, family 26 model 2': virtual machines hide the rest of the name."""
    fields = dict(
        (name.strip(), value.strip())
        for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if value
    )
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        return f"{name}, family {fields['cpu family']} model {fields.get('model', '?')}"
    return name


def _side_text(figures: Side | None, unit: str) -> str:
    if figures is None:
        return ""
    return f"{_short(figures.median)}/{_short(figures.p95)} {unit}".rstrip()


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
