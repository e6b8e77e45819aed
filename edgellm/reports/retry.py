"""The hosts that a person has to come back to, and the exact command for them.

pyinfra's --limit takes one name or pattern and may be given many times; it knows no list with
commas. A name is a pattern to it (fnmatch).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from edgellm.reports.schema import Fleet, Host, Status

# failed.txt: what the next run has to do again. A drifted host is an audit's: a roll-out mends it.
LISTS = {
    "failed.txt": (Status.FAILED, Status.UNREACHABLE),
    "pending.txt": (Status.PENDING,),
    "drifted.txt": (Status.DRIFTED,),
}
MOST_NAMED = 12  # hosts by name in a command; more are read from the files
DEFAULT_INVENTORY = "inventories/factory.py"
REPORTS_DIR = '"${EDGELLM_REPORTS_DIR:-reports}"'

# Options with a value that a retry must not repeat: who it is for is what changes.
_DROPPED = frozenset({"--limit", "--exclude"})
_SECRET_OPTIONS = frozenset(
    {"--ssh-password", "--password", "--ssh-key-password", "--key-password"}
)
# api_key_env=LLM_KEY is part of the command; a key that was put there by mistake is not
_VARIABLE = re.compile(r"[A-Z]+(_[A-Z0-9]+)+")
_SECRET_DATA = re.compile(r"key|token|password|secret|prompt", re.IGNORECASE)


def names(name: str, fleet: Fleet) -> str:
    """A host a line; "" where the list has none."""
    return "".join(f"{pattern(host.name)}\n" for host in listed(fleet, name))


def commands(fleet: Fleet) -> str:
    """A command a line; "" where there is nothing to do again."""
    return "".join(f"{command(fleet, names)}\n" for names in asked(fleet))


RENDERERS: Mapping[str, Callable[[Fleet], str]] = {
    **{name: partial(names, name) for name in LISTS},
    "retry.txt": commands,
}


def asked(fleet: Fleet) -> tuple[tuple[str, ...], ...]:
    """The lists that a command is told for: failed and pending together, drifted by itself."""
    again = tuple(name for name in ("failed.txt", "pending.txt") if listed(fleet, name))
    drifted = tuple(name for name in ("drifted.txt",) if listed(fleet, name))
    return tuple(names for names in (again, drifted) if names)


def listed(fleet: Fleet, name: str) -> tuple[Host, ...]:
    """The hosts of a list, by name."""
    hosts = (host for host in fleet.hosts if host.status in LISTS[name])
    return tuple(sorted(hosts, key=lambda host: host.name))


def command(fleet: Fleet, names: Sequence[str]) -> str:
    """One line for a shell, run from where the run was started.

    Where it reads the lists it looks for them first: without one it would run on all hosts.
    """
    hosts = [host for name in names for host in listed(fleet, name)]
    run = list(fleet.invocation) or ["pyinfra", DEFAULT_INVENTORY, f"deploys/{fleet.deploy}.py"]
    if "drifted.txt" in names:
        # These find, a roll-out mends.
        run = [_roll_out(word) for word in run]
    base = shlex.join(run)
    if len(hosts) <= MOST_NAMED:
        return " ".join([base, *(f"--limit {shlex.quote(pattern(host.name))}" for host in hosts)])
    paths = [f"{REPORTS_DIR}/{shlex.quote(fleet.run_id)}/{name}" for name in names]
    there = " && ".join(f"test -s {path}" for path in paths)
    return f"{there} && {base} $(sed 's/^/--limit=/' {' '.join(paths)})"


def _roll_out(word: str) -> str:
    path = Path(word)
    finds = path.parent.name == "deploys" and path.name in ("audit.py", "verify.py")
    return str(path.with_name("qwen.py")) if finds else word


def pattern(name: str) -> str:
    """A host's name as --limit finds it, without anything that a shell would split or expand."""
    return re.sub(r"[^A-Za-z0-9@%+=:,./_-]", "?", name)


def invocation_of(argv: Sequence[str]) -> list[str]:
    """sys.argv -> the command to be given again: no --limit, no secrets, no path of pyinfra."""
    kept = ["pyinfra"]
    words = iter(argv[1:])
    for word in words:
        option, equals, value = word.partition("=")
        if option in _DROPPED or option in _SECRET_OPTIONS:
            if not equals:
                next(words, None)
        elif option == "--data":
            value = value if equals else next(words, "")
            key = value.partition("=")[0]
            named = key.endswith("_env") and _VARIABLE.fullmatch(value.partition("=")[2])
            secret = _SECRET_DATA.search(key) is not None and not named
            kept += ["--data", f"{key}=…" if secret else value]
        else:
            kept.append(word)
    return [_without_secrets(word) for word in kept]


def _without_secrets(word: str) -> str:
    """An address without who asks for it, nor the query that signs it."""
    word = re.sub(r"(://)[^/\s@]*@", r"\g<1>…@", word)
    return re.sub(r"(https?://[^\s?#]*)[?#]\S*", r"\g<1>?…", word)
