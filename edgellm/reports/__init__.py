"""Renderers of one run: fleet.json, read by schema.load -> every other file of reports/<run>/.

They take fleet.json alone, so an old run's files can be made again from it. docs/reports.md says
what each file is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgellm.reports.html import page
from edgellm.reports.junit import xml
from edgellm.reports.prometheus import text
from edgellm.reports.retry import RENDERERS as LISTS
from edgellm.reports.schema import Fleet

# A file's text; "": there is nothing to be written to it.
RENDERERS: Mapping[str, Callable[[Fleet], str]] = {
    **LISTS,
    "fleet.prom": text,
    "junit.xml": xml,
    "fleet.html": page,
}
