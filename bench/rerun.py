"""python -m bench.rerun: what an unchanged roll-out costs, and whether drift is found and repaired.

Boots eight hosts on this machine, rolls out to them, and measures in turns: deploys/qwen.py with
nothing to change, and the same tasks in Ansible (bench/ansible/). Then drifts are injected, named
by deploys/audit.py and repaired by deploys/qwen.py. The hosts are taken down at the end. Prints
the table and keeps it in bench/results/rerun.json; --quick is a rehearsal and keeps nothing there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import plan_cost
from bench.ansible_way import AnsibleWay, ansible_python
from bench.common_venv import installed_version
from bench.drifts import DRIFTS, Drift, is_named, not_in_order, rounds
from bench.results import Bar, Measure, report_here, table
from bench.roll_outs import ExecChannels, Finished, RerunError, RollOuts, tail
from bench.server import CACHE, RESULTS, kept
from bench.stats import Summary, pair_ratios, side, summary
from bench.weights import Say
from demo.fleet import Fleet
from edgellm_server.probe import host_state

HOSTS = 8
UNTOUCHED = 2
FLEET = "rerun"
SSH_BASE_PORT = 27010
HTTP_BASE_PORT = 27110
WITHOUT_SMOKE_TEST = ("--data", "smoke_requests=0")
AUDIT_IN_ORDER, AUDIT_DRIFTED = 0, 2
SETTLED_WITHIN_S = 180.0

NAMED = Bar(key="drifts_named", label="injected drifts: named by audit", limit=1, sense="at_least")
REPAIRED = Bar(key="drifts_repaired", label="injected drifts: repaired", limit=1, sense="at_least")
FALSE_ALARMS = Bar(key="false_alarms", label="knobs named, or changed, on untouched hosts", limit=0)
ROUND_TRIPS = Bar(key="round_trips", label="round trips of an unchanged run, a host", limit=12)
UNCHANGED = Bar(key="unchanged_run_s", label=f"unchanged run, {HOSTS} hosts, s", limit=4)
RATIO = Bar(key="ansible_ratio", label="times faster than Ansible", limit=8, sense="at_least")

NOTES = (
    "Hosts and control machine are one machine: what runs on the hosts takes its cores too.",
    "Ratios are of pairs measured back to back; spread is p25..p75 (lowest..highest below 4).",
    "Ansible gets each host's plan and files ready made; ours probes, plans and renders each time.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both sides' unchanged run, one right after the other, and the commands sshd was asked for."""

    ours: Finished
    ansible: Finished
    our_trips: int
    ansible_trips: int


