"""Renderers of one run: the dict of fleet.json -> every other file of reports/<run>/.

They take fleet.json alone, so an old run's files can be made again from it. docs/reports.md says
what each file is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgellm.reports import html, junit, prometheus, retry, schema


def files(fleet_json: Mapping[str, Any]) -> dict[str, str]:
    """{name: text} of all that lies beside fleet.json. Raises ParseError.

    A list of hosts for --limit is there only where it has hosts: an empty one would limit nothing.
    """
    fleet = schema.load(fleet_json)
    return {
        "fleet.html": html.page(fleet),
        "junit.xml": junit.xml(fleet),
        "fleet.prom": prometheus.text(fleet),
        **retry.files(fleet),
    }
