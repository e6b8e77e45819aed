"""Other slices kept off the server's cores, and let back on.

The drop-ins in /etc/systemd/system carry it over a boot; systemd applies them to running slices
when it reloads its units.
"""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from edgellm.cpuset import CpuSet
from edgellm.facts.cores import CGROUPS, CPUS_BEFORE, ReservedSlices
from edgellm.facts.reading import read
from edgellm.operations.containment import host_operation
from edgellm.operations.kernel import recorded

ALL = CpuSet(cpus=())
ALL_CPUS = f"{CGROUPS}/cpuset.cpus.effective"  # of the root


@host_operation()
def reserved(cpus: CpuSet | None) -> Generator[StringCommand]:
    """system.slice and user.slice have these cores and no others. None: those that they had before.

    The drop-ins are there already, or are gone.
    """
    slices = read(ReservedSlices)
    stale = False
    for name, found in slices.items():
        if cpus is not None and found.recorded is None:
            stale = True
            # What systemd has set comes back with a reload; what somebody has written does not
            by_hand = ALL if found.allowed_cpus.cpus else found.cpus
            yield recorded(f"{CPUS_BEFORE}.{name}", f"echo '{by_hand}'")
    # A reload that others left pending is theirs, unless cores are kept off these slices
    ours = cpus is not None or any(
        found.recorded is not None or found.allowed_cpus.cpus for found in slices.values()
    )
    # NeedDaemonReload stays "no" for a new drop-in of a slice that has no file of its own
    unread = cpus is not None and any(found.allowed_cpus != cpus for found in slices.values())
    if ours and (unread or any(found.needs_daemon_reload for found in slices.values())):
        stale = True
        yield StringCommand("systemctl", "daemon-reload")
        slices = read(ReservedSlices)
    for name, found in slices.items():
        wanted = cpus if cpus is not None else found.recorded
        # systemd leaves the old set in the cgroup of a slice whose AllowedCPUs= are gone
        # (systemd#43846); with another's AllowedCPUs= it has set that one itself
        others = cpus is None and found.allowed_cpus.cpus
        if wanted is not None and found.file and found.cpus != wanted and not others:
            stale = True
            # The kernel refuses to empty the set of a slice that has processes
            said = ("echo", QuoteString(str(wanted))) if wanted.cpus else ("cat", ALL_CPUS)
            yield StringCommand(*said, ">", QuoteString(found.file))
        if cpus is None and found.recorded is not None:
            stale = True
            yield StringCommand("rm", QuoteString(f"{CPUS_BEFORE}.{name}"))
    if not stale:
        host.noop("system.slice and user.slice have the cores of the plan")
