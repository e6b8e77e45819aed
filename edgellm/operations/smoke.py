"""The proof: timed requests on the host itself, by the probe that ships with the server."""

from __future__ import annotations

import posixpath
from collections.abc import Generator
from dataclasses import dataclass

from pyinfra import host, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand

from edgellm import layout, recorder
from edgellm.desired import DesiredState
from edgellm.drift import Verdict, faults_of_proof
from edgellm.errors import EdgellmError
from edgellm.facts import reading
from edgellm.facts.effective import Effective
from edgellm.facts.reading import read
from edgellm.facts.service import UNIT
from edgellm.health import SmokeResult, TtftBudget, judge
from edgellm.inspection import knobs_of_running_server
from edgellm.operations.containment import connector_arguments, fail, host_operation
from edgellm.report import told


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """What to ask the server on its own host, and how long each part may take."""

    url: str
    model_name: str
    needs_key: bool
    requests: int
    max_tokens: int
    load_deadline_s: int
    first_token_deadline_s: int
    request_deadline_s: int
    budget: TtftBudget

    @property
    def command(self) -> StringCommand:
        probe = posixpath.join(layout.CURRENT, "runtime", "edgellm_server", "probe.py")
        options = {
            "--url": self.url,
            "--model": self.model_name,
            "--n": self.requests,
            "--max-tokens": self.max_tokens,
            "--load-deadline-s": self.load_deadline_s,
            "--first-token-deadline-s": self.first_token_deadline_s,
            "--request-deadline-s": self.request_deadline_s,
        }
        if self.needs_key:
            options["--api-key-file"] = layout.PROBE_KEY
        bits = [bit for name, value in options.items() for bit in (name, QuoteString(str(value)))]
        return StringCommand("python3", "-B", QuoteString(probe), *bits)

    @property
    def ends_within_s(self) -> int:
        """After all of the probe's own deadlines: only a dead link takes longer."""
        return self.load_deadline_s + (self.requests + 1) * self.request_deadline_s + 30


@host_operation()
def verified(test: SmokeTest, desired: DesiredState) -> Generator[FunctionCommand]:
    """The service answers within its budget, each of its threads as the plan says.

    Healthy: no change. Unhealthy: this host fails.
    """
    if not state.is_executing:
        return
    said = _loaded(test) if test.requests == 0 else _answered(test)
    knobs = knobs_of_running_server(desired)
    recorder.note_knobs(host, knobs)
    faults = faults_of_proof(knobs)
    if faults:
        raise EdgellmError(
            host=host.name,
            what="the running server",
            want="each of its threads on the plan's CPUs and with its policy",
            have="; ".join(faults),
            fix="take away what sets them otherwise on the host (a drop-in, taskset, chrt, a "
            "cgroup manager), then run again",
        )
    host.noop(f"release {desired.release_id}: {said}")
    yield from ()


@host_operation()
def in_order(release_id: str) -> Generator[FunctionCommand]:
    """Nothing is left that a roll-out would have put right: the host is verified."""
    if not state.is_executing:
        return
    left = told(recorder.knobs_of(host), Verdict.DRIFTED)
    if left:
        raise EdgellmError(
            host=host.name,
            what="effective state",
            want="every knob as the plan says, after the roll-out",
            have=left,
            fix="run deploys/audit.py for the details; a knob that the host cannot have can be "
            "set to another value, or to null, in group_data/ or the inventory",
        )
    recorder.note_verified(host, release_id)
    host.noop("every knob as planned, or left alone with its reason")
    yield from ()


def _loaded(test: SmokeTest) -> str:
    """Where no request is asked for, readiness is waited for all the same. Raises EdgellmError."""
    if read(Effective).service_state == "active":
        return "ready; no smoke test asked for (smoke_requests = 0)"
    ready = StringCommand("timeout", str(test.load_deadline_s), "systemctl", "start", UNIT)
    done, output = host.run_shell_command(
        ready, **{**connector_arguments(host), "_timeout": test.ends_within_s}
    )
    reading.forget_current_host()
    if not done:
        raise _unhealthy((output.stderr or f"not ready within {test.load_deadline_s} s",))
    return "ready; no smoke test asked for (smoke_requests = 0)"


def _answered(test: SmokeTest) -> str:
    """Raises EdgellmError where it did not, or not within the budget."""
    _, output = host.run_shell_command(
        test.command, **{**connector_arguments(host), "_timeout": test.ends_within_s}
    )
    lines = output.stdout_lines
    if not lines:
        raise _unhealthy((" ".join(output.stderr_lines)[:400] or "the probe printed nothing",))
    result = SmokeResult.parse(lines[-1])
    recorder.note_smoke(host, result)
    verdict = judge(result, test.budget)
    if not verdict.healthy:
        raise _unhealthy(verdict.reasons)
    return (
        f"median TTFT {result.median_ttft_ms:.0f} ms (n={result.n}), "
        f"budget {test.budget.median_ttft_ms:.0f} ms"
    )


@host_operation()
def given_up() -> Generator[FunctionCommand]:
    """Fails the host for the reason that its smoke test gave."""
    failure = recorder.failure_of(host)
    yield FunctionCommand(fail, (failure or _unhealthy(("the smoke test failed",)),), {})


def _unhealthy(reasons: tuple[str, ...]) -> EdgellmError:
    return EdgellmError(
        host=host.name,
        what="smoke test",
        want="every request answered, within the TTFT budget",
        have="; ".join(reasons),
        fix="on the host: journalctl -u edgellm -n 50; budget and deadlines are "
        "ttft_budget_ms, load_deadline_s, first_token_deadline_s, request_deadline_s",
    )
