"""python -m bench.plan_cost: what the plan and the files of a thousand hosts cost to make.

The hosts are the boards of tests/hardware, each with another kernel, memory and number of cores.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.results import Bar, Measure, table
from bench.servers import REPO
from bench.stats import Summary, spread
from demo.model import SMALL_MODEL
from edgellm import render
from edgellm.cpuset import CpuSet
from edgellm.desired import desired_state
from edgellm.parse import parse_profile
from edgellm.release import Release
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning

HARDWARE = REPO / "tests" / "hardware"
HOSTS = 1000
MEMORY_FACTORS = (1.0, 0.5, 2.0, 0.97, 1.03)
PLAN_CPU = Bar(
    key="plan_cpu_ms_per_host", label="plan and files, CPU ms a host, 1,000 hosts", limit=25
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU milliseconds of one host."""

    parse_ms: float
    plan_ms: float
    files_ms: float

    @property
    def total_ms(self) -> float:
        return self.parse_ms + self.plan_ms + self.files_ms


def probes(n: int, hardware: Path = HARDWARE) -> Iterator[str]:
    """The probe outputs of n hosts, no two alike, the boards in turns."""
    boards = [path.read_text("ascii") for path in sorted(hardware.glob("*/probe.txt"))]
    for number in range(n):
        yield varied(boards[number % len(boards)], number // len(boards))


def varied(probe: str, number: int) -> str:
    """The same board with another kernel build, memory, and here and there a core off line.

    Number 0 is the board as it is.
    """
    if number == 0:
        return probe
    factor = MEMORY_FACTORS[number % len(MEMORY_FACTORS)]

    def scaled(found: re.Match[str]) -> str:
        return f"{found[1]}{round(int(found[2]) * factor) - number} kB"

    probe = re.sub(r"(?m)^(Mem(?:Total|Available): *)(\d+) kB$", scaled, probe)
    probe = re.sub(r"(?m)^(@@ uname\n\S+)", rf"\1-{number}", probe)
    online = re.search(r"(?m)^(/sys/devices/system/cpu/online:)(.*)$", probe)
    if online is not None and number % 3 == 0:
        cpus = CpuSet.parse(online[2]).cpus
        if len(cpus) > 2:
            fewer = str(CpuSet.of(cpus[:-1]))
            probe = probe[: online.start(2)] + fewer + probe[online.end(2) :]
    return probe


def cost_of(probe: str, settings: Settings) -> Cost:
    """Once through all that is decided for one host."""
    began = time.process_time()
    profile = parse_profile(probe, control_time_s=None)
    parsed = time.process_time()
    plan = plan_tuning(profile, settings)
    planned = time.process_time()
    desired_state(
        settings=settings,
        plan=plan,
        release=Release.of(
            model_sha256=settings.model_sha256,
            runtime_id="0" * 16,
            files=render.release_files(plan, settings, ()),
        ),
        text=render.text,
    )
    done = time.process_time()
    return Cost(
        parse_ms=(parsed - began) * 1e3,
        plan_ms=(planned - parsed) * 1e3,
        files_ms=(done - planned) * 1e3,
    )


def measure(n: int) -> Measure:
    """Of all n hosts, the first ones included, which compile the templates."""
    settings = Settings.from_host_data(SMALL_MODEL, host="bench")
    costs = [cost_of(probe, settings) for probe in probes(n)]
    return measured(costs)


def measured(costs: Sequence[Cost]) -> Measure:
    totals = [cost.total_ms for cost in costs]
    return Measure(
        bar=PLAN_CPU,
        # The mean: what the whole fleet costs, by its hosts
        summary=Summary(value=statistics.fmean(totals), n=len(totals), spread=spread(totals)),
        unit="ms",
        details={
            "parse_ms": statistics.fmean(cost.parse_ms for cost in costs),
            "plan_ms": statistics.fmean(cost.plan_ms for cost in costs),
            "files_ms": statistics.fmean(cost.files_ms for cost in costs),
            "highest_ms": max(totals),
            "all_hosts_s": sum(totals) / 1e3,
        },
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_cost", description=__doc__)
    parser.add_argument("--hosts", type=int, default=HOSTS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    found = measure(parse_options(arguments).hosts)
    print(table([found]))
    for name, value in found.details.items():
        print(f"  {name}: {value:.2f}")
    assert found.summary is not None
    return 0 if PLAN_CPU.met(found.summary.value) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
