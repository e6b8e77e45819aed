"""What the host's own trials say, stored on it: deploys/tune.py's one operation."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from paramiko import SSHException
from pyinfra import host
from pyinfra.api import FunctionCommand, QuoteString, StringCommand
from pyinfra.connectors.util import make_unix_command_for_host

from edgellm import layout
from edgellm.desired import HostFile
from edgellm.errors import EdgellmError
from edgellm.facts.paths import ArtifactsWhole
from edgellm.facts.reading import read
from edgellm.measured import (
    Candidate,
    MeasuredResult,
    ResultKey,
    choose,
    progress_line,
    table_lines,
    trials_of,
)
from edgellm.operations.containment import connector_arguments, contained_call, host_operation
from edgellm.operations.transfer import unix_arguments
from edgellm.remote import script_command
from edgellm.trial_job import TrialRun

if TYPE_CHECKING:
    from pyinfra.api import Host, State

OPEN_WITHIN_S = 30.0
WRITE_WITHIN_S = 60
# Why a run ended that still has something to say of the candidates
MEASURED = frozenset({"rounds", "settled", "budget", "throttled"})
LAST_WORDS = 3  # lines that were no events, for the reason of a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that the trials of one host need."""

    key: ResultKey
    candidates: tuple[Candidate, ...]
    run: TrialRun
    stored: MeasuredResult | None  # what lies on the host already
    again: bool


@host_operation()
def measured(tuning: Tuning) -> Generator[FunctionCommand]:
    """A result for this kernel, model, runtime and plan lies on the host. Changes no service."""
    stored = tuning.stored
    if (
        stored is not None
        and stored.key == tuning.key
        and stored.choice.conclusive
        and not tuning.again
    ):
        host.noop(
            f"measured on {stored.measured_on}: {stored.choice.candidate}; tune_again=true "
            "measures anew"
        )
        return
    if len(tuning.candidates) < 2:
        host.noop("nothing to try: the inventory sets every knob that could be tried here")
        return
    require_artifacts(tuning.run, what="tune")
    yield FunctionCommand(contained_call, (measure, (tuning, connector_arguments(host))), {})


def require_artifacts(run: TrialRun, *, what: str) -> None:
    """What trials run with is on the current host. Raises EdgellmError."""
    model = {layout.model_path(run.model_sha256): run.model_sha256}
    runtime = {layout.runtime_directory(run.runtime_id): run.runtime_id}
    whole = read(ArtifactsWhole, models=model, runtimes=runtime)
    if not all(whole.values()):
        raise EdgellmError(
            host=host.name,
            what=what,
            want="this model and this runtime on the host",
            have="missing: " + ", ".join(path for path, there in whole.items() if not there),
            fix="run deploys/qwen.py first",
        )


def measure(state: State, host: Host, tuning: Tuning, arguments: dict[str, Any]) -> None:
    """Runs the trials, tells how they go, chooses, and stores the result. Raises EdgellmError."""
    events, end = events_of(state, host, tuning.run, arguments, what="tune")
    result = MeasuredResult(
        key=tuning.key,
        choice=choose(trials_of(events), tuning.candidates),
        measured_on=datetime.now(timezone.utc).date().isoformat(),
        duration_s=float(end["duration_s"]),
        ended=f"{end['why']}: {end['detail']}",
    )
    for line in table_lines(result):
        host.log(line)
    _store(host, result, arguments)
    host.log(
        f"measured in {result.duration_s:.0f} s ({result.ended}) and stored; "
        + (
            "nothing changes"
            if result.choice.keeps_the_plan
            else "run deploys/qwen.py to use it: nothing has changed yet"
        )
    )


def events_of(
    state: State, host: Host, run: TrialRun, arguments: dict[str, Any], *, what: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs the trials and tells how they go: all events, and the last. Raises EdgellmError."""
    names = ", ".join(candidate["name"] for candidate in run.job["candidates"])
    host.log(f"up to {run.job['budget_s']} s of trials: {names}")
    if run.announcement is not None:
        host.log(run.announcement)
    events: list[dict[str, Any]] = []
    words: list[str] = []
    for line in lines_of(state, host, run, arguments):
        event = _event(line)
        if event is None:
            words = [*words, line][-LAST_WORDS:]
            continue
        events.append(event)
        if (told := progress_line(event)) is not None:
            host.log(told)
    end = events[-1] if events else {}
    if end.get("event") != "end":
        said = " ".join(words)[:400] or "the connection ended, or it went over its time"
        raise _failed(host, said, f"run deploys/{what}.py again", what=what)
    if end.get("why") == "busy":
        raise _failed(
            host,
            str(end.get("detail")),
            "run it at a quiet time, or with --data tune_while_busy=true",
            what=what,
        )
    if end.get("why") not in MEASURED:
        fix = "see the lines above; on the host: journalctl -n 50"
        raise _failed(host, str(end.get("detail")), fix, what=what)
    return events, end


def lines_of(state: State, host: Host, run: TrialRun, arguments: dict[str, Any]) -> Iterator[str]:
    """The command's output line by line, as it comes. Raises EdgellmError where the link ends."""
    command = StringCommand(*map(QuoteString, run.command))
    job = json.dumps(run.job, sort_keys=True)
    client = getattr(host.connector, "client", None)
    if client is None:  # a connector without an ssh channel (@local, @docker)
        _, output = host.run_shell_command(
            command, **{**arguments, "_stdin": job, "_timeout": run.ends_within_s}
        )
        yield from output.output_lines
        return
    unix_command = make_unix_command_for_host(state, host, command, **unix_arguments(arguments))
    ends_at = time.monotonic() + run.ends_within_s
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    try:
        channel = client.get_transport().open_session(timeout=OPEN_WITHIN_S)
        try:
            channel.settimeout(run.silent_within_s)
            channel.set_combine_stderr(True)
            channel.exec_command(unix_command.get_raw_value())
            channel.sendall(job.encode())
            channel.shutdown_write()
            while (piece := channel.recv(65536)) and time.monotonic() < ends_at:
                *lines, rest = (rest + decoder.decode(piece)).split("\n")
                yield from lines
        finally:
            channel.close()
    except (OSError, EOFError, SSHException, AttributeError) as error:
        # AttributeError: get_transport() is None once paramiko has noticed that the link is gone
        raise _failed(
            host,
            f"the link was lost ({str(error) or type(error).__name__})",
            "run it again: the host has ended the trials by itself",
        ) from None
    if rest:
        yield rest


def _store(host: Host, result: MeasuredResult, arguments: dict[str, Any]) -> None:
    file = HostFile(path=layout.MEASURED, content=result.to_json_text())
    command = script_command("write_files", stdin=[asdict(file)])
    ok, output = host.run_shell_command(
        StringCommand(*command.bits),
        **{**arguments, **command.connector_arguments, "_timeout": WRITE_WITHIN_S},
    )
    if not ok:
        have = " ".join(output.stderr_lines)[:400] or "no answer"
        raise _failed(host, f"the result could not be stored: {have}", "free some space there")


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _failed(host: Host, have: str, fix: str, *, what: str = "tune") -> EdgellmError:
    return EdgellmError(
        host=host.name,
        what=what,
        want="trials on the host, and their result",
        have=have,
        fix=fix,
    )
