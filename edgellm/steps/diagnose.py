"""A bundle a host, for a bug report."""

from __future__ import annotations

from typing import Any

from pyinfra import host

from edgellm import prepare, recorder
from edgellm.errors import EdgellmError
from edgellm.facts.host_profile import HostProfileFact
from edgellm.facts.reading import read
from edgellm.hardware import plain
from edgellm.operations import diagnose
from edgellm.operations.diagnose import Evidence
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Diagnose")
def collect_evidence(known: Context | EdgellmError) -> None:
    """`known`: also why there is no plan, which is no reason not to look."""
    about: dict[str, Any] = {"host": host.name, "run": recorder.run_directory().name}
    documents: dict[str, Any] = {}
    absent: dict[str, str] = {}
    try:
        profile = read(HostProfileFact)
        documents["profile"] = plain(profile)
        about |= {"kernel": profile.kernel.release, "hardware": profile.hardware_class}
    except EdgellmError as error:
        absent["profile"] = str(error)
    if isinstance(known, EdgellmError):
        absent |= {"plan": str(known), "knobs": "no plan to compare them with"}
    else:
        about |= {"release due": known.release.id, "model": known.settings.model_name}
        documents["plan"] = plain(known.plan)
        documents["knobs"] = [plain(knob) for knob in recorder.knobs_of(host)]
    diagnose.bundled(
        name="Evidence collected",
        evidence=Evidence(
            about=about,
            documents=documents,
            absent=absent,
            secrets=prepare.secrets_of(host),
        ),
    )
