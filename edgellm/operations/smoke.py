"""The proof: timed requests on the host itself, by the probe that ships with the server."""

from __future__ import annotations

import posixpath
from collections.abc import Generator
from dataclasses import dataclass

from pyinfra import host, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand

from edgellm import layout, recorder
from edgellm.errors import EdgellmError
from edgellm.health import SmokeResult, TtftBudget, judge
from edgellm.operations.containment import connector_arguments, fail, host_operation


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
def verified(test: SmokeTest, release_id: str) -> Generator[FunctionCommand]:
    """The service answers within its budget. Healthy: no change. Unhealthy: this host fails."""
    if not state.is_executing:
        return
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
        yield FunctionCommand(fail, (_unhealthy(verdict.reasons),), {})
        return
    recorder.note_verified(host, release_id)
    host.noop(
        f"release {release_id}: median TTFT {result.median_ttft_ms:.0f} ms "
        f"(n={result.n}), budget {test.budget.median_ttft_ms:.0f} ms"
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
