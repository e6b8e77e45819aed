"""Scripts that run on a host before our runtime is there, by `python3 -c SCRIPT`.

Each takes JSON on the command line (facts) or on standard input (operations: file contents and
secrets never appear in an argument list) and prints one JSON line. They need Python 3.10, and are
sent as text by `script()`, which puts what several of them share in the place of its import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra.api import QuoteString, StringCommand

_HERE = Path(__file__).parent
_SHARED = re.compile(r"^from edgellm\.remote\.(\w+) import .*\n", re.MULTILINE)


@cache
def script(name: str) -> str:
    """The text of remote/<name>.py, with the shared text in the place of its import."""
    text = (_HERE / f"{name}.py").read_text(encoding="utf-8")
    return _SHARED.sub(lambda found: script(found[1]), text)


def script_command(name: str, argument: Any = None, *, stdin: Any = None) -> StringCommand:
    """The command that runs a script on a host, with its argument and standard input as JSON."""
    bits: list[Any] = ["python3", "-c", QuoteString(script(name))]
    if argument is not None:
        bits.append(QuoteString(json.dumps(argument, sort_keys=True)))
    if stdin is not None:
        return StringCommand(*bits, _stdin=json.dumps(stdin, sort_keys=True))
    return StringCommand(*bits)


def json_answer(stdout_lines: Sequence[str]) -> dict[str, Any] | None:
    """The JSON object in the last line of a script's output; None: there is none."""
    try:
        answer = json.loads(stdout_lines[-1])
    except (IndexError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None
