"""What systemd says of the service, and which release its main process runs."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

from edgellm.layout import CURRENT, INSTALL_DIR, PREVIOUS, RELEASES

UNIT = "edgellm.service"
SLICE = "edgellm.slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """`running_release` comes from the environment of the running process, not from a file."""

    active: bool
    enabled: bool
    needs_daemon_reload: bool
    running_release: str | None
    current_release: str | None  # where /opt/edgellm/current points; None: to no release of ours
    previous_release: str | None
    runs_replaced_files: bool = (
        False  # it maps a model or a library that is no longer the one there
    )


class Service(FactBase[ServiceState]):
    """State of edgellm.service."""

    def command(self) -> str:
        return (
            f"systemctl show {UNIT} --property=ActiveState,UnitFileState,NeedDaemonReload,MainPID;"
            f"echo SliceReload=$(systemctl show {SLICE} --property=NeedDaemonReload --value);"
            f"pid=$(systemctl show {UNIT} --property=MainPID --value);"
            'echo Release=$(tr "\\000" "\\n" 2>/dev/null </proc/${pid:-0}/environ'
            " | sed -n s/^EDGELLM_RELEASE=//p);"
            f"echo Replaced=$(grep -c ' {INSTALL_DIR}/.*(deleted)$' 2>/dev/null"
            " /proc/${pid:-0}/maps);"
            f"echo Current=$(readlink -e {CURRENT});"
            f"echo Previous=$(readlink -e {PREVIOUS})"
        )

    def process(self, output: list[str]) -> ServiceState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        return ServiceState(
            active=values.get("ActiveState") == "active",
            enabled=values.get("UnitFileState") == "enabled",
            needs_daemon_reload="yes"
            in (values.get("NeedDaemonReload"), values.get("SliceReload")),
            running_release=values.get("Release") or None,
            current_release=_release(values.get("Current")),
            previous_release=_release(values.get("Previous")),
            runs_replaced_files=values.get("Replaced", "") not in ("", "0"),
        )


def _release(target: str | None) -> str | None:
    """'/opt/edgellm/releases/3f2a…' -> '3f2a…'; None where a link leads nowhere or elsewhere."""
    directory, _, name = (target or "").rpartition("/")
    return name if directory == RELEASES else None
