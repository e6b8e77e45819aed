"""One run as fleet.html: one file that opens from disk and asks nothing of any address.

The data is compact JSON, in which every text, reason, knob and plan value that hosts share is there
once: what a thousand hosts are told about their boards is mostly the same. The page makes rows of
it, and a host's details when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from edgellm.render import TEMPLATES
from edgellm.reports import history, retry
from edgellm.reports.schema import Fleet, Host, PastRun, Smoke, Status

TEMPLATE = "fleet_report.html.j2"
NONE = -1  # an index of nothing

# In the order of the page's lists of figures: what, unit, digits.
FIGURES: tuple[tuple[str, str, Callable[[Smoke], float | None]], ...] = (
    ("requests", "", lambda s: s.n),
    ("median TTFT", "ms", lambda s: s.median_ttft_ms),
    ("p95 TTFT", "ms", lambda s: s.p95_ttft_ms),
    ("max TTFT", "ms", lambda s: s.max_ttft_ms),
    ("cold TTFT", "ms", lambda s: s.cold_ttft_ms),
    ("TTFT, new prefix", "ms", lambda s: s.new_prefix_ttft_ms),
    (
        "TTFT, known prefix",
        "ms",
        lambda s: s.known_prefix.median_ttft_ms if s.known_prefix else None,
    ),
    ("median TPOT", "ms", lambda s: s.median_tpot_ms),
    ("output", "tokens/s", lambda s: s.output_throughput),
    ("temperature", "°C", lambda s: s.temperature_c),
    ("clock", "MHz", lambda s: None if s.cpu_freq_khz is None else s.cpu_freq_khz / 1000),
    ("CPU pressure", "%", lambda s: s.psi_cpu_some_avg10),
)


class _Unique:
    """Values, each once, by their index."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        """NONE for None."""
        if value is None:
            return NONE
        if value not in self._index:
            self._index[value] = len(self.values)
            self.values.append(value)
        return self._index[value]

    def all(self, values: Iterable[Any]) -> list[int]:
        return [self(value) for value in values]


def page(fleet: Fleet) -> str:
    return _template().render(
        title=f"edgellm {fleet.deploy}: {fleet.run_id}", data=_for_a_script(data(fleet))
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=True
    )
    return environment.get_template(TEMPLATE)


def _for_a_script(value: Any) -> str:
    """JSON that no text of a host can end: none of it is markup to the page's parser."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    escapes: dict[str, str | int | None] = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    return text.translate(str.maketrans({**escapes, "\u2028": "\\u2028", "\u2029": "\\u2029"}))


def data(fleet: Fleet) -> dict[str, Any]:
    """What the page's script reads. Numbers in lists of a host are indices, but for figures."""
    texts, reasons, knobs, choices, runs = (_Unique() for _ in range(5))

    def of_a_host(host: Host) -> list[Any]:
        trend = history.trend_of(fleet, host)
        since = history.slower_since_of(fleet, host)
        return [
            host.name,
            host.address,
            list(Status).index(host.status),
            texts(host.hardware_class),
            texts(host.kernel),
            texts(host.release),
            texts.all(host.groups),
            texts(host.reason),
            texts.all(host.changed),
            texts.all(host.repaired),
            texts.all(host.verdict.warnings if host.verdict else ()),
            _figures(host.measured),
            [
                _rounded(s.k, s.median_ttft_ms, s.p95_ttft_ms, s.output_throughput)
                for s in host.measured.concurrency
            ],
            _figures(host.from_control) if host.from_control else None,
            choices.all(
                (texts(name), texts(_told(value))) for name, value in (host.plan or {}).items()
            ),
            reasons.all(
                (texts(r.knob), texts(r.text), r.left_alone + 2 * r.warning) for r in host.reasons
            ),
            knobs.all(
                (
                    *texts.all((k.knob, k.desired, k.configured, k.configured_by)),
                    *texts.all((k.effective, k.verdict, k.reason)),
                )
                for k in host.knobs
            ),
            _history(host.history, runs, texts),
            None
            if trend is None
            else [trend.direction, round(trend.change, 3), round(trend.usual_ms, 1), trend.runs],
            texts(since.text if since else None),
            texts(host.answer_sample or host.measured.answer_sample),
            texts(host.measured.throttled),
        ]

    hosts = [of_a_host(host) for host in fleet.hosts]
    return {
        "run": {
            "id": fleet.run_id,
            "deploy": fleet.deploy,
            "started": fleet.started_at,
            "ended": fleet.ended_at,
            "took_s": round(fleet.duration_s),
            "model": fleet.model.name,
            "sha256": fleet.model.sha256,
            "interrupted_by": fleet.interrupted_by,
            "exit_code": fleet.exit_code,
        },
        "retry": [
            [
                " and ".join(name.removesuffix(".txt") for name in names),
                sum(len(retry.listed(fleet, name)) for name in names),
                retry.command(fleet, names),
            ]
            for names in retry.asked(fleet)
        ],
        "statuses": [status.value for status in Status],
        "figures": [[name, unit] for name, unit, _ in FIGURES],
        "texts": texts.values,
        "reasons": reasons.values,
        "knobs": knobs.values,
        "choices": choices.values,
        "runs": runs.values,
        "hosts": hosts,
    }


def _figures(smoke: Smoke) -> list[float | None]:
    return _rounded(*(value(smoke) for _, _, value in FIGURES))


def _rounded(*values: float | None) -> list[float | None]:
    """112 and not 112.0: a thousand hosts have many."""
    found = (None if value is None else round(value, 1) for value in values)
    return [value if value is None or value % 1 else int(value) for value in found]


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _history(past: tuple[PastRun, ...], runs: _Unique, texts: _Unique) -> list[Any]:
    """[runs, median TTFT, statuses, kernels and releases where they change]."""
    changes: list[list[int]] = []
    before: tuple[str | None, str | None] = (None, None)
    for index, run in enumerate(past):
        now = (run.kernel or before[0], run.release or before[1])
        if now != before and index:
            changes.append([index, texts(now[0]), texts(now[1])])
        before = now
    return [
        runs.all((run.run_id, run.at, run.deploy or "") for run in past),
        _rounded(*(run.median_ttft_ms for run in past)),
        texts.all(run.status for run in past),
        changes,
    ]
