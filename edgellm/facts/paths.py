"""What lies at a set of paths: one script, one round trip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from pyinfra.api import StringCommand

from edgellm.facts.reading import FactByItem, unreadable
from edgellm.observed import PathState as PathState  # as its readers know it
from edgellm.remote import json_answer, script_command

T = TypeVar("T")


class PathStates(FactByItem[PathState]):
    """{path: PathState} for each path asked for. Reads each file whole: for small files only."""

    @classmethod
    def items(cls, paths: tuple[str, ...]) -> dict[str, str]:
        return {path: "" for path in paths}

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        return script_command("path_states", list(paths))

    def process(self, output: list[str]) -> dict[str, PathState]:
        return one_json_object(
            output, lambda found: {path: PathState(**state) for path, state in found.items()}
        )


class ArtifactsWhole(FactByItem[bool]):
    """{path: whole} for models (path -> sha256) and runtimes (directory -> id).

    Reads them whole, when nothing else wants the CPU: 400 MB in 0.3 s (x86-64 with SHA
    instructions) to 4 s (Cortex-A72 without).
    """

    @classmethod
    def items(cls, models: dict[str, str], runtimes: dict[str, str]) -> dict[str, str]:
        return {**models, **runtimes}

    def command(self, models: dict[str, str], runtimes: dict[str, str]) -> StringCommand:
        return script_command("artifact_states", {"models": models, "runtimes": runtimes})

    def process(self, output: list[str]) -> dict[str, bool]:
        return one_json_object(
            output, lambda found: {path: whole is True for path, whole in found.items()}
        )


def one_json_object(output: list[str], shape: Callable[[dict[str, Any]], T]) -> T:
    """The last line of a script of edgellm.remote, as `shape` makes it. Raises FactProcessError.

    Any other exception here would end the run for all hosts.
    """
    found = json_answer(output)
    if found is not None:
        with contextlib.suppress(LookupError, ValueError, TypeError, AttributeError):
            return shape(found)
    raise unreadable(f"not the script's JSON object: {''.join(output[-1:])[:120]!r}")
