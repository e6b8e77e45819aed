"""What a verified host keeps of its proof, for the next run and for its next boot."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict

from pyinfra import host
from pyinfra.api import StringCommand

from edgellm import layout
from edgellm.facts.effective import Effective
from edgellm.facts.reading import read
from edgellm.hardware import HostProfile, RecordedHost
from edgellm.operations.containment import host_operation
from edgellm.operations.paths import HostFile
from edgellm.operations.service import confirmation
from edgellm.remote import script_command
from edgellm.tuning import TuningPlan


@host_operation()
def confirmed(release_id: str, plan: TuningPlan, profile: HostProfile) -> Generator[StringCommand]:
    """The host as it was planned for is recorded, and real time, where it is planned, may stay."""
    stale = False
    now = RecordedHost.of(profile)
    if profile.recorded != now:
        stale = True
        file = HostFile(path=layout.RECORDED, content=now.to_json_text())
        yield script_command("write_files", stdin=[asdict(file)])
    planned = plan.use_chrt and plan.scheduling.is_realtime
    if planned and read(Effective).realtime_confirmed != release_id:
        stale = True
        yield confirmation(release_id)
    if not stale:
        host.noop("the record says so already")
