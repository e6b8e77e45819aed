"""fleet.json, version 2: what is in it, and reading it back. docs/fleet.schema.json is made of it.

A version only adds: a reader takes what it knows and leaves the rest, and version 1 reads as a
version 2 that tells less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgellm.errors import ParseError
from edgellm.report import SCHEMA_VERSION, Fault, HostStatus

READABLE_VERSIONS = (1, 2)
Status = HostStatus


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Model(_Part):
    name: str | None = None
    sha256: str | None = None


class Reason(_Part):
    """Why a knob is as it is."""

    knob: str
    text: str
    left_alone: bool = False
    warning: bool = False


class KnobState(_Part):
    """One knob in its four states, all as text."""

    knob: str
    desired: str | None = None
    configured: str | None = None
    configured_by: str | None = None
    effective: str | None = None
    verdict: Literal["in order", "drifted", "limited", "left alone", "unknown"]
    reason: str | None = None


class Ttft(_Part):
    """The figures of schema 1, kept for its readers."""

    median: float | None = None
    p95: float | None = None
    n: int = 0
    cold: float | None = None


class Samples(_Part):
    """TTFT of requests of one kind, or of k at a time."""

    n: int | None = None
    median_ttft_ms: float | None = None
    p95_ttft_ms: float | None = None
    max_ttft_ms: float | None = None
    median_tpot_ms: float | None = None
    output_throughput: float | None = Field(default=None, description="tokens/s")


class Together(Samples):
    k: int = Field(description="requests at a time")


class HostState(_Part):
    """The host's load and heat at one moment; null for what it does not tell."""

    psi_cpu_some_avg10: float | None = None
    psi_memory_some_avg10: float | None = None
    psi_io_some_avg10: float | None = None
    loadavg_1: float | None = None
    temperature_c: float | None = None
    cpu_freq_khz: float | None = None
    cpu_freq_max_khz: float | None = None
    throttled: str | None = Field(default=None, description="a Raspberry Pi's flags: 0x50005")
    cooling_state: float | None = None
    throttle_count: float | None = None


class Failure(_Part):
    """One request that went wrong; docs/verification.md has the kinds."""

    kind: str
    detail: str = ""


class Smoke(Samples):
    """The smoke test, and the host's state at that time."""

    cold_ttft_ms: float | None = None
    new_prefix_ttft_ms: float | None = None
    known_prefix: Samples | None = None
    varied: Samples | None = None
    concurrency: tuple[Together, ...] = ()
    temperature_c: float | None = None
    throttled: str | None = None
    cpu_freq_khz: float | None = None
    psi_cpu_some_avg10: float | None = None
    host_before: HostState | None = Field(default=None, description="before the first request")
    host: HostState | None = Field(default=None, description="after the last request")
    overhead_ms: float | None = Field(
        default=None, description="the probe's own time, beside waiting and asking"
    )
    wall_ms: float | None = Field(default=None, description="of the whole probe")
    answer_sample: str | None = None
    failures: tuple[Failure, ...] = ()


class Verdict(_Part):
    healthy: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class PastRun(_Part):
    """One host in one run: a line of history.jsonl."""

    run_id: str
    at: str = Field(description="UTC, ISO 8601")
    host: str
    deploy: str | None = None
    status: str
    hardware_class: str | None = None
    kernel: str | None = None
    release: str | None = None
    model: str | None = Field(default=None, description="first 16 digits of its sha256")
    n: int | None = Field(default=None, description="requests behind the median")
    median_ttft_ms: float | None = None
    p95_ttft_ms: float | None = None
    output_throughput: float | None = None


