"""Reading facts: each once, several in one round trip, and as our errors where one fails.

pyinfra does not keep facts: each `get_fact` is a round trip, and each operation asks its own. What
is read here is kept until a command of ours has changed the host (operations/containment.py says
so by `forget`), and for a minute at most. A deploy file that mixes in operations of pyinfra's own
calls `forget` after them, or has the old answers for that minute.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from paramiko import SSHException
from pyinfra import host
from pyinfra.api import FactBase, QuoteString, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import FactProcessError
from pyinfra.context import ctx_host

from edgellm.errors import EdgellmError

if TYPE_CHECKING:
    from pyinfra.api import Host

T = TypeVar("T")
Question = tuple[type[FactBase[Any]], dict[str, Any]]  # a fact, and its arguments

# Somebody else may change the host as well, and later waves begin long after the preparation.
KEPT_FOR_S = 60.0


class FactByItem(FactBase[dict[str, T]]):
    """A fact that answers item by item: one wide question holds the answers of narrow ones."""

    @classmethod
    def items(cls, *args: Any, **arguments: Any) -> dict[str, str]:
        """{key of the answer: what exactly is asked about it}, for these arguments."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known of one host: (fact, item, question) -> (when it was read, the value)."""

    answers: dict[tuple[type, str, str], tuple[float, Any]] = field(default_factory=dict)
    preloaded: tuple[Question, ...] = ()

    def keep(self, fact: type[FactBase[Any]], arguments: dict[str, Any], value: Any) -> None:
        now = time.monotonic()
        for item, question in _items(fact, arguments):
            if item is None:
                self.answers[fact, "", question] = (now, value)
            elif item in value:
                self.answers[fact, item, question] = (now, value[item])

    def find(self, fact: type[FactBase[Any]], arguments: dict[str, Any]) -> Any:
        """The value; None: not known. Raises _TooOld where it was known once."""
        found = {}
        for item, question in _items(fact, arguments):
            read_at, value = self.answers.get((fact, item or "", question), (0.0, None))
            if value is None:
                return None
            if time.monotonic() - read_at > KEPT_FOR_S:
                raise _TooOld
            if item is None:
                return value
            found[item] = value
        return found

    def has(self, fact: type[FactBase[Any]], arguments: dict[str, Any]) -> bool:
        try:
            return self.find(fact, arguments) is not None
        except _TooOld:
            return False


class _TooOld(Exception):
    """The answer was read too long ago."""


_known: WeakKeyDictionary[Host, _Known] = WeakKeyDictionary()
# Host name -> why its last fact could not be read: pyinfra logs the exception and drops it.
_faults: dict[str, str] = {}


def unreadable(why: str) -> FactProcessError:
    """For FactBase.process: the exception to raise, the only one that does not end the run."""
    if ctx_host.isset():
        _faults[host.name] = why
    return FactProcessError(why)


def read(fact: type[FactBase[T]], **arguments: Any) -> T:
    """The fact's value on the current host. Raises EdgellmError instead of returning None.

    _ignore_errors: pyinfra would otherwise fail the host at once, and end the whole run where it
    was the last one, before the reason could be noted.
    """
    known = _of_current_host()
    value: T | None
    try:
        value = known.find(fact, arguments)
    except _TooOld:
        # The others that were read with it are as old, and will be asked for next
        known.answers.clear()
        preload(known.preloaded)
        value = known.find(fact, arguments)
    if value is not None:
        return value
    _faults.pop(host.name, "")
    value = host.get_fact(fact, **arguments, _ignore_errors=True)
    if value is None:
        raise EdgellmError(
            host=host.name,
            what=f"reading {fact.__name__}",
            want="an answer over ssh that can be read",
            have=_faults.pop(host.name, "") or "none: the connection, sudo or the shell failed",
            fix=f"check the host's network and power, then run again with --limit {host.name}",
        )
    known.keep(fact, arguments, value)
    return value


def preload(questions: Iterable[Question]) -> None:
    """Reads all of these facts of the current host in one round trip, for `read` to find.

    Raises nothing for one that fails: `read` asks it again, alone, and says why.
    """
    known = _of_current_host()
    known.preloaded = tuple(questions)
    asked = [question for question in known.preloaded if _can_be_batched(*question)]
    asked = [question for question in asked if not known.has(*question)]
    if not asked:
        return
    arguments = _connector_arguments()
    if arguments.get("_su_password"):
        return  # it travels on the standard input that the script needs
    mark = secrets.token_hex(16)  # no output of a fact can look like it
    try:
        _, output = ctx_host.get().run_shell_command(
            StringCommand("sh", "-s"), **{**arguments, "_stdin": batch(asked, mark)}
        )
    except (OSError, SSHException):
        return
    for number, lines in replies(output.stdout_lines, mark):
        fact, fact_arguments = asked[number]
        try:
            value = fact().process(lines)
        except FactProcessError:
            _faults.pop(host.name, "")
        else:
            known.keep(fact, fact_arguments, value)


def forget(changed: Host) -> None:
    """Nothing that was read of this host counts any longer."""
    known = _known.get(changed)
    if known is not None:
        known.answers.clear()


def forget_current_host() -> None:
    """As `forget`, where a service has changed by itself."""
    forget(ctx_host.get())


def batch(questions: Sequence[Question], mark: str) -> str:
    """The shell script that runs each fact's command, a line of `mark` and exit status after each.

    It goes to the standard input of one `sh -s`: as an argument it would soon be too long. Each
    command has its own shell, as when it is run alone, so that none can break the others.
    """
    lines = []
    for number, (fact, arguments) in enumerate(questions):
        command = fact().command(**arguments)
        alone = StringCommand("sh", "-c", QuoteString(command), "</dev/null", "2>/dev/null")
        lines.append(alone.get_raw_value())
        # A line of its own, whether the output ended with one or not
        lines.append(f'printf "\\n{mark} {number} %d\\n" $?')
    return "\n".join(lines)


def replies(lines: Sequence[str], mark: str) -> Iterator[tuple[int, list[str]]]:
    """(number of the question, lines of its output), of those that were answered with exit 0."""
    reply: list[str] = []
    for line in lines:
        if not line.startswith(mark):
            reply.append(line)
            continue
        _, number, status = line.split()
        if reply and reply[-1] == "":
            del reply[-1]  # the line break before the mark
        if status == "0" and reply:
            yield int(number), reply
        reply = []


def _can_be_batched(fact: type[FactBase[Any]], arguments: dict[str, Any]) -> bool:
    """Not one that pyinfra asks more for than its command: a program, a state, another shell."""
    return (
        fact.shell_executable is None
        and fact.check_preconditions is FactBase.check_preconditions
        and fact().requires_command(**arguments) is None
    )


def _of_current_host() -> _Known:
    return _known.setdefault(ctx_host.get(), _Known())


def _items(
    fact: type[FactBase[Any]], arguments: dict[str, Any]
) -> Iterator[tuple[str | None, str]]:
    """(item, question about it); the item is None of a fact that answers as a whole."""
    if issubclass(fact, FactByItem):
        yield from fact.items(**arguments).items()
    else:
        yield None, json.dumps(arguments, sort_keys=True, default=repr)


def _connector_arguments() -> dict[str, Any]:
    """sudo and the like, as get_fact takes them: from the operation at hand, or the host's data."""
    current = ctx_host.get()
    given: Any = dict(current.current_op_global_arguments or {})
    arguments, _ = pop_global_arguments(current.state, current, given)
    return {key: value for key, value in arguments.items() if key in CONNECTOR_ARGUMENT_KEYS}
