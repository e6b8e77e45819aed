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
    plan: TuningPlan,
    settings: Settings,
    key_hashes: tuple[str, ...],
    *,
    upstream_key_hash: str | None = None,
    app_files: tuple[ReleaseFile, ...] = (),
) -> tuple[ReleaseFile, ...]:
    """What lies in releases/<id>/ beside the links to model and runtime.

    `app_files`: the operator's own app, as it is to lie under app/.
    """
    values = {
        "plan": plan,
        "settings": settings,
        "key_hashes": key_hashes,
        "keys_fingerprint": hashlib.sha256("\n".join(key_hashes).encode()).hexdigest()[:16],
        "upstream_key_hash": upstream_key_hash,
    }
    files = [
        ReleaseFile(name=name, content=text(f"{name}.j2", **values), mode=mode)
        for name, mode in (
            ("entrypoint.sh", 0o755),
            ("server.env", 0o644),
            *((unit, 0o644) for unit in layout.UNITS),
        )
    ]
    files.extend(app_files)
    if settings.upstream_unit:
        name = f"{layout.UPSTREAM_FOLDER}/{settings.upstream_unit}.conf"
        files.append(ReleaseFile(name=name, content=upstream_drop_in(plan), mode=0o644))
    if settings.system_prompt:
        files.append(
            ReleaseFile(name="system_prompt.txt", content=settings.system_prompt, mode=0o644)
        )
    return tuple(files)


def upstream_drop_in(plan: TuningPlan) -> str:
    """The drop-in of the operator's own server, with a fingerprint of itself in its environment."""
    unnamed = text("upstream.conf.j2", plan=plan, fingerprint="")
    fingerprint = hashlib.sha256(unnamed.encode()).hexdigest()[:16]
    return text("upstream.conf.j2", plan=plan, fingerprint=fingerprint)


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
