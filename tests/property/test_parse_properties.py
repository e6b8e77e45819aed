"""parse_profile on damage of every kind: a profile or a ParseError, never another exception."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.errors import ParseError
from edgellm.hardware import HostProfile
from edgellm.parse import parse_profile

HARDWARE = Path(__file__).parents[1] / "hardware"
PROBES = tuple(path.read_text(encoding="ascii") for path in sorted(HARDWARE.glob("*/probe.txt")))

# What damage looks like: empty, not a number, huge, negative, not ASCII, half a line.
SCRAPS = ("", " ", ":", "=", "-1", "9" * 40, "nan", "0x", "\u0661", "\x00", "kB", "@@ end", "a b")


def only_parse_error(text: str) -> None:
    with contextlib.suppress(ParseError):
        assert isinstance(parse_profile(text, control_time_s=0.0), HostProfile)


@given(st.text())
def test_any_text(text: str) -> None:
    only_parse_error(text)
    only_parse_error(f"@@ format\n1\n{text}\n@@ end\n")


@settings(max_examples=50)
@given(st.data())
def test_lines_of_a_real_probe_lost_doubled_or_broken(data: st.DataObject) -> None:
    lines = data.draw(st.sampled_from(PROBES)).splitlines()
    for _ in range(data.draw(st.integers(min_value=1, max_value=4))):
        at = data.draw(st.integers(min_value=0, max_value=len(lines) - 1))
        line = lines[at]
        cut = data.draw(st.integers(min_value=0, max_value=len(line)))
        scrap = data.draw(st.sampled_from(SCRAPS) | st.text(max_size=8))
        lines[at : at + 1] = data.draw(
            st.sampled_from(
                [
                    [],
                    [line, line],
                    [line[:cut] + scrap],
                    [line[:cut] + scrap + line[cut:]],
                    [scrap + line[cut:]],
                ]
            )
        )
        if not lines:
            break
    only_parse_error("\n".join(lines))
