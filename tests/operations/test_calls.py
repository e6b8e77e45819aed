"""Operations that run code of ours on the control machine: what they call, and what they say."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import SSHException
from pyinfra.api import FunctionCommand, StringCommand
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host

from edgellm import layout, recorder
from edgellm.cpuset import CpuSet
from edgellm.drift import Verdict, compare
from edgellm.errors import EdgellmError
from edgellm.facts.effective import Effective
from edgellm.facts.service import ServiceState
from edgellm.facts.upstream import UpstreamState
from edgellm.hardware import HostProfile
from edgellm.health import LastGood, SmokeResult, TtftBudget
from edgellm.operations import (
    cores,
    kernel,
    model,
    paths,
    record,
    runtime,
    service,
    smoke,
    upstream,
    zram,
)
from edgellm.operations.containment import contained_call, fail, host_operation
from edgellm.operations.control_view import NotSeenError
from edgellm.operations.paths import HostFile
from edgellm.operations.runtime import place
from edgellm.operations.smoke import SmokeTest
from edgellm.operations.transfer import Transfer, send
from edgellm.tuning import ZramPlan
from tests.rolled_out import Case, RolledOut, rolled_out

Commands = Callable[..., list[Any]]
SHA256 = "ab" * 32
MODEL = Transfer(
    label="model m",
    source=Path("m.gguf"),
    path=f"/opt/edgellm/models/{SHA256}.gguf",
    sha256=SHA256,
    size_bytes=428_730_208,
    deadline_s=3600,
)
RUNTIME_DIRECTORY = "/opt/edgellm/runtimes/rt-1"
RUNTIME = Transfer(
    label="runtime rt-1",
    source=Path("rt-1.tar.gz"),
    path=f"{RUNTIME_DIRECTORY}.tar.gz",
    sha256=SHA256,
    size_bytes=34_000_000,
    deadline_s=3600,
)


def artifacts(*, models: dict[str, str], runtimes: dict[str, str], whole: bool) -> dict[str, Any]:
    (path,) = {**models, **runtimes}
    return {"paths.ArtifactsWhole": {f"models={models}, runtimes={runtimes}": {path: whole}}}


def call_of(command: FunctionCommand) -> tuple[Any, ...]:
    assert command.function is contained_call
    assert command.kwargs == {}
    return tuple(command.args)


def failure_of(commands: list[Any]) -> EdgellmError:
    """The error of the one command that fails the host."""
    (command,) = commands
    assert isinstance(command, FunctionCommand)
    assert command.function is fail
    (error,) = command.args
    assert isinstance(error, EdgellmError)
    return error


# The model


def test_a_model_that_was_verified_there_is_neither_sent_nor_read(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host(artifacts(models={MODEL.path: SHA256}, runtimes={}, whole=True))
    assert commands_of(model.present, host, transfer=MODEL) == []
    assert host.noop_description == f"{MODEL.path} already verified"


def test_a_model_that_is_not_there_is_sent(scripted_host: Any, commands_of: Commands) -> None:
    host = scripted_host(artifacts(models={MODEL.path: SHA256}, runtimes={}, whole=False))
    (command,) = commands_of(model.present, host, transfer=MODEL)
    assert call_of(command) == (send, (MODEL, {}))


def test_the_model_is_sent_with_the_operations_own_sudo(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host(artifacts(models={MODEL.path: SHA256}, runtimes={}, whole=False))
    host.current_op_global_arguments = {"_sudo": True, "_if": None, "name": "Model"}
    (command,) = commands_of(model.present, host, transfer=MODEL)
    assert call_of(command) == (send, (MODEL, {"_sudo": True}))


# The runtime


def test_a_complete_runtime_is_neither_sent_nor_unpacked(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host(artifacts(models={}, runtimes={RUNTIME_DIRECTORY: "rt-1"}, whole=True))
    found = commands_of(
        runtime.present,
        host,
        transfer=RUNTIME,
        directory=RUNTIME_DIRECTORY,
        runtime_id="rt-1",
    )
    assert found == []
    assert host.noop_description == f"{RUNTIME_DIRECTORY} already complete"


def test_a_runtime_that_is_not_whole_is_placed(scripted_host: Any, commands_of: Commands) -> None:
    host = scripted_host(artifacts(models={}, runtimes={RUNTIME_DIRECTORY: "rt-1"}, whole=False))
    found = commands_of(
        runtime.present,
        host,
        transfer=RUNTIME,
        directory=RUNTIME_DIRECTORY,
        runtime_id="rt-1",
    )
    (command,) = found
    assert call_of(command) == (place, (RUNTIME, RUNTIME_DIRECTORY, "rt-1", {}))


def place_on(host: Any, monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """Places the runtime; returns what was sent."""
    sent: list[Transfer] = []
    monkeypatch.setattr(
        runtime, "send", lambda state, host, transfer, arguments: sent.append(transfer)
    )
    place(host.state, host, RUNTIME, RUNTIME_DIRECTORY, "rt-1", {})
    return sent


def jobs(host: Any) -> list[dict[str, Any]]:
    return [json.loads(shlex.split(command.get_raw_value())[-1]) for command in host.commands]


NOT_THERE = {"ok": False, "kind": "bytes"}


def test_a_runtime_that_is_not_there_is_sent_and_then_unpacked(
    scripted_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = scripted_host(answers=[NOT_THERE, {"ok": True, "selfcheck": {"ok": True}}])
    assert place_on(host, monkeypatch) == [RUNTIME]
    assert host.timeouts_s == [runtime.UNPACK_WITHIN_S] * 2
    assert [job["archive"] for job in jobs(host)] == [None, RUNTIME.path]


def test_a_runtime_with_the_right_bytes_is_only_run_once_more(
    scripted_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = scripted_host(answers=[{"ok": True, "selfcheck": {"ok": True}}])
    assert place_on(host, monkeypatch) == []
    assert jobs(host) == [{"archive": None, "directory": RUNTIME_DIRECTORY, "id": "rt-1"}]


@pytest.mark.parametrize(
    ("answer", "have", "fix"),
    [
        pytest.param(
            {"ok": False, "kind": "signal", "signal": int(signal.SIGILL)},
            "it died of SIGILL",
            "leave the host out",
            id="SIGILL",
        ),
        pytest.param(
            {"ok": False, "kind": "signal", "signal": int(signal.SIGSEGV)},
            "it died of SIGSEGV",
            "by hand",
            id="SIGSEGV",
        ),
        pytest.param(
            {"ok": False, "kind": "signal", "signal": 63},
            "it died of signal 63",
            "by hand",
            id="a real-time signal, which has no name",
        ),
        pytest.param(
            {"ok": False, "kind": "selfcheck", "error": "libgomp.so.1: no such file"},
            "libgomp.so.1: no such file",
            "libgomp1",
            id="library",
        ),
        pytest.param(
            {"ok": False, "kind": "os", "error": "No space left on device"},
            "No space left on device",
            "free space",
            id="disk",
        ),
        pytest.param(("python3: not found",), "python3: not found", "run again", id="no python"),
        pytest.param([], "no answer", "run again", id="nothing"),
        pytest.param(["[]"], "no answer", "run again", id="JSON that is no object"),
    ],
)
@pytest.mark.parametrize("before", [[], [NOT_THERE]], ids=["there already", "sent"])
def test_a_runtime_that_did_not_run_there_is_an_error_with_its_fix(
    scripted_host: Any,
    monkeypatch: pytest.MonkeyPatch,
    before: list[Any],
    answer: Any,
    have: str,
    fix: str,
) -> None:
    with pytest.raises(EdgellmError) as raised:
        place_on(scripted_host(answers=[*before, answer]), monkeypatch)
    assert raised.value.have == have
    assert fix in raised.value.fix
    assert raised.value.host == "pi5-01"


# Files: contents by standard input


def test_only_files_that_differ_are_written_and_contents_are_in_no_argument(
    scripted_host: Any, commands_of: Commands
) -> None:
    same = HostFile(path="/etc/edgellm/api_keys", content="A\n", mode="0640", group="edgellm")
    key = HostFile(path="/etc/edgellm/probe.key", content="very secret\n", mode="0600")
    asked = (same.path, key.path)
    host = scripted_host(
        {"paths.PathStates": {f"paths={asked}": {same.path: same.state, key.path: None}}}
    )
    (command,) = commands_of(paths.present, host, files=(same, key))
    assert isinstance(command, StringCommand)
    assert "very secret" not in command.get_raw_value()
    assert json.loads(command.connector_arguments["_stdin"]) == [
        {
            "path": "/etc/edgellm/probe.key",
            "content": "very secret\n",
            "mode": "0600",
            "owner": "root",
            "group": "root",
        }
    ]


@pytest.mark.parametrize(
    "changed", [{"mode": "0644"}, {"owner": "ops"}, {"group": "root"}, {"sha256": "0" * 64}]
)
def test_a_file_of_another_mode_owner_group_or_content_is_written(
    scripted_host: Any, commands_of: Commands, changed: dict[str, str]
) -> None:
    file = HostFile(path="/etc/x", content="A\n", mode="0640", group="edgellm")
    host = scripted_host(
        {"paths.PathStates": {"paths=('/etc/x',)": {"/etc/x": replace(file.state, **changed)}}}
    )
    assert len(commands_of(paths.present, host, files=(file,))) == 1


def test_a_files_state_is_the_digest_of_its_utf8_bytes() -> None:
    file = HostFile(path="/etc/x", content="ü\n")
    assert file.state.sha256 == hashlib.sha256(b"\xc3\xbc\n").hexdigest()


# The smoke test

SMOKE = SmokeTest(
    url="http://127.0.0.1:8000",
    model_name="m",
    needs_key=False,
    requests=5,
    max_tokens=24,
    load_deadline_s=180,
    first_token_deadline_s=30,
    stall_deadline_s=10,
    request_deadline_s=120,
    budget=TtftBudget(median_ttft_ms=1500),
)
HEALTHY = {
    "schema": 1,
    "ready": True,
    "n": 5,
    "median_ttft_ms": 112.4,
    "p95_ttft_ms": 139.6,
    "failures": [],
}


IN_ORDER = rolled_out(Case(board="raspberry-pi-5"))
DESIRED = IN_ORDER.desired
ELSEWHERE = CpuSet.parse("0-3")
START = "timeout 180 systemctl start edgellm.service"


def found(scripted_host: Any, *hosts: RolledOut, answers: Iterable[Any] = ()) -> Any:
    """A host that is found as these, one after another where it changes by itself.

    `answers`: of the commands that are no fact. Reading all facts at once has no answer, so that
    each is asked alone.
    """
    one_by_one = list(hosts or (IN_ORDER,))
    host = scripted_host(answers=answers)
    run = host.run_shell_command

    def get_fact(fact: type, **asked: Any) -> Any:
        observed = one_by_one[0].observed
        if fact is Effective and len(one_by_one) > 1:
            del one_by_one[0]
        values = {
            "HostProfileFact": observed.profile,
            "PathStates": observed.paths,
            "ArtifactsWhole": observed.whole,
            "Service": observed.service,
            "Effective": observed.effective,
        }
        return values[fact.__name__]

    def run_shell_command(command: StringCommand, **arguments: Any) -> Any:
        if command.get_raw_value() == "sh -s":
            return False, CommandOutput([])
        return run(command, **arguments)

    host.get_fact, host.run_shell_command = get_fact, run_shell_command
    return host


def verify(
    commands_of: Commands, host: Any, *, executing: bool = True, test: SmokeTest = SMOKE
) -> list[Any]:
    return commands_of(smoke.verified, host, executing=executing, test=test, desired=DESIRED)


def prove(commands_of: Commands, host: Any) -> list[Any]:
    """The comparison after the smoke test."""
    return commands_of(smoke.in_order, host, executing=True, release_id=DESIRED.release_id)


def test_nothing_is_asked_of_a_host_before_the_run_executes(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    host = scripted_host()
    assert verify(commands_of, host, executing=False) == []
    assert commands_of(smoke.in_order, host, release_id=DESIRED.release_id) == []
    assert host.commands == []
    assert notes.hosts == {}


def test_a_healthy_host_is_no_change_and_is_noted_as_verified(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    host = found(scripted_host, answers=[HEALTHY])
    assert verify(commands_of, host) == []
    assert host.noop_description == (
        f"release {DESIRED.release_id}: median TTFT 112 ms (n=5), budget 1500 ms"
    )
    assert prove(commands_of, host) == []
    noted = notes.hosts["pi5-01"]
    assert (noted.verified, noted.release) == (True, DESIRED.release_id)
    assert noted.smoke is not None
    assert noted.smoke.median_ttft_ms == 112.4
    assert noted.knobs == compare(DESIRED, IN_ORDER.observed)


def test_an_answer_alone_does_not_verify_a_host(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    verify(commands_of, found(scripted_host, answers=[HEALTHY]))
    assert not notes.hosts["pi5-01"].verified


@pytest.mark.parametrize(
    ("other", "have"),
    [
        pytest.param(
            IN_ORDER.threaded(1, cpus=ELSEWHERE),
            "cpus: 1 of 3 threads, such as engine-1 (813), may run on 0-3, not 1-3",
            id="CPUs",
        ),
        pytest.param(
            IN_ORDER.threaded(2, policy="other"),
            "scheduling: 1 of 3 threads, such as engine-2 (814), run as other, not batch",
            id="policy",
        ),
        pytest.param(
            IN_ORDER.in_force(
                foreign_drop_ins=("/etc/systemd/system/edgellm.service.d/nice.conf",)
            ),
            "drop_ins: /etc/systemd/system/edgellm.service.d/nice.conf changes what our units say",
            id="drop-in",
        ),
    ],
)
def test_a_server_that_answers_but_does_not_run_as_planned_is_unhealthy(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run, other: RolledOut, have: str
) -> None:
    host = found(scripted_host, other, answers=[HEALTHY])
    error = failure_of(verify(commands_of, host))
    assert (error.what, error.have) == ("the running server", have)
    assert "take away" in error.fix
    noted = notes.hosts["pi5-01"]
    assert not noted.verified
    assert noted.smoke is not None
    assert noted.knobs == compare(DESIRED, other.observed)


def test_a_knob_that_is_still_off_leaves_the_release_but_fails_the_host(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    other = IN_ORDER.in_force(swappiness=60).lying(layout.LIMITS_CONF, mode="0666")
    host = found(scripted_host, other, answers=[HEALTHY])
    assert verify(commands_of, host) == []
    error = failure_of(prove(commands_of, host))
    assert error.what == "effective state"
    assert error.have == "swappiness: 60 now; login_limits: mode 0666, not 0644"
    assert "deploys/audit.py" in error.fix
    assert not notes.hosts["pi5-01"].verified


def test_what_the_host_cannot_have_or_tell_does_not_fail_it(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    other = IN_ORDER.in_force(swappiness_of_kernel=False).running(program=None)
    host = found(scripted_host, other, answers=[HEALTHY])
    assert verify(commands_of, host) == []
    verdicts = {state.verdict for state in notes.hosts["pi5-01"].knobs}
    assert {Verdict.LIMITED, Verdict.UNKNOWN} <= verdicts
    assert prove(commands_of, host) == []
    assert notes.hosts["pi5-01"].verified


def test_what_was_read_while_the_server_still_loaded_is_read_again(
    scripted_host: Any, commands_of: Commands
) -> None:
    loading = IN_ORDER.in_force(service_state="activating").threaded(cpus=ELSEWHERE)
    host = found(scripted_host, loading, IN_ORDER, answers=[HEALTHY])
    assert verify(commands_of, host) == []


# Where no request is asked for

NO_REQUESTS = replace(SMOKE, requests=0)


def test_without_requests_a_server_that_is_ready_is_asked_nothing(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = found(scripted_host)
    assert verify(commands_of, host, test=NO_REQUESTS) == []
    assert host.commands == []
    assert "no smoke test asked for" in host.noop_description


def test_without_requests_a_server_that_still_loads_is_waited_for(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    loading = IN_ORDER.in_force(service_state="activating")
    host = found(scripted_host, loading, IN_ORDER, answers=[[]])
    assert verify(commands_of, host, test=NO_REQUESTS) == []
    assert [command.get_raw_value() for command in host.commands] == [START]
    assert host.timeouts_s[0] > 180
    assert notes.hosts["pi5-01"].knobs == compare(DESIRED, IN_ORDER.observed)
    assert notes.hosts["pi5-01"].smoke is None


@pytest.mark.parametrize(
    ("said", "have"),
    [((), "not ready within 180 s"), (("Job for edgellm.service failed.",), "Job for edgellm")],
)
def test_without_requests_a_server_that_does_not_get_ready_is_unhealthy(
    scripted_host: Any, commands_of: Commands, said: tuple[str, ...], have: str
) -> None:
    host = found(scripted_host, IN_ORDER.in_force(service_state="activating"), answers=[said])
    error = failure_of(verify(commands_of, host, test=NO_REQUESTS))
    assert have in error.have


@pytest.mark.parametrize("other", [IN_ORDER.threaded(cpus=ELSEWHERE)], ids=["CPUs"])
def test_without_requests_the_threads_are_looked_at_all_the_same(
    scripted_host: Any, commands_of: Commands, other: RolledOut
) -> None:
    error = failure_of(verify(commands_of, found(scripted_host, other), test=NO_REQUESTS))
    assert error.have.startswith("cpus: 3 of 3 threads")


def test_the_probe_is_asked_with_every_deadline_of_the_settings_and_no_key(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = found(scripted_host, answers=[HEALTHY])
    verify(commands_of, host)
    (command,) = host.commands
    assert command.get_raw_value() == (
        "python3 -B /opt/edgellm/current/runtime/edgellm_server/probe.py"
        " --url http://127.0.0.1:8000 --model m --n 5 --max-tokens 24 --load-deadline-s 180"
        " --first-token-deadline-s 30 --stall-deadline-s 10 --request-deadline-s 120"
    )
    # After the probe's own last deadline, never before: 1 cold, 5 varied, 1 + 5 behind a prefix
    assert host.timeouts_s[0] > 180 + 12 * 120


def test_streams_at_once_are_asked_for_where_the_inventory_wants_them_and_get_their_time() -> None:
    several = replace(SMOKE, concurrency=4)
    assert several.command.get_raw_value().endswith(" --concurrency 4")
    assert several.ends_within_s == SMOKE.ends_within_s + 2 * 120  # two rounds for 5 or more


def test_a_host_slower_than_at_its_last_good_run_is_unhealthy_and_the_kernels_are_named(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    last = LastGood(median_ttft_ms=40.0, n=5, at="2026-11-24T10:00:00+00:00", kernel="6.6.31")
    test = replace(SMOKE, budget=TtftBudget(median_ttft_ms=1500, last_good=last), kernel="6.12.1")
    error = failure_of(verify(commands_of, found(scripted_host, answers=[HEALTHY]), test=test))
    assert "regressed: median TTFT 112 ms (n=5) is 181 % over" in error.have
    assert "the kernel was 6.6.31 and is 6.12.1" in error.have
    verdict = notes.hosts["pi5-01"].verdict
    assert verdict is not None
    assert not verdict.healthy
    assert verdict.reasons == (error.have,)


def test_a_warning_is_told_and_noted_and_fails_nothing(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    hot = {"temperature_c": 84.0, "throttled": "0x4"}
    host = found(scripted_host, answers=[{**HEALTHY, "host": hot}])
    assert verify(commands_of, host) == []
    said = "held down while it was measured: throttled, 84 °C"
    assert said in host.lines
    verdict = notes.hosts["pi5-01"].verdict
    assert verdict is not None
    assert (verdict.healthy, verdict.warnings) == (True, (said,))


# From the control machine as well

FROM_HERE = replace(SMOKE, from_control=True, probe_key="key-of-the-probe")


def test_both_views_are_told_and_noted(
    scripted_host: Any,
    commands_of: Commands,
    notes: recorder.Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def ask(host: Any, url: str, options: Any, **more: Any) -> SmokeResult:
        asked.append((url, options, more["api_key"]))
        return SmokeResult.parse(json.dumps({**HEALTHY, "median_ttft_ms": 140.2}))

    monkeypatch.setattr(smoke, "ask_from_here", ask)
    host = found(scripted_host, answers=[HEALTHY])
    assert verify(commands_of, host, test=FROM_HERE) == []
    assert asked == [("http://127.0.0.1:8000", FROM_HERE.options, "key-of-the-probe")]
    assert "112 ms (n=5), 140 ms as seen from the control machine" in host.noop_description
    noted = notes.hosts["pi5-01"]
    assert noted.smoke is not None
    assert noted.from_control is not None
    assert (noted.smoke.median_ttft_ms, noted.from_control.median_ttft_ms) == (112.4, 140.2)


def test_an_unhealthy_host_is_not_asked_once_more_from_here(
    scripted_host: Any,
    commands_of: Commands,
    notes: recorder.Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smoke, "ask_from_here", lambda *_, **__: pytest.fail("asked"))
    broken = {**HEALTHY, "failures": [{"kind": "stalled", "detail": "2 chunks, then none"}]}
    error = failure_of(verify(commands_of, found(scripted_host, answers=[broken]), test=FROM_HERE))
    assert "stalled: 2 chunks" in error.have
    assert notes.hosts["pi5-01"].from_control is None


@pytest.mark.parametrize(
    ("seen", "warning"),
    [
        pytest.param(
            NotSeenError("the host's sshd forwards no ports"),
            "not seen from the control machine: the host's sshd forwards no ports",
            id="no forward",
        ),
        pytest.param(
            {**HEALTHY, "failures": [{"kind": "connection", "detail": "reset"}]},
            "as seen from the control machine: connection: reset",
            id="a fault on the way",
        ),
    ],
)
def test_what_goes_wrong_on_the_way_is_a_warning(
    scripted_host: Any,
    commands_of: Commands,
    notes: recorder.Run,
    monkeypatch: pytest.MonkeyPatch,
    seen: Any,
    warning: str,
) -> None:
    def ask(*_: Any, **__: Any) -> SmokeResult:
        if isinstance(seen, Exception):
            raise seen
        return SmokeResult.parse(json.dumps(seen))

    monkeypatch.setattr(smoke, "ask_from_here", ask)
    assert verify(commands_of, found(scripted_host, answers=[HEALTHY]), test=FROM_HERE) == []
    verdict = notes.hosts["pi5-01"].verdict
    assert verdict is not None
    assert verdict.warnings == (warning,)


def test_the_probes_key_is_in_no_text_of_the_test() -> None:
    assert "key-of-the-probe" not in repr(FROM_HERE) + FROM_HERE.command.get_raw_value()
    assert FROM_HERE.all_ends_within_s == 2 * SMOKE.ends_within_s


# deploys/verify.py


def ask_again(commands_of: Commands, host: Any) -> list[Any]:
    return commands_of(smoke.asked, host, executing=True, test=SMOKE, desired=DESIRED)


def test_a_host_that_runs_is_asked_and_counts_as_verified_with_whatever_is_off(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    host = found(scripted_host, IN_ORDER.in_force(swappiness=60), answers=[HEALTHY])
    assert ask_again(commands_of, host) == []
    noted = notes.hosts["pi5-01"]
    assert (noted.verified, noted.release) == (True, DESIRED.release_id)
    assert [k.knob for k in noted.knobs if k.verdict is Verdict.DRIFTED] == ["swappiness"]


@pytest.mark.parametrize(
    ("other", "have"),
    [
        pytest.param(
            IN_ORDER.served(active=False, running_release=None),
            f"release {DESIRED.release_id}, not active",
            id="stopped",
        ),
        pytest.param(
            IN_ORDER.served(active=False, running_release=None, current_release=None),
            "never rolled out to",
            id="new",
        ),
    ],
)
def test_a_host_without_a_running_service_is_not_asked_for_that_would_start_it(
    scripted_host: Any, commands_of: Commands, other: RolledOut, have: str
) -> None:
    host = found(scripted_host, other)
    error = failure_of(ask_again(commands_of, host))
    assert error.have == have
    assert "deploys/qwen.py" in error.fix
    assert host.commands == []


def test_a_key_is_read_from_its_file_on_the_host() -> None:
    command = replace(SMOKE, needs_key=True).command.get_raw_value()
    assert command.endswith(" --api-key-file /etc/edgellm/probe.key")


@pytest.mark.parametrize(
    ("answer", "have"),
    [
        pytest.param({**HEALTHY, "median_ttft_ms": 1600.0}, "slow: median TTFT", id="slow"),
        pytest.param(
            {**HEALTHY, "failures": [{"kind": "stalled", "detail": "for 10 s"}]},
            "stalled: for 10 s",
            id="stalled",
        ),
        pytest.param(
            ("python3: can't open file",), "python3: can't open file", id="no probe there"
        ),
        pytest.param([], "the probe printed nothing", id="nothing"),
        pytest.param(["Segmentation fault"], "'Segmentation fault'", id="no JSON"),
        pytest.param(EOFError(), "it ended", id="link lost"),
        pytest.param(SSHException("Timeout opening channel"), "Timeout opening", id="ssh"),
        pytest.param(TimeoutError("timed out"), "timed out", id="timeout"),
    ],
)
def test_an_unhealthy_host_fails_with_the_reason_and_is_not_verified(
    scripted_host: Any,
    commands_of: Commands,
    notes: recorder.Run,
    answer: Any,
    have: str,
) -> None:
    host = scripted_host(answers=[answer])
    error = failure_of(verify(commands_of, host))
    assert have in error.have
    assert error.fix
    assert not notes.hosts.get("pi5-01", recorder.HostNotes()).verified


def test_a_probe_of_an_older_release_is_called_so_and_not_sick(
    scripted_host: Any, commands_of: Commands
) -> None:
    usage = ("usage: probe.py [-h] --url URL", "  [--n N]")
    said = (*usage, "probe.py: error: unrecognized arguments: --stall-deadline-s 10")
    error = failure_of(verify(commands_of, scripted_host(answers=[said])))
    assert error.have == "that of an older release, which refuses --stall-deadline-s 10"
    assert "deploys/qwen.py" in error.fix


def test_figures_of_an_unhealthy_host_are_noted_all_the_same(
    scripted_host: Any, commands_of: Commands, notes: recorder.Run
) -> None:
    verify(commands_of, scripted_host(answers=[{**HEALTHY, "median_ttft_ms": 1600.0}]))
    noted = notes.hosts["pi5-01"].smoke
    assert noted is not None
    assert noted.median_ttft_ms == 1600


def test_giving_up_fails_the_host_for_the_first_reason(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host(answers=[{**HEALTHY, "median_ttft_ms": 1600.0}])
    (command,) = verify(commands_of, host)
    assert command.function(host.state, host, *command.args) is False
    assert "slow" in failure_of(commands_of(smoke.given_up, host)).have


def test_giving_up_without_a_reason_has_one_of_its_own(
    scripted_host: Any, commands_of: Commands
) -> None:
    error = failure_of(commands_of(smoke.given_up, scripted_host()))
    assert "the smoke test failed" in error.have


# What a verified host keeps

REALTIME = rolled_out(
    Case(
        board="raspberry-pi-5",
        settings={"scheduling": "rr", "scheduling_priority": 5, "allow_realtime": True},
    )
)


def keep(commands_of: Commands, host: Any, case: RolledOut, profile: HostProfile) -> list[Any]:
    return commands_of(
        record.confirmed,
        host,
        executing=True,
        release_id=case.desired.release_id,
        plan=case.plan,
        profile=profile,
    )


def test_a_host_that_is_recorded_as_it_is_keeps_its_record(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = found(scripted_host)
    assert keep(commands_of, host, IN_ORDER, IN_ORDER.observed.profile) == []
    assert host.noop_description == "the record says so already"


@pytest.mark.parametrize("earlier", [None, "6.1.0"], ids=["no record", "another kernel"])
def test_a_host_that_has_changed_is_recorded_for_root_and_by_standard_input(
    scripted_host: Any, commands_of: Commands, earlier: str | None
) -> None:
    now = IN_ORDER.observed.profile
    assert now.recorded is not None
    before = None if earlier is None else replace(now.recorded, kernel=earlier)
    (command,) = keep(commands_of, found(scripted_host), IN_ORDER, replace(now, recorded=before))
    (file,) = json.loads(command.connector_arguments["_stdin"])
    assert (file["path"], file["owner"], file["mode"]) == (layout.RECORDED, "root", "0644")
    assert file["content"] == now.recorded.to_json_text()


@pytest.mark.parametrize("confirmed", [None, "another release"])
def test_real_time_that_is_planned_and_not_confirmed_yet_is_confirmed(
    scripted_host: Any, commands_of: Commands, confirmed: str | None
) -> None:
    assert REALTIME.plan.scheduling.is_realtime
    host = found(scripted_host, REALTIME.in_force(realtime_confirmed=confirmed))
    (command,) = keep(commands_of, host, REALTIME, REALTIME.observed.profile)
    said = command.get_raw_value()
    assert said == service.confirmation(REALTIME.desired.release_id).get_raw_value()


def test_real_time_that_is_confirmed_is_not_confirmed_again(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = found(scripted_host, REALTIME)
    assert keep(commands_of, host, REALTIME, REALTIME.observed.profile) == []


def test_a_host_without_real_time_is_not_even_asked_about_it(
    scripted_host: Any, commands_of: Commands
) -> None:
    assert keep(commands_of, scripted_host(), IN_ORDER, IN_ORDER.observed.profile) == []


# The service

RUNNING = ServiceState(
    active=True,
    enabled=True,
    socket_active=True,
    socket_enabled=True,
    socket_stale=False,
    needs_daemon_reload=False,
    running_release="a",
    current_release="a",
    previous_release=None,
)


@pytest.fixture
def run(
    scripted_host: Any, commands_of: Commands, plan_of: Any, effect_of: Any
) -> Callable[..., list[Any]]:
    """run(repaired=True): what it does where release "a" runs as planned."""
    plan = plan_of("n100")
    facts = {"service.Service": RUNNING, "effective.Effective": effect_of(plan)}

    def build(*, repaired: bool) -> list[Any]:
        return commands_of(
            service.running,
            scripted_host(facts),
            executing=True,
            release_id="a",
            plan=plan,
            repaired=lambda: repaired,
        )

    return build


def test_a_service_whose_files_this_run_has_mended_is_restarted(run: Commands) -> None:
    found = run(repaired=True)
    assert [command.get_raw_value() for command in found][-1] == (
        "systemctl stop edgellm.service ; systemctl start --no-block edgellm.service"
    )


def test_a_service_whose_files_were_as_planned_is_left_running(
    run: Commands, notes: recorder.Run
) -> None:
    assert run(repaired=False) == []
    assert notes.hosts["pi5-01"].release == "a"


# The operator's own server

DROP_IN = "# Rendered by edgellm; x\n[Service]\nEnvironment=EDGELLM_TUNING=ab12\n"
UNTUNED = UpstreamState(
    known=True, active=True, needs_daemon_reload=False, drop_in_sha256=None, tuning=""
)


def tune(commands_of: Commands, scripted_host: Any, **states: UpstreamState) -> list[Any]:
    found = {f"{name}.service": state for name, state in states.items()}
    host = scripted_host({"upstream.UpstreamUnits": {"unit=vllm.service": found}})
    return commands_of(upstream.tuned, host, unit="vllm.service", drop_in=DROP_IN)


def test_an_operators_server_gets_the_drop_in_and_is_restarted_with_it(
    scripted_host: Any, commands_of: Commands
) -> None:
    write, *others = tune(commands_of, scripted_host, vllm=UNTUNED)
    assert json.loads(write.connector_arguments["_stdin"]) == [
        {
            "path": "/etc/systemd/system/vllm.service.d/90-edgellm.conf",
            "content": DROP_IN,
            "mode": "0644",
            "owner": "root",
            "group": "root",
        }
    ]
    assert [command.get_raw_value() for command in others] == [
        "systemctl daemon-reload",
        "systemctl restart --no-block vllm.service",
    ]


def test_a_server_that_is_forwarded_to_no_longer_is_put_back(
    scripted_host: Any, commands_of: Commands
) -> None:
    before = replace(UNTUNED, drop_in_sha256="ab" * 32, tuning="ab12")
    commands = tune(commands_of, scripted_host, vllm=UNTUNED, tgi=before)
    folder = "/etc/systemd/system/tgi.service.d"
    said = [command.get_raw_value() for command in commands]
    assert said[0] == (
        f"rm -f -- {folder}/90-edgellm.conf && rmdir --ignore-fail-on-non-empty -- {folder}"
    )
    assert "systemctl try-restart --no-block tgi.service" in said


def test_an_upstream_unit_that_the_host_does_not_have_is_named(scripted_host: Any) -> None:
    unknown = {"vllm.service": replace(UNTUNED, known=False)}
    host = scripted_host({"upstream.UpstreamUnits": {"unit=vllm.service": unknown}})
    with (
        ctx_host.use(host),
        pytest.raises(EdgellmError, match=r"upstream_unit: want vllm\.service"),
    ):
        upstream.require("vllm.service")


# Containment


def test_a_required_roll_back_without_a_previous_release_fails_the_host(
    scripted_host: Any, commands_of: Commands
) -> None:
    host = scripted_host({"service.Service": RUNNING})
    error = failure_of(commands_of(service.rolled_back, host, required=True))
    assert (error.host, error.what) == ("pi5-01", "roll-back")


OWN_ZRAM = ZramPlan(
    manager="own-unit", adopted_manager=None, size_bytes=1 << 30, algorithm=None, priority=100
)
UNANSWERED = [
    pytest.param(model.present, {"transfer": MODEL}, id="model.present"),
    pytest.param(
        runtime.present,
        {"transfer": RUNTIME, "directory": RUNTIME_DIRECTORY, "runtime_id": "rt-1"},
        id="runtime.present",
    ),
    pytest.param(
        paths.present, {"files": (HostFile(path="/etc/x", content=""),)}, id="paths.present"
    ),
    pytest.param(paths.absent, {"paths": ("/etc/x",)}, id="paths.absent"),
    pytest.param(kernel.swappiness_in_force, {"swappiness": 10}, id="kernel.swappiness_in_force"),
    pytest.param(kernel.swappiness_in_force, {"swappiness": None}, id="kernel.swappiness put back"),
    pytest.param(
        kernel.governor_in_force, {"governor": "schedutil"}, id="kernel.governor_in_force"
    ),
    pytest.param(kernel.governor_in_force, {"governor": None}, id="kernel.governor put back"),
    pytest.param(cores.reserved, {"cpus": CpuSet.parse("0-1")}, id="cores.reserved"),
    pytest.param(cores.reserved, {"cpus": None}, id="cores.reserved no longer"),
    pytest.param(zram.in_force, {"plan": OWN_ZRAM}, id="zram.in_force"),
    pytest.param(zram.own_absent, {}, id="zram.own_absent"),
    pytest.param(service.account_present, {}, id="service.account_present"),
    pytest.param(service.account_absent, {}, id="service.account_absent"),
    # Without an answer it does not come to the plan
    pytest.param(service.running, {"release_id": "a", "plan": None}, id="service.running"),
    pytest.param(service.stopped, {}, id="service.stopped"),
    pytest.param(service.rolled_back, {"required": True}, id="service.rolled_back"),
    pytest.param(service.releases_pruned, {"keep": 2}, id="service.releases_pruned"),
    pytest.param(upstream.tuned, {"unit": "vllm.service", "drop_in": DROP_IN}, id="upstream.tuned"),
]


@pytest.mark.parametrize(("operation", "arguments"), UNANSWERED)
@pytest.mark.parametrize(
    "get_fact",
    [
        # pyinfra gives None for a fact that could not be loaded
        pytest.param(lambda *_, **__: None, id="no answer"),
        pytest.param(lambda *_, **__: {}, id="an answer without what was asked"),
        pytest.param(lambda *_, **__: (_ for _ in ()).throw(EOFError()), id="link lost"),
        pytest.param(lambda *_, **__: (_ for _ in ()).throw(SSHException("no channel")), id="ssh"),
    ],
)
def test_a_host_that_does_not_answer_fails_alone_and_raises_nothing(
    scripted_host: Any,
    commands_of: Commands,
    operation: Any,
    arguments: dict[str, Any],
    get_fact: Any,
) -> None:
    host = scripted_host()
    host.get_fact = get_fact
    commands = commands_of(operation, host, **arguments)
    if commands and isinstance(commands[-1], FunctionCommand):
        error = failure_of(commands[-1:])
        assert error.host == "pi5-01"
        assert error.fix
    else:
        # An empty list of users is an answer: the account is not there
        assert get_fact() == {}


def test_what_a_call_raises_fails_its_host_alone(scripted_host: Any, notes: recorder.Run) -> None:
    host = scripted_host()

    def cut(state: Any, host: Any, word: str) -> None:
        raise EOFError(word)

    with ctx_host.use(host):
        assert contained_call(host.state, host, cut, ("gone",)) is False
    failure = notes.hosts["pi5-01"].failure
    assert failure is not None
    assert failure.have == "gone"


@pytest.mark.parametrize("command", [StringCommand("systemctl", "restart", "x"), " systemctl "])
@pytest.mark.parametrize("error", [EOFError(), SSHException("not active"), OSError("reset")])
def test_a_link_that_ends_before_a_command_fails_its_host_alone(
    scripted_host: Any,
    commands_of: Commands,
    notes: recorder.Run,
    command: Any,
    error: Exception,
) -> None:
    host = scripted_host(answers=[error])

    @host_operation()
    def restarted() -> Generator[Any]:
        yield command

    (contained,) = commands_of(restarted, host)
    assert str(contained) == str(command).strip()
    with ctx_host.use(host):
        ok, output = contained.execute(
            SimpleNamespace(print_output=False, print_input=False), host, {}
        )
    assert ok is False
    assert output.combined_lines == []
    failure = notes.hosts["pi5-01"].failure
    assert failure is not None
    assert failure.what == "the connection"


def test_the_first_reason_stands(scripted_host: Any, notes: recorder.Run) -> None:
    host = scripted_host()
    for have in ("first", "second"):
        error = EdgellmError(host="pi5-01", what="a", want="b", have=have, fix="c")
        assert fail(host.state, host, error) is False
    failure = notes.hosts["pi5-01"].failure
    assert failure is not None
    assert failure.have == "first"
