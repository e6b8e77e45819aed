"""The plan against a plain start, measured on the host itself: deploys/bench.py's one operation."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from pyinfra import host, state
from pyinfra.api import FunctionCommand

from edgellm import recorder
from edgellm.cache import write_text
from edgellm.comparison import SCHEMA_VERSION, Comparison, compare, table
from edgellm.errors import EdgellmError
from edgellm.measured import trials_of
from edgellm.operations.containment import connector_arguments, host_operation
from edgellm.operations.trials import events_of, require_artifacts
from edgellm.trial_job import TrialRun

BENCH_JSON = "bench.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One host's measurement."""

    about: dict[str, Any]  # hardware, kernel, model: beside the figures
    trials: TrialRun


_measured: dict[str, dict[str, Any]] = {}  # of this run, by host


@host_operation()
def compared(run: BenchRun) -> Generator[FunctionCommand]:
    """How much faster the plan is than a plain start is known. Nothing on the host changes."""
    if not state.is_executing:
        return
    require_artifacts(run.trials, what="bench")
    events, end = events_of(state, host, run.trials, connector_arguments(host), what="bench")
    found = compare(
        trials_of(events),
        ended=f"{end['why']}: {end['detail']}",
        duration_s=float(end["duration_s"]),
    )
    if not found.ratios:
        raise EdgellmError(
            host=host.name,
            what="bench",
            want="a round in which both were measured undisturbed",
            have=found.ended,
            fix="a larger tune_budget_s gives more rounds; cool a host that throttles",
        )
    for line in table(found):
        host.log(line)
    _note(str(host.name), run, found)
    host.noop(f"measured in {found.duration_s:.0f} s ({found.ended})")
    yield from ()


def _note(name: str, run: BenchRun, found: Comparison) -> None:
    """After each host anew, so that an interrupted run keeps what it has."""
    _measured[name] = {**run.about, **found.to_json()}
    directory = recorder.run_directory()
    directory.mkdir(parents=True, exist_ok=True)
    values = {"schema_version": SCHEMA_VERSION, "run_id": directory.name, "hosts": _measured}
    write_text(directory / BENCH_JSON, json.dumps(values, indent=1, sort_keys=True) + "\n")
