"""The operator's own servers that carry our drop-in, or are to carry it."""

from __future__ import annotations

from pyinfra.api import FactBase, StringCommand

from edgellm import layout
from edgellm.facts.paths import one_json_object
from edgellm.observed import UpstreamState as UpstreamState
from edgellm.remote import script_command


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