def measure_all(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """-> the report. The fleet is down when this returns or raises."""
    n_pairs = 2 if options.quick else options.pairs
    host_before = host_state()
    python = ansible_python(CACHE, say)
    fleet = Fleet(FLEET, HOSTS, ssh_base_port=SSH_BASE_PORT, http_base_port=HTTP_BASE_PORT, say=say)
    fleet.down()
    with TemporaryDirectory(prefix="edgellm-rerun-") as folder:
        try:
            say(f"booting {HOSTS} hosts")
            fleet.up()
            ours = RollOuts(fleet=fleet, folder=Path(folder))
            say("the first roll-out")
            done, _ = ours.run_well()
            say(f"done in {done.wall_s:.0f} s")
            releases = {record["name"]: record["release"] for record in ours.report()["hosts"]}
            ansible = AnsibleWay(python=python, fleet=fleet, folder=Path(folder))
            items = ansible.prepare(releases, CACHE)
            pairs = unchanged_runs(ours, ansible, n_pairs, say)
            measures = judged(pairs)
            if options.drifts:
                measures = [*drifts(ours, say), *measures]
        finally:
            say("taking the hosts down")
            fleet.down()
    say("planning for 1,000 hosts")
    measures.append(plan_cost.measure(plan_cost.HOSTS))
    print("\n" + table(measures, other="Ansible"), flush=True)
    return report_here(
        measures,
        about={
            "quick": options.quick,
            "hosts": HOSTS,
            "seen_to_a_host": items,
            "first_roll_out_s": round(done.wall_s, 1),
            "host_before": host_before,
            "host_after": host_state(),
            "pyinfra": installed_version(Path(sys.executable), "pyinfra"),
            "common_way": {"ansible-core": installed_version(python, "ansible-core")},
            "notes": list(NOTES),
        },
    )


def unchanged_runs(ours: RollOuts, ansible: AnsibleWay, n_pairs: int, say: Say) -> list[Pair]:
    """Neither side always goes first. Raises RerunError where either finds something to change."""
    settle(ours.fleet)
    channels = ExecChannels(fleet=ours.fleet, host=ours.fleet.hosts[0])
    channels.start()
    say("once each, unmeasured: Ansible may still put right what it sees otherwise")
    ansible.run()
    ours.run_unchanged(*WITHOUT_SMOKE_TEST)

    def counted(run: Callable[[], Finished]) -> tuple[Finished, int]:
        before = channels.total()
        return run(), channels.total() - before

    def run_ours() -> Finished:
        return ours.run_unchanged(*WITHOUT_SMOKE_TEST)

    pairs = []
    for number in range(n_pairs):
        if number % 2 == 0:
            mine, my_trips = counted(run_ours)
            other, other_trips = counted(ansible.run_unchanged)
        else:
            other, other_trips = counted(ansible.run_unchanged)
            mine, my_trips = counted(run_ours)
        pairs.append(Pair(ours=mine, ansible=other, our_trips=my_trips, ansible_trips=other_trips))
        say(
            f"pair {number + 1} of {n_pairs}: {mine.wall_s:.2f} s in {my_trips} round trips, "
            f"Ansible {other.wall_s:.1f} s in {other_trips}"
        )
    return pairs


def judged(pairs: Sequence[Pair]) -> list[Measure]:
    our_s = [pair.ours.wall_s for pair in pairs]
    ansible_s = [pair.ansible.wall_s for pair in pairs]
    return [
        Measure(
            bar=ROUND_TRIPS,
            summary=summary([pair.our_trips for pair in pairs]),
            unit="",
            ours=side([pair.our_trips for pair in pairs]),
            common_way=side([pair.ansible_trips for pair in pairs]),
        ),
        Measure(
            bar=UNCHANGED,
            summary=summary(our_s),
            details={
                "each_s": [round(value, 2) for value in our_s],
                "control_cpu_s": statistics.median(pair.ours.cpu_s for pair in pairs),
            },
        ),
        Measure(
            bar=RATIO,
            summary=summary(pair_ratios(ansible_s, our_s)),
            unit="s",
            ours=side(our_s),
            common_way=side(ansible_s),
            details={
                "each_s": [round(value, 2) for value in ansible_s],
                "control_cpu_s": statistics.median(pair.ansible.cpu_s for pair in pairs),
            },
        ),
    ]


@dataclass(slots=True, kw_only=True)
class Found:
    """What came of the injected drifts; filled in as the rounds go."""

    injected: list[str]
    not_named: list[str]
    not_repaired: list[str]
    false_alarms: list[str]


def drifts(ours: RollOuts, say: Say) -> list[Measure]:
    """Rounds of: inject, audit, roll out, audit."""
    names = [host.name for host in ours.fleet.hosts]
    found = Found(injected=[], not_named=[], not_repaired=[], false_alarms=[])
    settle(ours.fleet)
    for host, knobs in audit(ours).items():
        found.false_alarms += [f"{host}, before any drift: {knob}" for knob in knobs]
    for number, drifted in enumerate(rounds(DRIFTS, names, UNTOUCHED), start=1):
        say(f"drifts, round {number}: {'; '.join(drift.what for drift in drifted.values())}")
        drift_round(ours, drifted, found)
    for what, faults in (
        ("not named", found.not_named),
        ("not repaired", found.not_repaired),
        ("false alarm", found.false_alarms),
    ):
        for fault in faults:
            say(f"{what}: {fault}")
    n = len(found.injected)

    def share(bar: Bar, faults: Sequence[str]) -> Measure:
        value = 1 - len(faults) / n
        return Measure(
            bar=bar,
            summary=Summary(value=value, n=n, spread=(value, value)),
            details={"injected": found.injected, "missed": list(faults)},
        )

    alarms = len(found.false_alarms)
    return [
        share(NAMED, found.not_named),
        share(REPAIRED, found.not_repaired),
        Measure(
            bar=FALSE_ALARMS,
            summary=Summary(value=alarms, n=n, spread=(alarms, alarms)),
            details={"untouched_hosts": UNTOUCHED, "alarms": found.false_alarms},
        ),
    ]


def drift_round(ours: RollOuts, drifted: dict[str, Drift], found: Found) -> None:
    for host, drift in drifted.items():
        ours.fleet.exec(host, "sh", "-c", drift.command, timeout_s=SETTLED_WITHIN_S)
        found.injected.append(drift.what)
    settle(ours.fleet)
    named = audit(ours)
    _, changes = ours.run_well(*WITHOUT_SMOKE_TEST)
    settle(ours.fleet)
    left = audit(ours)
    for host, knobs in named.items():
        if host not in drifted:
            found.false_alarms += [f"{host}: {knob}" for knob in knobs]
            found.false_alarms += [f"{host} changed: {name}" for name in changes[host]]
            found.false_alarms += [f"{host}, afterwards: {knob}" for knob in left[host]]
            continue
        drift = drifted[host]
        if not is_named(drift, knobs):
            found.not_named.append(f"{drift.what} ({host}): named {knobs}")
        if left[host] or not changes[host]:
            found.not_repaired.append(
                f"{drift.what} ({host}): changed {changes[host]}, still off {left[host]}"
            )


def audit(ours: RollOuts) -> dict[str, list[str]]:
    """Host -> knobs that are not in order. Raises RerunError where audit could not do its work."""
    done = ours.run(deploy="audit")
    if done.exit_code not in (AUDIT_IN_ORDER, AUDIT_DRIFTED):
        raise RerunError(f"audit: exit {done.exit_code}\n{tail(done.output)}")
    knobs = not_in_order(ours.report())
    if knobs.keys() != {host.name for host in ours.fleet.hosts}:
        raise RerunError(f"the audit tells of {sorted(knobs)} alone")
    if (done.exit_code == AUDIT_IN_ORDER) != (not any(knobs.values())):
        raise RerunError(f"audit: exit {done.exit_code} does not fit what it named: {knobs}")
    return knobs


def settle(fleet: Fleet) -> None:
    """Until no service is loading (systemd is told when it is ready). Raises RerunError."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    for host in fleet.hosts:
        while True:
            said = fleet.exec(host, "systemctl", "is-active", "edgellm", check=False).stdout.strip()
            if said in ("active", "inactive", "failed"):
                break
            if time.monotonic() > deadline:
                raise RerunError(f"{host.name}: still {said} after {SETTLED_WITHIN_S:.0f} s")
            time.sleep(0.5)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rerun", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rehearsal: two pairs")
    parser.add_argument("--pairs", type=int, default=7, help="of unchanged runs (default: 7)")
    parser.add_argument(
        "--no-drifts", dest="drifts", action="store_false", help="time unchanged runs alone"
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/rerun.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    partial = options.quick or not options.drifts
    path = options.out or (CACHE / "bench" / "rerun.json" if partial else RESULTS / "rerun.json")
    told = kept("bench.rerun", lambda say: measure_all(options, say), path)
    return 0 if all(m["met"] for m in told["measures"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
