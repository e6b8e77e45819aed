"""cpulist: what is written is read again, and damage is a ParseError."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from edgellm.cpuset import MAX_CPU, CpuSet
from edgellm.errors import ParseError

numbers = st.sets(st.integers(min_value=0, max_value=MAX_CPU), max_size=64)


@given(numbers)
def test_cpulist_round_trip(cpus: set[int]) -> None:
    written = CpuSet.of(cpus)
    assert CpuSet.parse(str(written)) == written


@given(numbers, numbers)
def test_sets_combine_as_pythons_own(a: set[int], b: set[int]) -> None:
    assert set((CpuSet.of(a) & CpuSet.of(b)).cpus) == a & b
    assert set((CpuSet.of(a) | CpuSet.of(b)).cpus) == a | b
    assert set((CpuSet.of(a) - CpuSet.of(b)).cpus) == a - b


@given(st.text() | st.text(alphabet="0123456789,- \n"))
def test_any_text_is_a_cpulist_or_a_parse_error(text: str) -> None:
    with contextlib.suppress(ParseError):
        assert CpuSet.parse(str(CpuSet.parse(text))) == CpuSet.parse(text)
