"""Scripts that run on a host before our runtime is there, by `python3 -c SCRIPT`.

Each takes JSON on the command line (facts) or on standard input (operations: file contents and
secrets never appear in an argument list) and prints one JSON line. They need Python 3.10, import
nothing of this package, and are read as text by `script()`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra.api import QuoteString, StringCommand

_HERE = Path(__file__).parent


@cache
def script(name: str) -> str:
    """The text of remote/<name>.py."""
    return (_HERE / f"{name}.py").read_text(encoding="utf-8")


def script_command(name: str, argument: Any = None, *, stdin: Any = None) -> StringCommand:
    """The command that runs a script on a host, with its argument and standard input as JSON."""
    bits: list[Any] = ["python3", "-c", QuoteString(script(name))]
    if argument is not None:
        bits.append(QuoteString(json.dumps(argument, sort_keys=True)))
    if stdin is not None:
        return StringCommand(*bits, _stdin=json.dumps(stdin, sort_keys=True))
    return StringCommand(*bits)
