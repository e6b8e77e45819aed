"""Facts read once, several in one round trip, until the host is changed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from paramiko import SSHException
from pyinfra.api import Config, FactBase, QuoteString, StringCommand
from pyinfra.api.exceptions import FactProcessError
from pyinfra.connectors.util import CommandOutput, OutputLine, make_unix_command
from pyinfra.context import ctx_host, ctx_state

from edgellm.errors import EdgellmError
from edgellm.facts import reading
from edgellm.facts.paths import ArtifactsWhole, PathState, PathStates
from edgellm.facts.reading import forget, preload, read
from edgellm.operations.containment import host_operation

WITHIN_S = 10


class Said(FactBase[list[str]]):
    """The lines that a command prints."""

    def command(self, shell: str) -> str:
        return shell

    def process(self, output: list[str]) -> list[str]:
        return output


class SaidOf(Said):
    """The same, as a StringCommand with a word to quote."""

    def command(self, shell: str) -> StringCommand:
        return StringCommand("printf", "%s", QuoteString(shell))


class Number(FactBase[int]):
    def command(self, shell: str) -> str:
        return shell

    def process(self, output: list[str]) -> int:
        try:
            return int(output[0])
        except ValueError:
            raise reading.unreadable("not a number") from None


class LocalHost:
    """Runs what a host would be sent in a shell here, and counts the round trips."""

    name = "pi5-01"
    current_op_global_arguments: dict[str, Any] | None = None
    current_deploy_kwargs = None

    def __init__(self, **data: Any) -> None:
        self.state = State()
        self.data = type("Data", (), data)()
        self.commands: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.fault: Exception | None = None

    @property
    def round_trips(self) -> int:
        return len(self.sent)

    def run_shell_command(self, command: StringCommand, **arguments: Any) -> Any:
        self.commands.append(command.get_raw_value())
        self.sent.append(arguments)
        if self.fault is not None:
            raise self.fault
        stdin = arguments.get("_stdin") or ""
        done = subprocess.run(
            ["sh", "-c", make_unix_command(command).get_raw_value()],
            input=stdin + "\n" if stdin else "",
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        lines = [OutputLine("stdout", line) for line in done.stdout.splitlines()]
        return done.returncode == 0, CommandOutput(lines)

    def get_fact(self, fact: type[FactBase[Any]], **arguments: Any) -> Any:
        arguments.pop("_ignore_errors")
        command = fact().command(**arguments)
        ok, output = self.run_shell_command(StringCommand(command))
        try:
            return fact().process(output.stdout_lines) if ok and output.stdout_lines else None
        except FactProcessError:
            return None

    def log(self, *_: Any) -> None:
        pass

    def noop(self, *_: Any) -> None:
        pass


class State:
    config = Config()
    is_executing = False


@pytest.fixture
def host() -> Iterator[LocalHost]:
    local = LocalHost()
    with ctx_state.use(local.state), ctx_host.use(local):
        yield local


SHELLS = [
    pytest.param("echo one; echo two", ["one", "two"], id="lines"),
    pytest.param("printf one", ["one"], id="no line break at the end"),
    pytest.param("printf 'one\\n\\n\\n'", ["one", "", ""], id="empty lines at the end"),
    pytest.param("echo; echo one", ["", "one"], id="an empty line first"),
    pytest.param("echo 0 0 0; echo '0123456789abcdef 0 0'", ["0 0 0", "0123456789abcdef 0 0"]),
    pytest.param("echo out; echo err >&2", ["out"], id="standard error"),
    pytest.param("cat; echo after", ["after"], id="reads its standard input"),
    pytest.param("echo one; exit 0; echo two", ["one"], id="exits"),
    pytest.param("cd /; pwd", ["/"], id="goes elsewhere"),
]


@pytest.mark.parametrize(("shell", "lines"), SHELLS)
def test_a_fact_that_was_read_with_others_is_what_it_is_when_read_alone(
    host: LocalHost, shell: str, lines: list[str]
) -> None:
    alone = read(Said, shell=shell)
    assert alone == lines
    forget(host)  # type: ignore[arg-type]
    preload([(Said, {"shell": "echo before"}), (Said, {"shell": shell}), (Said, {"shell": "pwd"})])
    assert host.round_trips == 2
    assert read(Said, shell=shell) == alone
    assert read(Said, shell="echo before") == ["before"]
    assert len(read(Said, shell="pwd")) == 1
    assert host.round_trips == 2


@pytest.mark.parametrize("text", ["it's", '"$HOME"', "a\\nb", "`id`", "* ;"])
def test_words_are_quoted_as_when_read_alone(host: LocalHost, text: str) -> None:
    preload([(SaidOf, {"shell": text})])
    assert read(SaidOf, shell=text) == [text]
    assert host.round_trips == 1


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param("echo 1; exit 3", id="exit status"),
        pytest.param("echo 'not closed", id="syntax"),
        pytest.param("echo )", id="syntax of a list"),
        pytest.param("true", id="nothing said"),
        pytest.param("echo word", id="cannot be read"),
        pytest.param("no-such-program-at-all", id="not there"),
    ],
)
def test_a_fact_that_fails_harms_no_other_and_says_why_when_it_is_read(
    host: LocalHost, shell: str
) -> None:
    preload([(Number, {"shell": shell}), (Number, {"shell": "echo 7"})])
    assert read(Number, shell="echo 7") == 7
    assert host.round_trips == 1
    with pytest.raises(EdgellmError, match="reading Number") as raised:
        read(Number, shell=shell)
    assert host.round_trips == 2
    assert (raised.value.have == "not a number") == (shell == "echo word")


def test_more_than_fits_in_one_argument_goes_in_one_round_trip(host: LocalHost) -> None:
    questions = [(Said, {"shell": f"echo {n}; : {'x' * 60_000}"}) for n in range(20)]
    preload(questions)
    assert [read(Said, **arguments) for _, arguments in questions] == [[str(n)] for n in range(20)]
    assert host.round_trips == 1


def test_scripts_of_ours_are_among_them(host: LocalHost, tmp_path: Any) -> None:
    (tmp_path / "it's").mkdir()
    wanted = (str(tmp_path / "it's"), str(tmp_path / "absent"))
    preload([(PathStates, {"paths": wanted}), (ArtifactsWhole, {"models": {}, "runtimes": {}})])
    found = read(PathStates, paths=wanted)
    assert found[wanted[1]] == PathState(kind="absent")
    assert found[wanted[0]].kind == "directory"
    assert read(ArtifactsWhole, models={}, runtimes={}) == {}
    assert host.round_trips == 1


def test_an_answer_about_many_paths_is_one_about_each(host: LocalHost) -> None:
    read(PathStates, paths=("/", "/no-such-path", "/etc"))
    assert read(PathStates, paths=("/no-such-path",)) == {"/no-such-path": PathState(kind="absent")}
    assert list(read(PathStates, paths=("/etc", "/"))) == ["/etc", "/"]
    assert host.round_trips == 1
    read(PathStates, paths=("/etc", "/usr"))
    assert host.round_trips == 2


def test_an_artifact_of_another_digest_is_another_question(host: LocalHost) -> None:
    read(ArtifactsWhole, models={"/m.gguf": "ab"}, runtimes={})
    read(ArtifactsWhole, models={"/m.gguf": "ab"}, runtimes={})
    assert host.round_trips == 1
    read(ArtifactsWhole, models={"/m.gguf": "cd"}, runtimes={})
    assert host.round_trips == 2


def test_another_host_has_answers_of_its_own(host: LocalHost) -> None:
    read(Number, shell="echo 1")
    other = LocalHost()
    with ctx_host.use(other):
        read(Number, shell="echo 1")
    assert (host.round_trips, other.round_trips) == (1, 1)


def test_what_is_known_already_is_not_asked_again(host: LocalHost) -> None:
    read(Number, shell="echo 1")
    preload([(Number, {"shell": "echo 1"})])
    assert host.round_trips == 1


def test_an_old_answer_is_asked_again_with_all_that_are_as_old(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    file = tmp_path / "n"
    file.write_text("1\n")
    shells = [f"cat {file}", f"head -n 1 {file}"]
    preload([(Number, {"shell": shell}) for shell in shells])
    now = reading.time.monotonic()
    monkeypatch.setattr(reading.time, "monotonic", lambda: now + reading.KEPT_FOR_S - 1)
    file.write_text("2\n")
    assert [read(Number, shell=shell) for shell in shells] == [1, 1]
    monkeypatch.setattr(reading.time, "monotonic", lambda: now + reading.KEPT_FOR_S + 1)
    assert [read(Number, shell=shell) for shell in shells] == [2, 2]
    assert host.round_trips == 2


def test_a_fact_is_asked_with_the_sudo_of_the_host_or_of_the_operation(host: LocalHost) -> None:
    by_data = LocalHost(_sudo=True, _sudo_password="secret")
    with ctx_host.use(by_data):
        preload([(Number, {"shell": "echo 1"})])
    assert by_data.sent[0]["_sudo"] is True
    assert by_data.sent[0]["_sudo_password"] == "secret"
    host.current_op_global_arguments = {"_sudo": True, "name": "Model"}
    preload([(Number, {"shell": "echo 1"})])
    assert host.sent[0]["_sudo"] is True


def test_where_su_takes_the_password_from_standard_input_each_is_asked_alone() -> None:
    host = LocalHost(_su_user="root", _su_password="secret")
    with ctx_state.use(host.state), ctx_host.use(host):
        preload([(Number, {"shell": "echo 1"})])
        assert host.round_trips == 0
        assert read(Number, shell="echo 1") == 1


@pytest.mark.parametrize("fault", [OSError("reset"), SSHException("no channel"), TimeoutError()])
def test_a_link_that_fails_meanwhile_is_left_for_the_reading_to_tell(
    host: LocalHost, fault: Exception
) -> None:
    host.fault = fault
    preload([(Number, {"shell": "echo 1"})])
    host.fault = None
    assert read(Number, shell="echo 1") == 1


def numbers_around(commands: Callable[[], Generator[Any]], file: Any) -> list[int]:
    """What one operation reads before its command, after it, and what the next one reads."""
    found = []

    @host_operation()
    def changing() -> Generator[Any]:
        found.append(read(Number, shell=f"cat {file}"))
        yield from commands()
        found.append(read(Number, shell=f"cat {file}"))

    for command in changing._inner():
        if isinstance(command, StringCommand):
            subprocess.run(["sh", "-c", command.get_raw_value()], check=True)
    found.append(read(Number, shell=f"cat {file}"))
    return found


@pytest.mark.parametrize("as_text", [True, False], ids=["a string", "a StringCommand"])
def test_a_command_that_runs_ends_what_was_read_before(
    host: LocalHost, tmp_path: Any, as_text: bool
) -> None:
    file = tmp_path / "n"
    file.write_text("1\n")
    shell = f"echo 2 > {file}"

    def commands() -> Generator[Any]:
        yield shell if as_text else StringCommand("sh", "-c", QuoteString(shell))

    host.state.is_executing = True
    assert numbers_around(commands, file) == [1, 2, 2]


def test_a_command_that_is_only_looked_at_ends_nothing(host: LocalHost, tmp_path: Any) -> None:
    file = tmp_path / "n"
    file.write_text("1\n")

    def commands() -> Generator[Any]:
        yield "true"

    assert numbers_around(commands, file) == [1, 1, 1]
    assert host.round_trips == 1


def test_the_script_of_a_batch_is_on_standard_input_and_in_no_argument_list(
    host: LocalHost,
) -> None:
    preload([(PathStates, {"paths": ("/etc/edgellm/probe.key",)})])
    assert "/etc/edgellm/probe.key" in host.sent[0]["_stdin"]
    assert host.commands == ["sh -s"]
