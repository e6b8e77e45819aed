"""TuningPlan + Settings -> the text of every file on the host. It decides nothing."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from edgellm import layout
from edgellm.release import ReleaseFile
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan

TEMPLATES = Path(__file__).parent.parent / "templates"


def release_files(
    plan: TuningPlan, settings: Settings, key_hashes: tuple[str, ...]
) -> tuple[ReleaseFile, ...]:
    """What lies in releases/<id>/ beside the links to model and runtime."""
    values = {
        "plan": plan,
        "settings": settings,
        "key_hashes": key_hashes,
        "keys_fingerprint": hashlib.sha256("\n".join(key_hashes).encode()).hexdigest()[:16],
    }
    files = [
        ReleaseFile(name=name, content=text(f"{name}.j2", **values), mode=mode)
        for name, mode in (
            ("entrypoint.sh", 0o755),
            ("server.env", 0o644),
            ("edgellm.service", 0o644),
            ("edgellm.slice", 0o644),
        )
    ]
    if settings.system_prompt:
        files.append(
            ReleaseFile(name="system_prompt.txt", content=settings.system_prompt, mode=0o644)
        )
    return tuple(files)


def api_keys_file(key_hashes: tuple[str, ...]) -> str:
    """One SHA-256 a line: no key can be read from it."""
    return "".join(f"{key_hash}\n" for key_hash in key_hashes)


def local_url(settings: Settings) -> str:
    """Where the server answers on its own host."""
    wildcard = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    address = wildcard.get(settings.bind_address, settings.bind_address)
    return f"http://{f'[{address}]' if ':' in address else address}:{settings.port}"


def text(template: str, **values: Any) -> str:
    """A template filled. A name that is not given is an error, never an empty string."""
    return _environment().get_template(template).render(paths=layout, **values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, ini and env files, not HTML
    )
