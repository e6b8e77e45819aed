"""The kernel's cpulist notation."""

from __future__ import annotations

import pytest

from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError


@pytest.mark.parametrize(
    ("cpulist", "cpus"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0,5-7", (0, 5, 6, 7)),
        ("7,0-1,1", (0, 1, 7)),
        (" 2 \n", (2,)),
        ("", ()),
    ],
)
def test_cpulist_becomes_sorted_numbers_without_duplicates(
    cpulist: str, cpus: tuple[int, ...]
) -> None:
    assert CpuSet.parse(cpulist).cpus == cpus


@pytest.mark.parametrize("text", ["3-1", "a", "-1", "1-", "0-99999", "1,,2", "\u0663", "1-2-3"])
def test_damaged_cpulist_raises_parse_error(text: str) -> None:
    with pytest.raises(ParseError, match="cpulist"):
        CpuSet.parse(text)


def test_set_is_spelt_as_the_kernel_spells_it() -> None:
    assert str(CpuSet.of([0, 5, 6, 7, 8, 9, 10, 11])) == "0,5-11"
    assert str(CpuSet.of([])) == ""
    assert str(CpuSet.of([2, 3])) == "2-3"


def test_number_above_the_kernels_ceiling_is_refused() -> None:
    with pytest.raises(ParseError):
        CpuSet.of([8192])


def test_sets_combine_as_sets() -> None:
    low, high = CpuSet.parse("0-3"), CpuSet.parse("2-5")
    assert str(low & high) == "2-3"
    assert str(low | high) == "0-5"
    assert str(low - high) == "0-1"
    assert 3 in low
    assert 4 not in low
    assert not CpuSet.parse("")
