"""What lies under /opt/edgellm, and what of it no kept release needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyinfra.api import FactBase, StringCommand

from edgellm import layout
from edgellm.facts.paths import one_json_object
from edgellm.remote import script_command


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRelease:
    """One directory under releases/. `links`: the names of the model file and the runtime."""

    id: str
    mtime_ns: int
    links: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallDir:
    """Names as they lie there; a model's manifest is listed beside it."""

    releases: tuple[InstalledRelease, ...]
    models: tuple[str, ...]
    runtimes: tuple[str, ...]
    current: str | None
    previous: str | None
    leftovers: tuple[str, ...] = ()  # paths that cut transfers and unpackings have left

    def prunable(self, keep: int) -> tuple[str, ...]:
        """Paths to remove so that `keep` releases stay: current, previous, then the newest."""
        held = {self.current, self.previous}
        newest_first = sorted(
            self.releases, key=lambda r: (r.id in held, r.mtime_ns, r.id), reverse=True
        )
        kept, gone = newest_first[:keep], newest_first[keep:]
        needed = {link for release in kept for link in release.links}
        manifests = {f"{link}.manifest.json" for link in needed}
        return (
            *(layout.release_directory(release.id) for release in gone),
            *(f"{layout.MODELS}/{name}" for name in self.models if name not in needed | manifests),
            *(f"{layout.RUNTIMES}/{name}" for name in self.runtimes if name not in needed),
            *self.leftovers,
        )


class Installed(FactBase[InstallDir]):
    """Reads names and links only."""

    def command(self) -> StringCommand:
        return script_command(
            "installed",
            {
                "releases": layout.RELEASES,
                "models": layout.MODELS,
                "runtimes": layout.RUNTIMES,
                "current": layout.CURRENT,
                "previous": layout.PREVIOUS,
            },
        )

    def process(self, output: list[str]) -> InstallDir:
        return one_json_object(output, _install_dir)


def _install_dir(found: dict[str, Any]) -> InstallDir:
    return InstallDir(
        releases=tuple(
            InstalledRelease(id=name, mtime_ns=item["mtime_ns"], links=tuple(item["links"]))
            for name, item in found["releases"].items()
        ),
        models=tuple(found["models"]),
        runtimes=tuple(found["runtimes"]),
        current=found["current"],
        previous=found["previous"],
        leftovers=tuple(found["leftovers"]),
    )
