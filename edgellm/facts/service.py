"""What systemd says of service and socket, which release the main process runs, and its units."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase, StringCommand

from edgellm import layout
from edgellm.facts.paths import one_json_object
from edgellm.layout import CURRENT, INSTALL_DIR, PREVIOUS, RELEASES, UNIT_DIR, UNITS
from edgellm.observed import ServiceState as ServiceState
from edgellm.remote import script_command

UNIT = "edgellm.service"
SOCKET = "edgellm.socket"
SLICE = "edgellm.slice"


class Service(FactBase[ServiceState]):
    """State of edgellm.service and edgellm.socket."""

    def command(self) -> str:
        environ = 'tr "\\000" "\\n" 2>/dev/null </proc/${pid:-0}/environ'
        return (
            f"systemctl show {UNIT} --property=ActiveState,UnitFileState,NeedDaemonReload,MainPID;"
            f"echo SliceReload=$(systemctl show {SLICE} --property=NeedDaemonReload --value);"
            f"systemctl show {SOCKET} "
            "--property=LoadState,ActiveState,UnitFileState,NeedDaemonReload | sed s/^/Socket/;"
            f"pid=$(systemctl show {UNIT} --property=MainPID --value);"
            f"release=$({environ} | sed -n s/^EDGELLM_RELEASE=//p);"
            "echo Release=$release;"
            f"echo SocketsPassed=$({environ} | sed -n s/^LISTEN_FDS=//p);"
            f"echo SocketOfRelease=$(cmp -s {RELEASES}/$release/{SOCKET} {UNIT_DIR}/{SOCKET}"
            " && echo same);"
            f"echo Replaced=$(grep -c ' {INSTALL_DIR}/.*(deleted)$' 2>/dev/null"
            " /proc/${pid:-0}/maps);"
            f"echo Current=$(readlink -e {CURRENT});"
            f"echo Previous=$(readlink -e {PREVIOUS})"
        )

    def process(self, output: list[str]) -> ServiceState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        has_process = values.get("MainPID", "0") != "0"
        # A file that was gone and is back is "error", which only a reload mends, and not said so
        socket_reload = (
            values.get("SocketNeedDaemonReload") == "yes"
            or values.get("SocketLoadState") != "loaded"
        )
        with_other_socket = has_process and (
            values.get("SocketsPassed") != "1" or values.get("SocketOfRelease") != "same"
        )
        return ServiceState(
            active=values.get("ActiveState") in ("active", "reloading")
            or (values.get("ActiveState") == "activating" and has_process),
            enabled=values.get("UnitFileState") == "enabled",
            socket_active=values.get("SocketActiveState") == "active",
            socket_enabled=values.get("SocketUnitFileState") == "enabled",
            socket_stale=socket_reload or with_other_socket,
            needs_daemon_reload=socket_reload
            or "yes" in (values.get("NeedDaemonReload"), values.get("SliceReload")),
            running_release=values.get("Release") or None,
            current_release=_release(values.get("Current")),
            previous_release=_release(values.get("Previous")),
            runs_replaced_files=values.get("Replaced", "") not in ("", "0"),
        )


def _release(target: str | None) -> str | None:
    """'/opt/edgellm/releases/3f2a…' -> '3f2a…'; None where a link leads nowhere or elsewhere."""
    directory, _, name = (target or "").rpartition("/")
    return name if directory == RELEASES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsState:
    """The installed unit files and drop-ins of ours, against those of one release."""

    differing: tuple[tuple[str, str], ...]  # (file of the release, its place) that are not equal
    surplus: tuple[str, ...]  # places whose file the release does not have


class ReleaseUnits(FactBase[UnitsState]):
    """What must change in /etc/systemd/system so that the units are those of a release."""

    def command(self, release_id: str) -> StringCommand:
        return script_command(
            "release_units",
            {
                "release": layout.release_directory(release_id),
                "unit_dir": UNIT_DIR,
                "units": UNITS,
                "drop_ins": layout.UPSTREAM_FOLDER,
                "drop_in": layout.DROP_IN,
                "mark": layout.MARK,
            },
        )

    def process(self, output: list[str]) -> UnitsState:
        return one_json_object(
            output,
            lambda found: UnitsState(
                differing=tuple((source, place) for source, place in found["differing"]),
                surplus=tuple(found["surplus"]),
            ),
        )
