"""The common way's own venv: made once, and anew when its requirement files change."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
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
    venv = cache_dir / "bench" / "venv"
    mark = venv / ".made-of"
    made_of = hashlib.sha256(PINNED.read_bytes() + TORCH.read_bytes()).hexdigest()
    python = venv / "bin" / "python"
    with cache.locked(venv.with_suffix(".lock")):
        if mark.exists() and mark.read_text() == made_of and python.exists():
            return python
        say("installing the common way (torch, transformers, FastAPI) into a venv of its own, once")
        shutil.rmtree(venv, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(venv))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        # Complete as pinned; resolving would ask for torch's hash, see requirements/bench-torch.txt
        _run(*pip, "--no-deps", "--require-hashes", "-r", str(PINNED))
        _run(*pip, "-r", str(TORCH))
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
