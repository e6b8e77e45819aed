"""What the YAML cases are written in: `!ServiceState {active: true, …}`, plans and their effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from pyinfra.api import StringCommand
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import ctx_host, ctx_state

from edgellm import recorder
from edgellm.cpuset import CpuSet
from edgellm.facts.account import AccountState
from edgellm.facts.cores import SliceCpus
from edgellm.facts.installed import InstallDir, InstalledRelease
from edgellm.facts.paths import PathState
from edgellm.facts.service import ServiceState, UnitsState
from edgellm.facts.upstream import UpstreamState
from edgellm.facts.zram import OwnZramState
from edgellm.observed import EffectiveState
from edgellm.operations.paths import HostDirectory, HostFile
from edgellm.tuning import TuningPlan, ZramPlan, plan_tuning
from tests.rolled_out import Case, processes_in_order, rolled_out, settings_of
from tests.rolled_out import board as profile_of

# pyinfra-testing imports pyinfra_cli, and that swaps threads and sockets of the whole process for
# gevent's. The server's tests in the same process need the real ones.
with patch("gevent.monkey.patch_all"):
    import pyinfra_cli  # noqa: F401
    from pyinfra_testing.util import FakeHost, FakeState

TAGGED = (
    AccountState,
    CpuSet,
    HostDirectory,
    HostFile,
    InstallDir,
    InstalledRelease,
    OwnZramState,
    PathState,
    ServiceState,
    SliceCpus,
    UnitsState,
    UpstreamState,
    ZramPlan,
)


def _constructor(kind: type) -> Any:
    tuples = {f.name for f in fields(kind) if str(f.type).startswith("tuple")}

    def construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Any:
        values = loader.construct_mapping(node, deep=True)
        return kind(
            **{str(key): tuple(value) if key in tuples else value for key, value in values.items()}
        )

    return construct


def planned(board: str, **settings: Any) -> TuningPlan:
    """What a board of tests/hardware is planned with these settings."""
    return plan_tuning(profile_of(board), settings_of(**settings))


def in_force(
    plan: TuningPlan,
    *,
    running: bool = True,
    policy: str | None = None,
    slice_cpus: str | None = None,
    left_over: str | None = None,
    drop_ins: Iterable[str] = (),
    realtime_confirmed: str | None = None,
    realtime_trial: str | None = None,
) -> EffectiveState:
    """An N100 whose server runs as planned, but for what is given.

    `running`: False where it has no process. `policy`: of one of its threads. `slice_cpus`: what
    `systemctl set-property` has made of the slice's AllowedCPUs, and with it of every thread.
    `left_over`: what the slice's own cpuset.cpus has, though systemd has no AllowedCPUs.
    """
    found = rolled_out(Case(board="n100")).in_force(
        processes=processes_in_order(plan),
        foreign_drop_ins=tuple(drop_ins),
        realtime_confirmed=realtime_confirmed,
        realtime_trial=realtime_trial,
    )
    if policy is not None:
        found = found.threaded(1, policy=policy, priority=0)
    if slice_cpus is not None:
        cpus = CpuSet.parse(slice_cpus)
        found = found.threaded(cpus=cpus).sliced(allowed_cpus=cpus, effective_cpus=cpus)
    if left_over is not None:
        found = found.sliced(allowed_cpus=None, own_cpus=CpuSet.parse(left_over))
    if not running:
        found = found.in_force(service_state="inactive", main_pid=None, processes=())
    return found.effective


def _called(function: Callable[..., Any]) -> Any:
    def construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Any:
        return function(**{str(k): v for k, v in loader.construct_mapping(node, deep=True).items()})

    return construct


# pyinfra-testing reads its cases by yaml.safe_load
for _kind in TAGGED:
    yaml.SafeLoader.add_constructor(f"!{_kind.__name__}", _constructor(_kind))
# `plan: &plan !Planned {board: n100, threads: 2}`, and `!InForce {plan: *plan, policy: other}`
yaml.SafeLoader.add_constructor("!Planned", _called(planned))
yaml.SafeLoader.add_constructor("!InForce", _called(in_force))


class ScriptedHost(FakeHost):  # type: ignore[misc]  # pyinfra-testing is not typed
    """A host whose commands are answered from a list, in order.

    An answer is a JSON object (one line), a list of lines of standard output, a tuple of lines of
    standard error of a command that failed, or an exception to raise.
    """

    def __init__(self, facts: dict[str, Any] | None = None, answers: Iterable[Any] = ()):
        super().__init__(FakeState(), "pi5-01", facts or {}, {})
        self.answers = list(answers)
        self.commands: list[StringCommand] = []
        self.timeouts_s: list[float | None] = []
        self.lines: list[str] = []
        self.connector: Any = SimpleNamespace()

    def run_shell_command(
        self, command: StringCommand, **arguments: Any
    ) -> tuple[bool, CommandOutput]:
        self.commands.append(command)
        self.timeouts_s.append(arguments.get("_timeout"))
        assert self.answers, f"one command more than scripted: {command}"
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        stream = "stderr" if isinstance(answer, tuple) else "stdout"
        lines = [json.dumps(answer)] if isinstance(answer, dict) else list(answer)
        return stream == "stdout", CommandOutput([OutputLine(stream, line) for line in lines])

    def log(self, message: str, *_: Any) -> None:
        self.lines.append(message)

    def log_styled(self, message: str, **_: Any) -> None:
        self.lines.append(message)


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> recorder.Run:
    """The recorder's notes of this test alone."""
    run = recorder.Run()
    monkeypatch.setattr(recorder, "_run", run)
    return run


@pytest.fixture
def scripted_host() -> type[ScriptedHost]:
    return ScriptedHost


@pytest.fixture
def commands_of() -> Callable[..., list[Any]]:
    """commands_of(operation, host, **arguments): what it yields there, outside of a run."""

    def collect(
        operation: Any, host: ScriptedHost, *, executing: bool = False, **arguments: Any
    ) -> list[Any]:
        host.state.is_executing = executing
        with ctx_state.use(host.state), ctx_host.use(host):
            return list(operation._inner(**arguments))

    return collect


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., TuningPlan]:
    """plan_of("n100", threads=2): that board's plan with these settings."""
    return planned


@pytest.fixture(scope="session")
def effect_of() -> Callable[..., EffectiveState]:
    """effect_of(plan, policy="other"): a server that runs as planned, but for this."""
    return in_force
