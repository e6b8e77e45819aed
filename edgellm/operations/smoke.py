"""The proof: timed requests on the host itself, by the probe that ships with the server."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand

from edgellm import layout, recorder
from edgellm.desired import DesiredState
from edgellm.drift import Verdict, faults_of_proof
from edgellm.errors import EdgellmError
from edgellm.facts import reading
from edgellm.facts.effective import Effective
from edgellm.facts.reading import read
from edgellm.facts.service import UNIT, Service
from edgellm.health import SmokeResult, TtftBudget, judge, seen_from_elsewhere
from edgellm.inspection import knobs_of_running_server
from edgellm.operations.containment import connector_arguments, fail, host_operation
from edgellm.operations.control_view import NotSeenError, ask_from_here
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
    stall_deadline_s: int
    request_deadline_s: int
    budget: TtftBudget
    concurrency: int = 1
    kernel: str | None = None  # named where the host is slower than under another
    from_control: bool = False
    probe_key: str | None = field(default=None, repr=False)  # for asking from the control machine

    @property
    def options(self) -> tuple[str, ...]:
        """The probe's, wherever it runs."""
        options = {
            "--model": self.model_name,
            "--n": self.requests,
            "--max-tokens": self.max_tokens,
            "--load-deadline-s": self.load_deadline_s,
            "--first-token-deadline-s": self.first_token_deadline_s,
            "--stall-deadline-s": self.stall_deadline_s,
            "--request-deadline-s": self.request_deadline_s,
        }
        if self.concurrency > 1:
            options["--concurrency"] = self.concurrency
        return tuple(bit for name, value in options.items() for bit in (name, str(value)))

    @property
    def command(self) -> StringCommand:
        probe = posixpath.join(layout.CURRENT, "runtime", "edgellm_server", "probe.py")
        options = ["--url", self.url, *self.options]
        if self.needs_key:
            options += ["--api-key-file", layout.PROBE_KEY]
        return StringCommand("python3", "-B", QuoteString(probe), *map(QuoteString, options))

    @property
    def ends_within_s(self) -> int:
        """After all of the probe's own deadlines: only a dead link takes longer."""
        rounds = math.ceil(self.requests / self.concurrency) if self.concurrency > 1 else 0
        asked = 2 * self.requests + 2 + rounds
        return self.load_deadline_s + asked * self.request_deadline_s + 30

    @property
    def all_ends_within_s(self) -> int:
        """With what is asked from the control machine."""
        return self.ends_within_s * (2 if self.from_control else 1)


@host_operation()
def verified(test: SmokeTest, desired: DesiredState) -> Generator[FunctionCommand]:
    """The service answers within its budget, each of its threads as the plan says.

    Healthy: no change. Unhealthy: this host fails.
    """
    if state.is_executing:
        yield from _proven(test, desired)


def _proven(test: SmokeTest, desired: DesiredState) -> Generator[FunctionCommand]:
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
def asked(test: SmokeTest, desired: DesiredState) -> Generator[FunctionCommand]:
    """As `verified`, of a host that is found as it is: nothing on it is started for the question.

    Other knobs that are off do not fail it: they are noted, and its status says so.
    """
    if not state.is_executing:
        return
    found = read(Service)
    if found.current_release is None or not found.active:
        never = found.current_release is None
        raise EdgellmError(
            host=host.name,
            what="the service",
            want="one that runs",
            have="never rolled out to" if never else f"release {found.current_release}, not active",
            fix="run deploys/qwen.py"
            if never
            else "on the host: journalctl -u edgellm -n 50; deploys/qwen.py starts it again",
        )
    yield from _proven(test, desired)
    recorder.note_verified(host, found.running_release or found.current_release)


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
        raise _unanswered(output.stderr_lines)
    result = SmokeResult.parse(lines[-1])
    recorder.note_smoke(host, result)
    verdict = judge(result, test.budget, kernel=test.kernel)
    seen = None
    # An unhealthy host is rolled back, and should not wait for an answer that changes nothing
    if test.from_control and verdict.healthy:
        seen, warnings = _seen_from_here(test)
        verdict = replace(verdict, warnings=(*verdict.warnings, *warnings))
    recorder.note_verdict(host, verdict)
    for warning in verdict.warnings:
        host.log(warning, logger.warning)
    if not verdict.healthy:
        raise _unhealthy(verdict.reasons)
    from_here = ""
    if seen is not None and seen.median_ttft_ms is not None:
        from_here = f", {seen.median_ttft_ms:.0f} ms as seen from the control machine"
    return (
        f"median TTFT {result.median_ttft_ms:.0f} ms (n={result.n}){from_here}, "
        f"budget {test.budget.median_ttft_ms:.0f} ms"
    )


def _seen_from_here(test: SmokeTest) -> tuple[SmokeResult | None, tuple[str, ...]]:
    """What the control machine sees, and what is to be said of it: it fails no release, which the
    way to the host is no part of."""
    try:
        seen = ask_from_here(
            host, test.url, test.options, api_key=test.probe_key, within_s=test.ends_within_s
        )
    except NotSeenError as error:
        return None, (f"not seen from the control machine: {error}",)
    recorder.note_from_control(host, seen)
    return seen, seen_from_elsewhere(seen)


@host_operation()
def given_up() -> Generator[FunctionCommand]:
    """Fails the host for the reason that its smoke test gave."""
    failure = recorder.failure_of(host)
    yield FunctionCommand(fail, (failure or _unhealthy(("the smoke test failed",)),), {})


def _unanswered(said: Sequence[str]) -> EdgellmError:
    """Of a probe that printed no result."""
    _, unknown, options = " ".join(said[-1:]).partition("unrecognized arguments: ")
    if unknown:  # by argparse: deploys/verify.py asks with the probe of the release that runs
        return EdgellmError(
            host=host.name,
            what="smoke test",
            want="a probe on the host that knows what this edgellm asks",
            have=f"that of an older release, which refuses {options}",
            fix="run deploys/qwen.py: it brings the probe of this edgellm",
        )
    return _unhealthy((" ".join(said)[:400] or "the probe printed nothing",))


def _unhealthy(reasons: tuple[str, ...]) -> EdgellmError:
    return EdgellmError(
        host=host.name,
        what="smoke test",
        want="every request answered, within the TTFT budget",
        have="; ".join(reasons),
        fix="on the host: journalctl -u edgellm -n 50; budget and deadlines are "
        "ttft_budget_ms, load_deadline_s, first_token_deadline_s, request_deadline_s",
    )
