"""What a bug report needs of a host, fetched in one round trip and packed on this machine."""

from __future__ import annotations

import gzip
import io
import os
import secrets
import tarfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra import host, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand

from edgellm import recorder
from edgellm.diagnosis import Collected, bundle, collected
from edgellm.errors import EdgellmError
from edgellm.operations.containment import connector_arguments, host_operation

SCRIPT = Path(__file__).parents[1] / "remote" / "diagnose.sh"
ENDS_WITHIN_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What this run knows of the host before it has looked closer."""

    about: Mapping[str, Any]
    documents: Mapping[str, Any]  # plain values: profile, plan, knobs
    absent: Mapping[str, str]  # which of them is not there, and why
    secrets: tuple[str, ...] = field(repr=False)  # never to be written


@host_operation()
def bundled(evidence: Evidence) -> Generator[FunctionCommand]:
    """reports/<run>/diagnose/<host>.tar.gz is there. Reads only: nothing on the host changes."""
    if not state.is_executing:
        return
    mark = new_mark()
    _, output = host.run_shell_command(
        command(mark), **{**connector_arguments(host), "_timeout": ENDS_WITHIN_S}
    )
    found = collected(output.stdout_lines, mark)
    if not found.sections and not found.complete:
        raise EdgellmError(
            host=host.name,
            what="diagnose",
            want="the output of a shell script",
            have=" ".join(output.stderr_lines)[:400] or "none",
            fix="check `ssh <host> sh -c true`, and sudo where the login is not root",
        )
    files = bundle(
        str(host.name),
        found,
        about=evidence.about,
        documents=evidence.documents,
        absent=evidence.absent,
        secrets=evidence.secrets,
    )
    path = write(str(host.name), files, recorder.run_directory() / "diagnose")
    host.log(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    host.noop(_said(found, evidence))
    yield from ()


def new_mark() -> str:
    """No line of a log can look like it."""
    return secrets.token_hex(16)


def command(mark: str) -> StringCommand:
    """diagnose.sh with this mark, without its comments: it goes as one argument."""
    return StringCommand("sh", "-c", QuoteString(f"mark={mark}\n{_script()}"))


@cache
def _script() -> str:
    lines = SCRIPT.read_text(encoding="ascii").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def write(name: str, files: Mapping[str, str], directory: Path) -> Path:
    """One archive a host, whole or not at all, for its owner alone to read."""
    safe = "".join(char if char.isalnum() or char in "._-" else "_" for char in name).lstrip(".")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{safe or 'host'}.tar.gz"
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file, text in files.items():
            content = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{safe}/{file}")
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_bytes(packed.getvalue())
    partial.replace(path)
    return path


def _said(found: Collected, evidence: Evidence) -> str:
    holes = [*(f"{name}: {why}" for name, why in evidence.absent.items()), *found.missing]
    if not found.complete:
        holes.append("what comes after that: the host's answer ended before its end")
    return f"not read: {'; '.join(holes)}" if holes else "all of it could be read"
