"""python -m bench.server: our server against the common way, every row of the table in one run.

Starts both on the same weights, asks them in turns, ends both, prints the table and keeps it in
bench/results/server.json. --quick is a rehearsal: it measures little and keeps nothing there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from bench import prompts, rounds
from bench.common_venv import VenvError, common_venv, installed_version
from bench.load import LoadError, ask
from bench.plan import (
    command_prefix,
    plan_as_json,
    plan_for_this_machine,
    server_environ,
    without_policy,
)
from bench.results import Measure, report_here, table
from bench.roll_outs import RerunError
from bench.servers import REPO, ServerError, common_way_server, our_server
from bench.weights import WeightsError, weights
from demo.errors import DemoError
from edgellm_server.probe import host_state

CACHE = REPO / ".cache"
RESULTS = REPO / "bench" / "results"
LOAD_DEADLINE_S = 300.0
QUIET_LOADAVG = 0.7

NOTES = (
    "Greedy, same messages and token caps for both; TTFT by edgellm_server/probe.py's definition.",
    "Ratios are of rounds measured back to back; spread is p25..p75 (lowest..highest below 4).",
    "transformers' TextIteratorStreamer gives a word out when the next one begins: the common "
    "way's first content is its second token or later, as its users see it.",
)


def progress() -> Callable[[str], None]:
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"[{minutes:2}:{seconds:02}] {line}", flush=True)

    return say


def measure_all(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """-> the report. Whatever was started is ended when this returns or raises."""
    sizes = rounds.QUICK if options.quick else rounds.Sizes()
    venv_python = common_venv(CACHE, say)
    model = weights(options.weights, CACHE, venv_python, say)
    overrides = {} if options.n_parallel is None else {"n_parallel": options.n_parallel}
    settings, plan = plan_for_this_machine(model, **overrides)
    environ, prefix = server_environ(plan, settings, model), command_prefix(plan)
    plain = without_policy(plan)
    say(f"{model.name}, {model.quantisation}; planned: {plan_as_json(plan)}")
    chosen = set(options.only or ROWS)
    measures: list[Measure] = []
    host_before = host_state()
    if (load := host_before["loadavg_1"]) is not None and load > QUIET_LOADAVG:
        say(f"this machine is busy (load {load:.1f}): the figures will say less")

    with contextlib.ExitStack() as started:
        directory = Path(started.enter_context(TemporaryDirectory(prefix="edgellm-bench-")))
        prompt = directory / "system_prompt.txt"
        prompt.write_text(prompts.SYSTEM_PROMPT)
        if "start" in chosen:
            measures += rounds.cold_start(environ, prefix, directory, sizes.cold_starts, say)
        environ["EDGELLM_SYSTEM_PROMPT_FILE"] = str(prompt)
        say("starting both servers")
        ours = started.enter_context(our_server("ours", model, environ, prefix, directory))
        ours.wait_until_ready(LOAD_DEADLINE_S)
        common_way = started.enter_context(common_way_server(model, venv_python, directory))
        common_way.wait_until_ready(LOAD_DEADLINE_S)
        bench = rounds.Bench(ours=ours, common_way=common_way, sizes=sizes, say=say)
        rows: dict[str, Callable[[], list[Measure]]] = {
            "known": lambda: rounds.known_prefix(bench),
            "cold": lambda: [m for n in (1, 3, 5, 8) for m in rounds.cold(bench, n)],
            "long": lambda: rounds.long_prompts(bench),
            "rate": lambda: rounds.rate(bench),
            "throughput": lambda: rounds.throughput(bench),
            "prefill": lambda: rounds.during_prefill(bench),
            "conversation": lambda: rounds.conversations(bench),
            "memory": lambda: rounds.memory(bench),
        }
        for server in (ours, common_way):  # torch's first requests are slow: not measured
            for number in range(2):
                ask(server, prompts.cold("warm-up", number, 4))
        for name, row in rows.items():
            if name in chosen:
                measures += row()
        if "neighbours" in chosen:
            # Later than memory: another server of ours shares the model's pages with the first.
            default = started.enter_context(
                our_server(
                    "ours, default policy",
                    model,
                    server_environ(plain, settings, model),
                    command_prefix(plain),
                    directory,
                )
            )
            default.wait_until_ready(LOAD_DEADLINE_S)
            ask(default, prompts.cold("warm-up", 0, 4))
            measures += rounds.with_neighbours(bench, default, plan.cpu_weight or 1000)
    print("\n" + table(measures), flush=True)
    return report_here(
        measures,
        about={
            "weights": model.as_json(),
            "plan": plan_as_json(plan),
            "quick": options.quick,
            "host_before": host_before,
            "host_after": host_state(),
            "common_way": {
                name: installed_version(venv_python, name)
                for name in ("torch", "transformers", "fastapi", "uvicorn")
            },
            "ours": {"xllamacpp": installed_version(Path(sys.executable), "xllamacpp")},
            "notes": list(NOTES),
        },
    )


ROWS = (
    "start",
    "known",
    "cold",
    "long",
    "rate",
    "throughput",
    "prefill",
    "conversation",
    "memory",
    "neighbours",
)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.server", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rehearsal: few rounds")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows alone")
    parser.add_argument("--weights", choices=("q4_0", "published", "small"), default="q4_0")
    parser.add_argument("--n-parallel", type=int, help="slots (default: as planned)")
    parser.add_argument("--out", type=Path, help="default: bench/results/server.json")
    return parser.parse_args(arguments)


# Of a measurement that could not be made; what was started is ended by then
FAULTS = (DemoError, LoadError, RerunError, ServerError, VenvError, WeightsError)


def write_report(told: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def end_on_sigterm() -> None:
    """SIGTERM unwinds as Ctrl-C does, so that all that was started is ended."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)


def kept(
    prog: str, measure: Callable[[Callable[[str], None]], dict[str, Any]], path: Path
) -> dict[str, Any]:
    """Measures with progress on the terminal and keeps the report. SystemExit tells a failure."""
    end_on_sigterm()
    say = progress()
    try:
        told = measure(say)
    except KeyboardInterrupt:
        say("interrupted: all that was started is ended")
        raise SystemExit(130) from None
    except FAULTS as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    write_report(told, path)
    say(f"kept in {path.relative_to(REPO) if path.is_relative_to(REPO) else path}")
    return told


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    partial = options.quick or options.only
    path = options.out or (CACHE / "bench" / "quick.json" if partial else RESULTS / "server.json")
    kept("bench.server", lambda say: measure_all(options, say), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
