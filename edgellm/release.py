"""What is placed on a host, named by its content: model, runtime, and the release of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgellm.hardware import Arch

ID_HEX_DIGITS = 16  # 64 bits: short enough for a path, no accidental collision in any fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArtifact:
    """A verified model file on the control machine."""

    name: str  # "qwen2.5-0.5b-instruct-q4_0"
    sha256: str
    size_bytes: int
    path: Path  # <cache>/models/<sha256>.gguf


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Everything a host's Python needs to serve, as one archive on the control machine."""

    id: str  # over the unpacked content and the architecture, not over the archive's bytes
    arch: Arch
    archive: Path  # <cache>/runtimes/<id>.tar.gz
    sha256: str  # of the archive
    size_bytes: int  # of the archive
    unpacked_size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseFile:
    """One rendered file of a release."""

    name: str  # "entrypoint.sh", "app/main.py"
    content: str
    mode: int  # 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One state of a host. Equal content, equal id: a second roll-out finds it in place."""

    id: str
    model_sha256: str | None  # None: it has no model, another server has
    runtime_id: str
    files: tuple[ReleaseFile, ...]  # sorted by name

    @classmethod
    def of(
        cls, *, model_sha256: str | None, runtime_id: str, files: Iterable[ReleaseFile]
    ) -> Release:
        """The release of this content. The order of `files` does not matter."""
        ordered = tuple(sorted(files, key=lambda file: file.name))
        return cls(
            id=release_id(model_sha256=model_sha256, runtime_id=runtime_id, files=ordered),
            model_sha256=model_sha256,
            runtime_id=runtime_id,
            files=ordered,
        )


def release_id(*, model_sha256: str | None, runtime_id: str, files: Iterable[ReleaseFile]) -> str:
    """The first 16 hex digits of the SHA-256 over model, runtime and every rendered file.

    Raises ValueError where two files have one name: the release would not be what its id says.
    """
    rows = sorted((file.name, file.mode, file.content) for file in files)
    names = [name for name, _, _ in rows]
    if len(set(names)) != len(names):
        raise ValueError(f"two files of one name in a release: {names}")
    # JSON sets the boundaries: no two different releases have one text.
    text = json.dumps([model_sha256, runtime_id, rows], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]
