"""Kernel values that operations set: as they are now."""

from __future__ import annotations

from pyinfra.api import FactBase

from edgellm.facts.reading import unreadable

GOVERNOR_FILES = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"


class Swappiness(FactBase[int]):
    """vm.swappiness now."""

    def command(self) -> str:
        return "cat /proc/sys/vm/swappiness"

    def process(self, output: list[str]) -> int:
        try:
            return int(output[0])
        except (IndexError, ValueError):
            raise unreadable(f"not a swappiness: {output!r}") from None


class Governors(FactBase[dict[str, str]]):
    """{sysfs file of a cpufreq policy: its governor}; empty where the kernel rules no clock."""

    def command(self) -> str:
        return f"echo Governors; grep -Hs '' {GOVERNOR_FILES}; true"

    def process(self, output: list[str]) -> dict[str, str]:
        pairs = (line.rpartition(":") for line in output)
        return {file: governor for file, colon, governor in pairs if colon}
