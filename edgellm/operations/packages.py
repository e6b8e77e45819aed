"""Distribution packages that the server needs, by the host's own package manager."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pyinfra import host
from pyinfra.operations import apt, dnf

from edgellm.operations.containment import host_operation

# An index that is older is fetched again before an installation: mirrors drop old versions.
APT_INDEX_MAX_AGE_S = 24 * 3600


@host_operation()
def present(
    missing: tuple[str, ...], package_manager: str | None, lock_deadline_s: int
) -> Generator[Any]:
    """The packages that the host's probe missed. Nothing is asked of the host where none is."""
    if not missing:
        host.noop("numactl, libgomp, libstdc++ and chrt are there")
    elif package_manager == "dnf":
        yield from dnf.packages._inner(packages=list(missing))
    else:
        yield from apt.packages._inner(
            packages=list(missing),
            update=True,
            cache_time=APT_INDEX_MAX_AGE_S,
            no_recommends=True,
            # A box that has just booted often runs unattended-upgrades and holds the lock
            extra_install_args=f"-o DPkg::Lock::Timeout={lock_deadline_s}",
        )
