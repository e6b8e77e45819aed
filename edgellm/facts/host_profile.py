"""The one fact of a host: everything the plan depends on, in one round trip."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

from pyinfra.api import FactBase
from typing_extensions import override

from edgellm.errors import ParseError
from edgellm.facts.reading import unreadable
from edgellm.hardware import HostProfile
from edgellm.parse import parse_profile

PROBE_SCRIPT = Path(__file__).with_name("host_probe.sh")


class HostProfileFact(FactBase[HostProfile]):
    """HostProfile of a host; the same with and without _sudo, but for what only root may read."""

    @override
    def command(self) -> str:
        return probe_command()

    @override
    def process(self, output: list[str]) -> HostProfile:
        try:
            return parse_profile("\n".join(output), control_time_s=time.time())
        except ParseError as error:
            # The one exception that fails this host alone: any other ends the run for all.
            raise unreadable(str(error)) from error


@cache
def probe_command() -> str:
    """host_probe.sh without its comments: pyinfra quotes it for `sh -c` on the command line."""
    lines = PROBE_SCRIPT.read_text(encoding="ascii").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
