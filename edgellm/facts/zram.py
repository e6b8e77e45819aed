"""The zram swap that is ours: by our own unit, or by zram-generator with our drop-in."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

from edgellm.facts.reading import unreadable
from edgellm.tuning import ZramPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnZramState:
    """`size_bytes` and `priority` of the swap that is on; None: it is not."""

    enabled: bool
    size_bytes: int | None
    priority: int | None

    def matches(self, plan: ZramPlan) -> bool:
        return (self.size_bytes, self.priority) == (plan.size_bytes, plan.priority)


class OwnZram(FactBase[OwnZramState]):
    """Reads /run/edgellm-zram (our unit's device), else zram0 (the generator's)."""

    def command(self, unit: str, device: str | None) -> str:
        """`device`: 'zram0' where another program chose it; None: the one our unit noted."""
        named = f"/dev/{device}" if device else "$(cat /run/edgellm-zram 2>/dev/null)"
        return (
            f"device={named}; echo Enabled=$(systemctl is-enabled {unit} 2>/dev/null);"
            'echo Size=$(cat "/sys/block/${device#/dev/}/disksize" 2>/dev/null);'
            "echo Priority=$(awk -v d=\"$device\" '$1 == d {print $5}' /proc/swaps)"
        )

    def process(self, output: list[str]) -> OwnZramState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        priority = values.get("Priority", "")
        try:
            on = priority != ""
            return OwnZramState(
                enabled=values.get("Enabled") == "enabled",
                size_bytes=int(values["Size"]) if on else None,
                priority=int(priority) if on else None,
            )
        except (KeyError, ValueError):
            raise unreadable(f"not the numbers of a zram device: {output!r}") from None
