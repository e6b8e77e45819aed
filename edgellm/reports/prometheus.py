"""Runs as fleet.prom, for node_exporter's textfile collector on the control machine.

`text` is one run; `merged` also has the hosts that this run left out, as the runs before left them.
The collector refuses a whole file for one line that it cannot read, for a metric without values of
one type, and for time stamps. https://github.com/prometheus/node_exporter#textfile-collector
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from edgellm.reports import history
from edgellm.reports.schema import Fleet, Host, Status

Labels = Mapping[str, str]
Value = Callable[[Host], float | None]

# A host that was taken out of the inventory must not be shown for ever.
KEPT_FOR_S = 30 * 86_400.0
RUN_ENDED = "run_end_timestamp_seconds"
HOST_ASKED = "host_run_end_timestamp_seconds"
# Each metric's first label says whose it is: a host's, or that of all runs of a deploy
SAMPLE = re.compile(r'(edgellm_\w+)\{((?:host|deploy)="(?:[^"\\]|\\.)*")[,}].* (\S+)')

# Seconds, degrees and parts of one: https://prometheus.io/docs/practices/naming/#base-units
OF_A_HOST: tuple[tuple[str, str, Value], ...] = (
    ("changed_operations", "Operations that changed the host.", lambda h: len(h.changed)),
    ("repaired_knobs", "Drifted knobs that the run put right.", lambda h: len(h.repaired)),
    (
        "drifted_knobs",
        "Knobs that are not as a roll-out leaves them.",
        # Of a host whose knobs were not compared it is not known
        lambda h: len(h.drifts) if h.knobs else None,
    ),
    (
        "warnings",
        "What somebody should look at although the host is served.",
        lambda h: len(h.verdict.warnings) if h.verdict else None,
    ),
    ("temperature_celsius", "At the end of the smoke test.", lambda h: h.measured.temperature_c),
    (
        "cpu_pressure_ratio",
        "PSI, some, avg10, at the end of the smoke test.",
        lambda h: _divided(h.measured.psi_cpu_some_avg10, 100),
    ),
    (
        "output_tokens_per_second",
        "Of one stream of the smoke test.",
        lambda h: h.measured.output_throughput,
    ),
    (
        "time_per_output_token_seconds",
        "Median of the smoke test.",
        lambda h: _divided(h.measured.median_tpot_ms, 1000),
    ),
    ("ttft_requests", "Requests behind the TTFT quantiles.", lambda h: h.measured.n),
)


def text(fleet: Fleet) -> str:
    """Every host of the run has its status; of figures only what was measured: absent is not 0."""
    if fleet.deploy in history.TELL_NOTHING_OF_HEALTH:
        return ""
    run = {"deploy": fleet.deploy}
    lines = [
        *_metric("run_info", "The run that this file is of.", [(_of_the_run(fleet), 1)]),
        *_metric("run_duration_seconds", "How long it took.", [(run, fleet.duration_s)]),
        *_metric(
            RUN_ENDED,
            "When it ended. An old one: runs no longer report.",
            [(run, ended)] if (ended := _stamp(fleet.ended_at)) is not None else [],
        ),
        *_metric(
            "run_interrupted",
            "1: a signal ended it.",
            [(run, 0 if fleet.interrupted_by is None else 1)],
        ),
        *_metric(
            "run_exit_code",
            "Of the whole run; docs/reports.md.",
            [(run, fleet.exit_code)] if fleet.exit_code is not None else [],
        ),
        *_metric(
            "run_hosts",
            "Hosts of the run by their status.",
            [({**run, "status": s.value}, len(fleet.with_status(s))) for s in Status],
        ),
        *_metric(
            "host_status",
            "1 for the status that the host has, 0 for the others.",
            [
                ({**_names(host), "status": status.value}, host.status is status)
                for host in fleet.hosts
                for status in Status
            ],
        ),
        *_metric(
            HOST_ASKED,
            "When the run ended that the host's other values are of.",
            [(_names(host), ended) for host in fleet.hosts] if ended is not None else [],
        ),
        *_metric(
            "host_info",
            "What the host is and what runs on it.",
            [({**_names(host), **_info(host)}, 1) for host in fleet.hosts],
        ),
        *_metric(
            "host_ttft_seconds",
            "Time to first token of the smoke test.",
            [
                ({**_names(host), "quantile": quantile}, ms / 1000)
                for host in fleet.hosts
                for quantile, ms in (
                    ("0.5", host.measured.median_ttft_ms),
                    ("0.95", host.measured.p95_ttft_ms),
                )
                if ms is not None
            ],
        ),
    ]
    lines += _metric(
        "host_ttft_change_ratio",
        "Median TTFT against the host's last runs: 0.25 is a quarter slower.",
        [
            (_names(host), trend.change)
            for host in fleet.hosts
            if (trend := history.trend_of(fleet, host)) is not None
        ],
    )
    for name, told, value in OF_A_HOST:
        found = [
            (_names(host), number) for host in fleet.hosts if (number := value(host)) is not None
        ]
        lines += _metric(f"host_{name}", told, found)
    return "".join(f"{line}\n" for line in lines)


def merged(newest: str, earlier: str) -> str:
    """`newest` (`text` of a run), and from `earlier` (merged before) what it says nothing of.

    A host is kept or replaced whole: beside a new status, an old TTFT would pass for its reason.
    One that the run did not come to (pending) stays as it was.
    """
    new, old = _read(newest), _read(earlier)
    now = max(_ends(new).values(), default=None)
    told = {owner for metric in new.values() for owner, _, _ in metric.samples}
    pending = {
        owner
        for owner, line, is_so in new.get("edgellm_host_status", _Metric()).samples
        if is_so and f"{_label('status', Status.PENDING.value)}}}" in line
    }
    kept = {
        owner
        for owner, ended in _ends(old).items()
        if now is not None and (owner not in told or owner in pending) and now - ended <= KEPT_FOR_S
    }
    lines: list[str] = []
    for name in dict.fromkeys((*new, *old)):
        samples = [
            *(line for owner, line, _ in new.get(name, _Metric()).samples if owner not in kept),
            *(line for owner, line, _ in old.get(name, _Metric()).samples if owner in kept),
        ]
        if samples:
            lines += [*(new.get(name) or old[name]).head, *samples]
    return "".join(f"{line}\n" for line in lines)


@dataclass(slots=True)
class _Metric:
    """`head`: its HELP and TYPE. `samples`: whose it is, the whole line, its value."""

    head: list[str] = field(default_factory=list)
    samples: list[tuple[str, str, float]] = field(default_factory=list)


def _read(text: str) -> dict[str, _Metric]:
    """What `text` wrote. A line that it cannot have written is left out: one spoils the file."""
    found: dict[str, _Metric] = {}
    for line in text.split("\n"):
        if line.startswith(("# HELP edgellm_", "# TYPE edgellm_")):
            found.setdefault(line.split()[2], _Metric()).head.append(line)
        elif (match := SAMPLE.fullmatch(line)) and match[1] in found:
            with contextlib.suppress(ValueError):
                found[match[1]].samples.append((match[2], line, float(match[3])))
    return found


def _ends(metrics: Mapping[str, _Metric]) -> dict[str, float]:
    """Whose -> when the run ended that its samples are of."""
    return {
        owner: value
        for name in (RUN_ENDED, HOST_ASKED)
        for owner, _, value in metrics.get(f"edgellm_{name}", _Metric()).samples
    }


def _label(name: str, value: str) -> str:
    return f'{name}="{_escaped(value)}"'


def _metric(name: str, told: str, values: Iterable[tuple[Labels, float]]) -> tuple[str, ...]:
    """All gauges: a file is one state, and the next run may be over other hosts."""
    full = f"edgellm_{name}"
    found = tuple(f"{full}{_labels(labels)} {float(value):.10g}" for labels, value in values)
    return (f"# HELP {full} {told}", f"# TYPE {full} gauge", *found) if found else ()


def _names(host: Host) -> Labels:
    # Not `instance`: Prometheus sets that itself, to the control machine's name
    return {"host": host.name} | ({"site": host.site} if host.site else {})


def _info(host: Host) -> Labels:
    values = {
        "address": host.address,
        "hardware_class": host.hardware_class,
        "kernel": host.kernel,
        "release": host.release,
    }
    return {name: value for name, value in values.items() if value}


def _of_the_run(fleet: Fleet) -> Labels:
    values = {
        "deploy": fleet.deploy,
        "run_id": fleet.run_id,
        "model": fleet.model.name,
        "model_sha256": fleet.model.sha256,
    }
    return {name: value for name, value in values.items() if value}


def _labels(labels: Labels) -> str:
    return "{" + ",".join(_label(name, value) for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats/#text-format-details"""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _stamp(at: str) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return None


def _divided(value: float | None, by: float) -> float | None:
    return None if value is None else value / by
