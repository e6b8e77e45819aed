"""Venvs of what ours is measured against: made once, and anew when their requirements change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.weights import Say
from edgellm import cache

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PINNED = REQUIREMENTS / "bench.txt"
TORCH = REQUIREMENTS / "bench-torch.txt"


class VenvError(Exception):
    """The venv cannot be made; the message is pip's own."""


def common_venv(cache_dir: Path, say: Say) -> Path:
    """-> the venv's python. Raises VenvError."""
    return pinned_venv(
        cache_dir / "bench" / "venv",
        # Complete as pinned; resolving would ask for torch's hash, see requirements/bench-torch.txt
        {PINNED: ("--no-deps", "--require-hashes"), TORCH: ()},
        say,
        "the common way (torch, transformers, FastAPI)",
    )


def pinned_venv(
    venv: Path, requirements: Mapping[Path, Sequence[str]], say: Say, what: str
) -> Path:
    """`requirements`: file -> options of pip for it. -> the venv's python. Raises VenvError."""
    mark = venv / ".made-of"
    made_of = hashlib.sha256(b"".join(path.read_bytes() for path in requirements)).hexdigest()
    python = venv / "bin" / "python"
    with cache.locked(venv.with_suffix(".lock")):
        if mark.exists() and mark.read_text() == made_of and python.exists():
            return python
        say(f"installing {what} into a venv of its own, once")
        shutil.rmtree(venv, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(venv))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for path, options in requirements.items():
            _run(*pip, *options, "-r", str(path))
        mark.write_text(made_of)
    return python


def installed_version(python: Path, package: str) -> str:
    """'2.13.0+cpu', as that venv has it."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return _run(str(python), "-c", code).strip()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise VenvError("; ".join(lines[-3:]) or f"exit {done.returncode}")
    return done.stdout
