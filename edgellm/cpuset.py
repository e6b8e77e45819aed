"""Sets of CPUs in the kernel's cpulist notation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.errors import ParseError

# The kernel's own ceiling (CONFIG_NR_CPUS of the largest distribution kernels); a larger number in
# a cpulist is damage, and expanding it would cost memory.
MAX_CPU = 8191


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSet:
    """A set of logical CPU numbers, sorted and without duplicates. Empty is allowed."""

    cpus: tuple[int, ...]

    @classmethod
    def of(cls, cpus: Iterable[int]) -> CpuSet:
        """Any iterable of CPU numbers; raises ParseError for a number outside 0..MAX_CPU."""
        numbers = tuple(sorted(set(cpus)))
        for number in numbers:
            if not 0 <= number <= MAX_CPU:
                raise _bad(str(number))
        return cls(cpus=numbers)

    @classmethod
    def parse(cls, cpulist: str) -> CpuSet:
        """'0-3,8' -> CpuSet(0, 1, 2, 3, 8); '' -> empty.

        Raises ParseError. Format: "List Format" of cpuset(7), without the stride extension.
        """
        numbers: set[int] = set()
        text = cpulist.strip()
        if not text:
            return cls(cpus=())
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            if not _is_number(first) or (dash and not _is_number(last)):
                raise _bad(cpulist)
            low, high = int(first), int(last or first)
            if low > high or high > MAX_CPU:
                raise _bad(cpulist)
            numbers.update(range(low, high + 1))
        return cls(cpus=tuple(sorted(numbers)))

    def __str__(self) -> str:
        """The kernel's spelling: CpuSet(0, 5, 6, 7) -> '0,5-7'."""
        runs: list[str] = []
        start: int | None = None
        previous = -2
        for cpu in (*self.cpus, None):
            if cpu is not None and cpu == previous + 1:
                previous = cpu
                continue
            if start is not None:
                runs.append(str(start) if start == previous else f"{start}-{previous}")
            if cpu is not None:
                start = previous = cpu
        return ",".join(runs)

    def __len__(self) -> int:
        return len(self.cpus)

    def __contains__(self, cpu: object) -> bool:
        return cpu in self.cpus

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of(set(self.cpus) & set(other.cpus))

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of(set(self.cpus) | set(other.cpus))

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of(set(self.cpus) - set(other.cpus))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5


def _bad(text: str) -> ParseError:
    return ParseError(
        what="cpulist",
        want="numbers and ranges such as '0-3,8'",
        have=repr(text[:80]),
        fix="report the file it was read from; the kernel writes this format itself",
    )
