"""What lies at a set of paths: one script, one round trip."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pyinfra.api import FactBase, StringCommand
from pyinfra.api.exceptions import FactProcessError

from edgellm.remote import script_command


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
        return {path: PathState(**state) for path, state in one_json_object(output).items()}


class ArtifactsWhole(FactBase[dict[str, bool]]):
    """{path: whole} for models (path -> sha256) and runtimes (directory -> id), by manifest."""

    def command(self, models: dict[str, str], runtimes: dict[str, str]) -> StringCommand:
        return script_command("artifact_states", {"models": models, "runtimes": runtimes})

    def process(self, output: list[str]) -> dict[str, bool]:
        return {path: whole is True for path, whole in one_json_object(output).items()}


def one_json_object(output: list[str]) -> dict[str, Any]:
    """The last line of a script of edgellm.remote. Raises FactProcessError."""
    try:
        found = json.loads(output[-1])
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise FactProcessError(f"want one JSON object, have {output[-1:]!r}")
    return found
