"""The scripts of edgellm.remote run for real: `python3 -c SCRIPT [JSON]`, as a host runs them."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from edgellm.remote import script

WITHIN_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> Any:
        """Its one JSON line."""
        (line,) = self.stdout.splitlines()
        return json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Files can be given to this one without being root."""

    user: str
    group: str


@pytest.fixture(scope="session")
def account() -> Account:
    return Account(user=pwd.getpwuid(os.getuid()).pw_name, group=grp.getgrgid(os.getgid()).gr_name)


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """start("receive_file", job): the script as a process of ours, its streams as pipes."""

    def begin(
        name: str, argument: Any = None, *, replacing: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        text = script(name)
        for old, new in (replacing or {}).items():
            assert text.count(old) == 1, f"{old} is not once in {name}"
            text = text.replace(old, new)
        arguments = [] if argument is None else [json.dumps(argument)]
        return subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return begin


@pytest.fixture(scope="session")
def run(start: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., Done]:
    """run("path_states", ["/etc"]).answer: the script's JSON line; stdin= as bytes or JSON."""

    def to_the_end(name: str, argument: Any = None, *, stdin: Any = b"", **options: Any) -> Done:
        process = start(name, argument, **options)
        data = stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode()
        stdout, stderr = process.communicate(data, timeout=WITHIN_S)
        return Done(returncode=process.returncode, stdout=stdout.decode(), stderr=stderr.decode())

    return to_the_end
