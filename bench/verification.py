"""python -m bench.verification: what a verification costs, and what a Ctrl-C leaves of a report.

Boots hosts on this machine and rolls out to them. Then deploys/verify.py with its default of
requests: the time of the whole run, beside waiting for the server and asking it. Then roll-outs
that are interrupted at moments drawn at random: whether each leaves all files of its report, whole
and true to what the hosts are like. The hosts are taken down at the end.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from bench.rerun import settle
from bench.results import Bar, Measure, report_here, table
from bench.roll_outs import RUN_DEADLINE_S, Finished, RerunError, RollOuts, tail
from bench.server import CACHE, RESULTS, kept
from bench.servers import REPO
from bench.stats import Summary, summary
from bench.weights import Say
from demo.fleet import Fleet
from edgellm.report import EXIT_BY_SIGNAL
from edgellm.reports import schema

HOSTS = 4
FLEET = "verification"
SSH_BASE_PORT = 28010
HTTP_BASE_PORT = 28110
DEFAULT_REQUESTS = ("--data", "smoke_requests=5", "--data", "smoke_max_tokens=24")
# Each roll-out has something to do: it goes to another release than the one before
RELEASES = (("--data", "n_ctx=1024"), ("--data", "n_ctx=2048"))
FILES = ("fleet.json", "fleet.html", "fleet.prom", "junit.xml")
DONE = re.compile(r"^\s*\[(\S+)\] Success", re.MULTILINE)  # pyinfra, of an operation that changed

ONE = Bar(key="overhead_s", label="deploys/verify.py beside waiting and asking, 1 host, s", limit=3)
ALL = Bar(key="overhead_all_s", label=f"the same, {HOSTS} hosts at once, s", limit=3)
INTERRUPTED = Bar(
    key="interrupted_whole",
    label="reports whole and true after kill -INT at random",
    limit=1,
    sense="at_least",
)
NOTES = (
    "Hosts and control machine are one machine: hosts that are asked at once share its cores.",
    "Beside waiting and asking: of several hosts, beside that of the one that took longest.",
)


def overhead(ours: RollOuts, bar: Bar, runs: int, *limit: str) -> Measure:
    """Raises RerunError where a run finds a host that is not ok."""
    over_s, asked_s, wall_s = [], [], []
    for _ in range(runs):
        done = ours.run(*DEFAULT_REQUESTS, *limit, deploy="verify")
        if done.exit_code != 0:
            raise RerunError(f"deploys/verify.py: exit {done.exit_code}\n{tail(done.output)}")
        smokes = [host["smoke"] for host in ours.report()["hosts"]]
        each_s = [(smoke["wall_ms"] - smoke["overhead_ms"]) / 1000 for smoke in smokes]
        over_s.append(done.wall_s - max(each_s))
        asked_s.append(sum(each_s))
        wall_s.append(done.wall_s)
    return Measure(
        bar=bar,
        summary=summary(over_s),
        details={
            "run_s": statistics.median(wall_s),
            "asked_s_of_all_hosts": statistics.median(asked_s),
        },
    )


def interrupted_run(ours: RollOuts, after_s: float, *arguments: str) -> Finished:
    """A roll-out that gets a Ctrl-C, unless it ends before. Raises RerunError where it hangs."""
    log = ours.folder / "interrupted.log"
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            ours.command(*arguments),
            cwd=REPO,
            env=ours.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            try:
                process.wait(after_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            code = process.wait(RUN_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise RerunError(f"still running after a Ctrl-C at {after_s:.1f} s") from None
        finally:
            process.kill()
            process.wait()
    return Finished(
        exit_code=code,
        output=log.read_text(errors="replace"),
        wall_s=time.monotonic() - began,
        cpu_s=0.0,
    )


def faults_of(ours: RollOuts, done: Finished, latest_before: str | None) -> list[str]:
    """What is not as it should be with what an interrupted run has left."""
    if done.exit_code != EXIT_BY_SIGNAL["SIGINT"]:
        return [f"exit {done.exit_code}: {tail(done.output, 3)}"]
    latest = latest_of(ours)
    if latest == latest_before:
        return [f"no report: {tail(done.output, 3)}"]
    faults = ["a traceback"] if "Traceback" in done.output else []
    for name in FILES:
        try:
            text = (ours.reports / "latest" / name).read_text()
            if name == "junit.xml":
                ElementTree.fromstring(text)
            elif name == "fleet.html" and not text.rstrip().endswith("</html>"):
                faults.append(f"{name}: cut")
            elif not text:
                faults.append(f"{name}: empty")
        except (OSError, ElementTree.ParseError) as error:
            faults.append(f"{name}: {error}")
    names = [host.name for host in ours.fleet.hosts]
    releases = {name: current_release(ours, name) for name in names}
    return [*faults, *untrue(schema.check(ours.report()), releases, done.output)]


def untrue(found: schema.Fleet, releases: Mapping[str, str], output: str) -> list[str]:
    """Where a report differs from what pyinfra printed, and from what each host has now."""
    if sorted(host.name for host in found.hosts) != sorted(releases):
        return [f"tells of {', '.join(host.name for host in found.hosts)} alone"]
    faults = []
    if found.interrupted_by != "SIGINT":
        faults.append(f"interrupted_by {found.interrupted_by}")
    printed = DONE.findall(output)
    for host in found.hosts:
        # The line is printed after the operation is noted, and the signal may come between
        if not 0 <= len(host.changed) - printed.count(host.name) <= 1:
            faults.append(f"{host.name}: {len(host.changed)} changes of {printed.count(host.name)}")
        if host.status is schema.Status.OK and host.release != releases[host.name]:
            faults.append(f"{host.name}: ok with {host.release}, has {releases[host.name]}")
        if host.status not in (schema.Status.OK, schema.Status.PENDING):
            faults.append(f"{host.name}: {host.status.value}, {host.reason}")
    return faults


def current_release(ours: RollOuts, name: str) -> str:
    (host,) = [host for host in ours.fleet.hosts if host.name == name]
    return (
        ours.fleet.exec(host, "readlink", "/opt/edgellm/current").stdout.strip().rpartition("/")[2]
    )


def latest_of(ours: RollOuts) -> str | None:
    link = ours.reports / "latest"
    return link.resolve().name if link.is_symlink() else None


def interruptions(ours: RollOuts, n: int, seed: int, say: Say) -> Measure:
    """The moments: from where the inventory is read to the end of an uninterrupted run."""
    chance = random.Random(seed)
    settle(ours.fleet)
    whole, _ = ours.run_well(*RELEASES[1])
    bad: dict[str, Any] = {}
    statuses: dict[str, int] = {}
    moments_s: list[float] = []
    ended = 0
    while len(moments_s) < n:
        if ended > n:
            raise RerunError("most runs end before their Ctrl-C")
        after_s = chance.uniform(0.8, whole.wall_s)
        before = latest_of(ours)
        release = RELEASES[(len(moments_s) + ended) % len(RELEASES)]
        done = interrupted_run(ours, after_s, *release)
        if done.exit_code == 0:
            ended += 1  # a run may be quicker than the one that was timed
            continue
        moments_s.append(round(after_s, 2))
        faults = faults_of(ours, done, before)
        if faults:
            bad[f"{after_s:.2f} s"] = faults
        else:
            for host in ours.report()["hosts"]:
                statuses[host["status"]] = statuses.get(host["status"], 0) + 1
        say(f"Ctrl-C after {after_s:.1f} of {whole.wall_s:.1f} s: {'; '.join(faults) or 'whole'}")
    share = 1 - len(bad) / n
    ours.run_well(*RELEASES[0])  # what was begun can be ended
    return Measure(
        bar=INTERRUPTED,
        summary=Summary(value=share, n=n, spread=(share, share)),
        details={
            "moments_s": moments_s,
            "whole_run_s": whole.wall_s,
            "hosts_by_status": statuses,
            "faults": bad,
            "seed": seed,
        },
    )


def measure_all(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """-> the report. The fleet is down when this returns or raises."""
    fleet = Fleet(FLEET, HOSTS, ssh_base_port=SSH_BASE_PORT, http_base_port=HTTP_BASE_PORT, say=say)
    fleet.down()
    with TemporaryDirectory(prefix="edgellm-verification-") as folder:
        try:
            say(f"booting {HOSTS} hosts")
            fleet.up()
            ours = RollOuts(fleet=fleet, folder=Path(folder))
            say("the first roll-out")
            ours.run_well(*RELEASES[0])
            settle(fleet)
            measures = []
            for bar, limit in ((ONE, ("--limit", fleet.hosts[0].name)), (ALL, ())):
                arguments = (*RELEASES[0], *limit)
                measures.append(overhead(ours, bar, options.runs, *arguments))
                say(f"{bar.label}: {measures[-1].as_json()['value']}")
            measures.append(interruptions(ours, options.interruptions, options.seed, say))
        finally:
            say("taking the hosts down")
            fleet.down()
    print("\n" + table(measures), flush=True)
    return report_here(
        measures,
        about={"hosts": HOSTS, "requests": 5, "notes": list(NOTES)},
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.verification", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each verification (default: 5)")
    parser.add_argument("--interruptions", type=int, default=20, help="default: 20")
    parser.add_argument("--seed", type=int, default=5, help="of the moments (default: 5)")
    parser.add_argument("--out", type=Path, help="default: bench/results/verification.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    whole = options.runs >= 5 and options.interruptions >= 20
    directory = RESULTS if whole else CACHE / "bench"
    path = options.out or directory / "verification.json"
    told = kept("bench.verification", lambda say: measure_all(options, say), path)
    return 0 if all(m["met"] for m in told["measures"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
