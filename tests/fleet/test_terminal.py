"""A run on a terminal: the live table below pyinfra's own lines, and nothing of it afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.fleet.conftest import REPOSITORY, WITHIN_S, Ended, smoke_line

ROWS, COLUMNS = 40, 160
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def lines_of(output: str) -> list[str]:
    return MOVES.sub("\n", COLOURS.sub("", output)).splitlines()


def run_on_a_terminal(fleet: Any, *arguments: str, **environment: str) -> Ended:
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        fleet.command("qwen", *arguments),
        cwd=REPOSITORY,
        env=fleet.environment | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environment,
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    deadline = threading.Timer(WITHIN_S, process.kill)
    deadline.start()
    output = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(terminal, 65536):
            output += piece
    code = process.wait()
    deadline.cancel()
    os.close(terminal)
    return Ended(returncode=code, output=output.decode(), reports=fleet.reports)


@pytest.fixture(scope="module")
def fleet(new_fleet: Callable[[], Any]) -> Any:
    fleet = new_fleet()
    for number in range(4):
        fleet.add(f"pi5-0{number}")
    fleet.add("slow", responses={"edgellm_server/probe.py": smoke_line(median_ttft_ms=8000.0)})
    return fleet


def test_hosts_and_stages_are_shown_with_failures_first_and_then_the_report(fleet: Any) -> None:
    ended = run_on_a_terminal(fleet, "-v")
    assert ended.returncode == 1
    assert "Traceback" not in ended.output
    lines = lines_of(ended.output)
    heads = [index for index, line in enumerate(lines) if re.match(r"5 hosts: .*failed", line)]
    assert heads, ended.output
    table = [line for line in lines[heads[-1] + 1 :] if line.strip()]
    assert table[0].split()[:3] == ["host", "Packages", "Kernel"]
    assert table[1].split()[0] == "@fake/slow"
    assert "✗" in table[1]
    # pyinfra's own lines are whole, those of -v too, and the last words are the report's
    assert re.search(r"^    \[@fake/pi5-00\] Success$", "\n".join(lines), re.MULTILINE)
    assert "5 hosts: 4 ok, 1 failed" in "\n".join(lines[heads[-1] :])
    assert [line for line in lines if line][-1].startswith("Report: ")


def test_a_host_that_waits_for_an_earlier_wave_is_not_shown_as_failed(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    slow = {"edgellm_server/probe.py": smoke_line(median_ttft_ms=8000.0)}
    fleet.add("canary", data={"wave": 0}, responses=slow)
    fleet.add("later", data={"wave": 1})
    ended = run_on_a_terminal(fleet)
    assert ended.returncode == 1
    lines = lines_of(ended.output)
    heads = [index for index, line in enumerate(lines) if line.startswith("2 hosts: 1 failed, ")]
    assert lines[heads[-1]].rstrip() == "2 hosts: 1 failed, 1 held back"
    _, canary, later = [line.split() for line in lines[heads[-1] + 1 :] if line.strip()][:3]
    assert canary[0] == "@fake/canary"
    assert "✗" in canary
    assert later[0] == "@fake/later"
    assert "✗" not in later
    assert later[-2:] == ["held", "back"]
    assert [line for line in lines if line.startswith("2 hosts: 2 failed")] == []


def test_the_operator_can_have_the_plain_lines_alone(fleet: Any) -> None:
    ended = run_on_a_terminal(fleet, EDGELLM_LIVE="off")
    lines = lines_of(ended.output)
    assert "    [@fake/pi5-00] Success" in lines
    assert [line for line in lines if "at work" in line] == []