class Host(_Part):
    name: str
    address: str = ""
    groups: tuple[str, ...] = ()
    status: Status
    reason: str | None = Field(default=None, description="why it is not ok, with the fix")
    fault: Fault | None = Field(
        default=None, description="of a failed host: input (what was given to the run) or host"
    )
    is_new: bool = Field(default=False, description="nothing of ours was on it when the run began")
    release: str | None = Field(default=None, description="that runs now; null: none, or not known")
    hardware_class: str | None = Field(default=None, description="Raspberry Pi 5 / 4 cores")
    kernel: str | None = None
    model: Model | None = Field(
        default=None, description="its own; sha256 null: another server on the host has it"
    )
    changed: tuple[str, ...] = Field(default=(), description="operations that changed the host")
    repaired: tuple[str, ...] = Field(default=(), description="drifts that this run has mended")
    verdict: Verdict | None = None
    smoke: Smoke | None = None
    from_control: Smoke | None = Field(default=None, description="as seen from the control machine")
    knobs: tuple[KnobState, ...] = ()
    plan: dict[str, Any] | None = None
    reasons: tuple[Reason, ...] = ()
    history: tuple[PastRun, ...] = Field(default=(), description="earlier runs, the oldest first")
    answer_sample: str | None = None
    # Of schema 1; `smoke` says the same and more.
    ttft_ms: Ttft | None = None
    output_throughput: float | None = None
    median_tpot_ms: float | None = None
    temperature_c: float | None = None
    psi_cpu_some_avg10: float | None = None

    @property
    def measured(self) -> Smoke:
        """The smoke test's figures, also of a schema 1 host; all None where nothing was measured.

        A tested host's `smoke` may leave out what schema 1 has a key for.
        """
        ttft = self.ttft_ms or Ttft()
        known = self.smoke or Smoke()
        older = {
            "n": ttft.n or None,
            "median_ttft_ms": ttft.median,
            "p95_ttft_ms": ttft.p95,
            "cold_ttft_ms": ttft.cold,
            "output_throughput": self.output_throughput,
            "median_tpot_ms": self.median_tpot_ms,
            "temperature_c": self.temperature_c,
            "psi_cpu_some_avg10": self.psi_cpu_some_avg10,
        }
        missing = {name: value for name, value in older.items() if getattr(known, name) is None}
        return known.model_copy(update=missing)

    @property
    def site(self) -> str | None:
        """'hall_a' of group site_hall_a."""
        return next((g.removeprefix("site_") for g in self.groups if g.startswith("site_")), None)

    @property
    def drifts(self) -> tuple[KnobState, ...]:
        return tuple(state for state in self.knobs if state.verdict == "drifted")


class Fleet(_Part):
    """One run over some hosts."""

    model_config = ConfigDict(
        frozen=True, allow_inf_nan=False, title="edgellm fleet.json", json_schema_extra={}
    )

    schema_version: int = SCHEMA_VERSION
    run_id: str
    started_at: str = Field(description="UTC, ISO 8601")
    ended_at: str
    deploy: str = Field("", description="the deploy file's name: qwen")
    model: Model = Model()
    invocation: tuple[str, ...] = Field(
        default=(),
        description="the command line without its --limit and without secrets, for the retry",
    )
    interrupted_by: str | None = Field(default=None, description="a signal: SIGINT")
    exit_code: int | None = Field(default=None, description="docs/reports.md")
    hosts: tuple[Host, ...] = ()

    def with_status(self, status: Status) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if host.status is status)

    @property
    def duration_s(self) -> float:
        """0 where a clock was set back meanwhile."""
        try:
            took = datetime.fromisoformat(self.ended_at) - datetime.fromisoformat(self.started_at)
        except (ValueError, TypeError):
            return 0.0
        return max(took.total_seconds(), 0.0)


def load(data: Mapping[str, Any]) -> Fleet:
    """The dict of a fleet.json -> Fleet. Raises ParseError that names the first wrong field."""
    return _validated(data, extra="ignore")


def check(data: Mapping[str, Any]) -> Fleet:
    """As load, and a key that the schema does not have is a fault too: for who writes the file."""
    return _validated(data, extra="forbid")


def json_schema() -> str:
    """docs/fleet.schema.json."""
    told = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Fleet.model_json_schema()
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def without_halves(value: Any) -> Any:
    """No half of a surrogate pair in any text: no file could be written with one.

    They come from undecodable bytes of a host (Python's surrogateescape).
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {without_halves(key): without_halves(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_halves(item) for item in value]
    return value


def _validated(data: Mapping[str, Any], *, extra: Literal["ignore", "forbid"]) -> Fleet:
    version = data.get("schema_version")
    if version not in READABLE_VERSIONS:
        raise ParseError(
            what="fleet.json",
            want=f"schema_version {' or '.join(map(str, READABLE_VERSIONS))}",
            have=repr(version),
            fix="read it with the edgellm that wrote it, or a newer one",
        )
    try:
        return Fleet.model_validate(without_halves(data), extra=extra)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ParseError(
            what="fleet.json",
            want=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            have=repr(first["input"])[:120],
            fix="docs/fleet.schema.json says what belongs there",
        ) from None
