"""The slices that a reservation keeps off the server's cores: what systemd and the kernel say."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError
from edgellm.facts.reading import unreadable

CGROUPS = "/sys/fs/cgroup"
CPUS_BEFORE = f"{layout.BEFORE}/cpuset.cpus"  # and a slice's name: what was written there by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCpus:
    """One slice; an empty set is "all that the parent has"."""

    file: str | None  # cpuset.cpus of its cgroup; None: not active, or without the controller
    cpus: CpuSet  # in that file
    allowed_cpus: CpuSet  # AllowedCPUs= as systemd has loaded it, by whosever drop-in
    needs_daemon_reload: bool
    recorded: CpuSet | None  # what the file had before our first change; None: never changed


class ReservedSlices(FactBase[dict[str, SliceCpus]]):
    """{slice: SliceCpus} of system.slice and user.slice."""

    def command(self) -> str:
        return (
            f"for slice in {' '.join(layout.RESERVED_SLICES)}; do "
            "echo Slice=$slice; "
            "systemctl show $slice --property=AllowedCPUs,NeedDaemonReload; "
            "group=$(systemctl show $slice --property=ControlGroup --value); "
            f"file={CGROUPS}$group/cpuset.cpus; "
            '[ -n "$group" ] && [ -f "$file" ] && echo File=$file && echo Cpus=$(cat "$file"); '
            f'before={CPUS_BEFORE}.$slice; [ -f "$before" ] && echo Recorded=$(cat "$before"); '
            "done; true"
        )

    def process(self, output: list[str]) -> dict[str, SliceCpus]:
        found: dict[str, dict[str, str]] = {}
        values: dict[str, str] = {}
        for line in output:
            name, equals, value = line.partition("=")
            if name == "Slice":
                values = found.setdefault(value, {})
            elif equals:
                values[name] = value.strip()
        try:
            return {name: _slice_cpus(values) for name, values in found.items()}
        except ParseError as error:
            raise unreadable(str(error)) from error


def _slice_cpus(values: dict[str, str]) -> SliceCpus:
    return SliceCpus(
        file=values.get("File"),
        cpus=_cpus(values.get("Cpus", "")),
        allowed_cpus=_cpus(values.get("AllowedCPUs", "")),
        needs_daemon_reload=values.get("NeedDaemonReload") == "yes",
        recorded=_cpus(values["Recorded"]) if "Recorded" in values else None,
    )


def _cpus(text: str) -> CpuSet:
    """'0-1 4' of systemd, '0-1,4' of the kernel, '' for none."""
    return CpuSet.parse(",".join(text.replace(",", " ").split()))
