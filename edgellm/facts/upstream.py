"""The operator's own servers that carry our drop-in, or are to carry it."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase, StringCommand

from edgellm import layout
from edgellm.facts.paths import one_json_object
from edgellm.remote import script_command


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamState:
    """`tuning` is what the main process was started with: None without one, "" untuned."""

    known: bool  # systemd has a unit of that name
    active: bool
    needs_daemon_reload: bool
    drop_in_sha256: str | None  # of our drop-in; None: it has none
    tuning: str | None


class UpstreamUnits(FactBase[dict[str, UpstreamState]]):
    """{unit: UpstreamState} of `unit`, and of each unit that has our drop-in."""

    def command(self, unit: str | None) -> StringCommand:
        return script_command(
            "upstream_units",
            {
                "unit_dir": layout.UNIT_DIR,
                "drop_in": layout.DROP_IN,
                "mark": layout.MARK,
                "unit": unit,
            },
        )

    def process(self, output: list[str]) -> dict[str, UpstreamState]:
        return one_json_object(
            output,
            lambda found: {unit: UpstreamState(**state) for unit, state in found.items()},
        )
