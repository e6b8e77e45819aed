"""What systemd says of the service, and which release its main process runs."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

UNIT = "edgellm.service"
SLICE = "edgellm.slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """`running_release` comes from the environment of the running process, not from a file."""

    active: bool
    enabled: bool
    needs_daemon_reload: bool
    running_release: str | None
    current_release: str | None  # where /opt/edgellm/current points
    previous_release: str | None


class Service(FactBase[ServiceState]):
    """State of edgellm.service."""

    def command(self) -> str:
        return (
            f"systemctl show {UNIT} --property=ActiveState,UnitFileState,NeedDaemonReload,MainPID;"
            f"echo SliceReload=$(systemctl show {SLICE} --property=NeedDaemonReload --value);"
            f"pid=$(systemctl show {UNIT} --property=MainPID --value);"
            'echo Release=$(tr "\\000" "\\n" 2>/dev/null </proc/${pid:-0}/environ'
            " | sed -n s/^EDGELLM_RELEASE=//p);"
            "echo Current=$(readlink /opt/edgellm/current);"
            "echo Previous=$(readlink /opt/edgellm/previous)"
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
        )


def _release(target: str | None) -> str | None:
    """'releases/3f2a…' -> '3f2a…'."""
    return target.rsplit("/", 1)[-1] if target else None
