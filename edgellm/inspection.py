"""All that drift.compare wants to know of the current host, read in one round trip."""

from __future__ import annotations

from edgellm import layout
from edgellm.desired import DesiredState
from edgellm.drift import KnobState, compare
from edgellm.facts import reading
from edgellm.facts.account import ServiceAccount
from edgellm.facts.cores import ReservedSlices
from edgellm.facts.effective import Effective
from edgellm.facts.host_profile import HostProfileFact
from edgellm.facts.installed import Installed
from edgellm.facts.kernel import Governors, Swappiness
from edgellm.facts.paths import ArtifactsWhole, PathStates
from edgellm.facts.reading import Question, read
from edgellm.facts.service import Service
from edgellm.facts.upstream import UpstreamUnits
from edgellm.facts.zram import OwnZram
from edgellm.observed import ObservedState
from edgellm.operations import kernel, zram


def questions(desired: DesiredState) -> tuple[Question, ...]:
    """Every fact that a comparison and the operations of a roll-out ask, for one round trip."""
    plan = desired.plan
    records = (kernel.SWAPPINESS_BEFORE, kernel.GOVERNORS_BEFORE)
    asked: list[Question] = [
        (HostProfileFact, {}),
        (PathStates, {"paths": (*looked_at(desired), *records)}),
        (ArtifactsWhole, artifacts(desired)),
        (Swappiness, {}),
        (ReservedSlices, {}),
        (ServiceAccount, {}),
        (UpstreamUnits, {"unit": desired.upstream_unit}),
        (Service, {}),
        (Effective, {}),
        (Installed, {}),
    ]
    if plan.cpu_governor is not None:
        asked.append((Governors, {}))
    units = {zram.OWN, zram.unit_of(plan.zram) or zram.OWN}
    asked += [(OwnZram, {"unit": unit.name, "device": unit.device}) for unit in units]
    return tuple(asked)


def looked_at(desired: DesiredState) -> tuple[str, ...]:
    """Every path of the host that a comparison looks at."""
    return (*desired.paths, layout.STATE_DIR)


def artifacts(desired: DesiredState) -> dict[str, dict[str, str]]:
    """The arguments of ArtifactsWhole for a host's model and runtime."""
    models = {}
    if desired.model_path is not None and desired.model_sha256 is not None:
        models = {desired.model_path: desired.model_sha256}
    return {"models": models, "runtimes": {desired.runtime_directory: desired.runtime_id}}


def observed_state(desired: DesiredState) -> ObservedState:
    """The current host as it is. Raises EdgellmError where a fact cannot be read."""
    reading.preload(questions(desired))
    unit = desired.upstream_unit
    paths = read(PathStates, paths=looked_at(desired))
    whole = read(ArtifactsWhole, **artifacts(desired))
    return ObservedState(
        profile=read(HostProfileFact),
        paths=paths,
        whole=whole,
        service=read(Service),
        effective=read(Effective),
        upstream=None if unit is None else read(UpstreamUnits, unit=unit).get(unit),
    )


def knobs_of_running_server(desired: DesiredState) -> tuple[KnobState, ...]:
    """Every knob, once the server is ready: what was read while it still loaded is read again."""
    observed = observed_state(desired)
    if observed.effective is None or observed.effective.service_state != "active":
        reading.forget_current_host()
        observed = observed_state(desired)
    return compare(desired, observed)
