"""python -m bench.report: the page of a thousand hosts, its size and how fast a browser sorts it.

The hosts are those of bench.plan_cost, no two alike, each with its plan and reasons, twenty earlier
runs and forty knobs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from bench.plan_cost import probes
from bench.results import Bar, Measure, report_here, table
from bench.server import RESULTS, write_report
from bench.stats import Summary, spread
from demo.model import SMALL_MODEL
from edgellm.hardware import plain
from edgellm.parse import parse_profile
from edgellm.report import SCHEMA_VERSION
from edgellm.reports import schema
from edgellm.reports.html import page
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning

HOSTS = 1000
RUNS = 20
KNOBS = 40
SIZE = Bar(key="page_mb", label="fleet.html, 1,000 hosts, MB", limit=3)
SORT = Bar(key="sort_ms", label="sorted in Chromium, slowest column, ms", limit=200)
OUT = RESULTS / "report.json"
# Each column up and down, layout and paint included: two frames after it was asked for.
SORTING = """async (columns) => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const found = [];
  for (let column = 0; column < columns; column++) for (const up of [true, false]) {
    await frame();
    const began = performance.now();
    sortBy(column, up);
    document.body.getBoundingClientRect();
    await frame();
    found.push([column, performance.now() - began]);
  }
  return found;
}"""


def fleet(n: int) -> schema.Fleet:
    """A run over n hosts, of which one in ten needs a person."""
    chance = random.Random(1)
    settings = Settings.from_host_data(SMALL_MODEL, host="bench")
    began = datetime(2026, 11, 1, tzinfo=timezone.utc)
    runs = [(f"run-{r:02}", (began + timedelta(days=r)).isoformat()) for r in range(RUNS)]
    hosts: list[dict[str, Any]] = []
    for number, probe in enumerate(probes(n)):
        profile = parse_profile(probe, control_time_s=None)
        plan = plain(plan_tuning(profile, settings))
        reasons = plan.pop("reasons")
        median = 100 + chance.random() * 300
        off = number % 10 == 0
        hosts.append(
            {
                "name": f"hall-{number % 7}-edge-{number:04}",
                "address": f"192.0.2.{number % 250}",
                "groups": ["factory", f"site_hall_{number % 7}", "arm64"],
                "status": list(schema.Status)[number // 10 % 4].value if off else "ok",
                "reason": f"smoke test: slow on {number}; fix: see the journal" if off else None,
                "release": f"{number % 40:016x}",
                "hardware_class": profile.hardware_class,
                "kernel": profile.kernel.release,
                "smoke": {"n": 5, "median_ttft_ms": median, "p95_ttft_ms": median * 1.3},
                "plan": plan,
                "reasons": reasons,
                "knobs": [
                    {
                        "knob": f"knob_{k}",
                        "desired": str(number if k == 0 else k),
                        "effective": str(k),
                        "verdict": "drifted" if off and k < 3 else "in order",
                    }
                    for k in range(KNOBS)
                ],
                "history": [
                    {
                        **{"run_id": run_id, "at": at, "host": "h", "status": "ok"},
                        "kernel": profile.kernel.release,
                        "median_ttft_ms": median * (0.9 + 0.2 * chance.random()),
                    }
                    for run_id, at in runs
                ],
            }
        )
    return schema.check(
        {
            "schema_version": SCHEMA_VERSION,
            "run_id": "bench",
            "started_at": began.isoformat(),
            "ended_at": began.isoformat(),
            "deploy": "qwen",
            "hosts": hosts,
        }
    )


def sorted_in_chromium(path: Path) -> list[float]:
    """Milliseconds of every sort by every column."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        opened = browser.new_page()
        opened.goto(path.as_uri())
        columns = opened.locator("#hosts > thead th").count()
        found = opened.evaluate(SORTING, columns)
        browser.close()
    return [took_ms for _, took_ms in found]


def sort_measure(path: Path, *, browser: bool) -> Measure:
    if not browser or shutil.which("chromium") is None:
        return Measure(bar=SORT, summary=None, why_not="no Chromium")
    took_ms = sorted_in_chromium(path)
    return Measure(
        bar=SORT, summary=Summary(value=max(took_ms), n=len(took_ms), spread=spread(took_ms))
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--size-only", action="store_true", help="no browser, nothing is kept")
    options = parser.parse_args(arguments)
    text = page(fleet(options.hosts))
    size_mb = len(text.encode()) / 1e6
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fleet.html"
        path.write_text(text)
        measures = [
            Measure(bar=SIZE, summary=Summary(value=size_mb, n=1, spread=(size_mb, size_mb))),
            sort_measure(path, browser=not options.size_only),
        ]
    print(table(measures))
    if not options.size_only:
        about = {"hosts": options.hosts, "runs": RUNS, "knobs": KNOBS}
        write_report(report_here(measures, about=about), OUT)
    return 0 if all(m.as_json()["met"] is not False for m in measures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
