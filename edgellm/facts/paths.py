"""What lies at a set of paths: one script, one round trip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pyinfra.api import FactBase, StringCommand

from edgellm.facts.reading import unreadable
from edgellm.remote import json_answer, script_command

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathState:
    """`kind`: file, directory, link, other, absent; the rest is None where it has no meaning."""

    kind: str
    mode: str | None = None  # "0644"
    owner: str | None = None
    group: str | None = None
    sha256: str | None = None  # of a file
    target: str | None = None  # of a link


class PathStates(FactBase[dict[str, PathState]]):
    """{path: PathState} for each path asked for. Reads each file whole: for small files only."""

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        return script_command("path_states", list(paths))

    def process(self, output: list[str]) -> dict[str, PathState]:
        return one_json_object(
            output, lambda found: {path: PathState(**state) for path, state in found.items()}
        )


class ArtifactsWhole(FactBase[dict[str, bool]]):
    """{path: whole} for models (path -> sha256) and runtimes (directory -> id), by manifest."""

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
