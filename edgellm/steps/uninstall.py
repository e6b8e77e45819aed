"""The host as it was: what a roll-out made is removed, what it changed is put back.

Packages that were installed stay: others may need them by now.
"""

from __future__ import annotations

from pyinfra.operations import systemd

from edgellm import layout
from edgellm.operations import cores, kernel, paths, service, upstream, zram
from edgellm.steps.step import step


@step("Uninstall")
def remove_everything() -> None:
    # Before our slice is stopped, which would stop them with it
    upstream.tuned(name="Upstream servers as they were", unit=None, drop_in=None)
    service.stopped(name="Service stopped and disabled")
    zram.own_absent(name="Our zram swap off")
    kernel.swappiness_in_force(name="vm.swappiness as before", swappiness=None)
    kernel.governor_in_force(name="Clock governor as before", governor=None)
    # What was there before lies among the files: first what systemd must forget, then those
    paths.absent(
        name="No cores reserved at boot",
        paths=tuple(map(layout.drop_in_path, layout.RESERVED_SLICES)),
    )
    cores.reserved(name="No cores reserved", cpus=None)
    files = paths.absent(name="Files of edgellm absent", paths=layout.EVERYTHING)
    systemd.daemon_reload(name="systemd has forgotten the units", _if=files.did_change)
    service.account_absent(name="System account edgellm absent")
