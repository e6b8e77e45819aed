"""The live table where nobody looks, and what is printed above it where somebody does."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import click
import pytest
from rich.console import Console

from edgellm import live
from edgellm.progress import HostProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fixture: pytest sets its own streams between a test's setup and its call."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("EDGELLM_LIVE", raising=False)


def test_it_is_wanted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    assert live.is_wanted()


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("EDGELLM_LIVE", "off")])
def test_it_is_not_wanted_where_the_terminal_or_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert not live.is_wanted()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_it_is_not_wanted_where_one_stream_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setattr(sys, stream, io.StringIO())
    state = SimpleNamespace(add_callback_handler=lambda handler: pytest.fail("attached"))
    live.attach(state)  # type: ignore[arg-type]
    assert not live.is_shown()


def above(every_s: float = 0.0) -> tuple[Any, io.StringIO]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=20, color_system="standard")
    return live.Above(live.Lines(console, every_s=every_s), "utf-8"), shown


def test_pyinfras_own_lines_go_through_and_not_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, shown = above()
    monkeypatch.setattr(sys, "stderr", stream)
    click.echo(click.style("[edge-1] Success", "green"), err=True)
    assert "[edge-1] Success" in shown.getvalue()
    assert "\x1b[32m" in shown.getvalue()


def test_a_line_is_printed_whole_and_never_wrapped_or_read_as_markup() -> None:
    stream, shown = above()
    stream.write("[bold]a line that is longer ")
    assert shown.getvalue() == ""
    stream.write("than the terminal\nand ")
    assert shown.getvalue() == "[bold]a line that is longer than the terminal\n"
    stream.end()
    assert shown.getvalue().endswith("\nand \n")


def test_lines_that_come_fast_are_printed_together_and_in_order() -> None:
    stream, shown = above(every_s=60.0)
    for number in range(1000):
        stream.write(f"{number}\n")
        assert shown.getvalue() == "0\n"
    stream.write("the end")
    stream.end()
    assert shown.getvalue().splitlines() == [*map(str, range(1000)), "the end"]


def test_what_the_terminal_has_no_letters_for_costs_no_other_line() -> None:
    stream, shown = above(every_s=60.0)
    stream.write("first\nERROR one \udc80 host\nERROR other host\n")
    stream.end()
    assert shown.getvalue().splitlines() == ["first", "ERROR one ? host", "ERROR other host"]


def test_the_streams_are_the_terminals_again_also_where_the_last_lines_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_terminal(monkeypatch)
    streams, stopped = (sys.stdout, sys.stderr), []

    class Gone(live.Above):
        def end(self) -> None:
            raise OSError("the terminal is gone")

    lines = live.Lines(Console(file=io.StringIO()))
    monkeypatch.setattr(sys, "stdout", Gone(lines, "utf-8"))
    board = SimpleNamespace(
        live=SimpleNamespace(stop=lambda: stopped.append(True)), streams=streams
    )
    monkeypatch.setattr(live, "_board", board)
    with pytest.raises(OSError, match="the terminal is gone"):
        live.stop()
    assert (sys.stdout, sys.stderr) == streams
    assert stopped == [True]
    assert not live.is_shown()


def test_the_table_keeps_to_the_terminals_height_and_to_its_letters() -> None:
    hosts = [HostProgress(name=f"edge-{n}", group="site_a", stage=1) for n in range(100)]
    shown = io.StringIO()
    console = Console(file=shown, width=100, height=30)
    console.print(live.picture(hosts, ("Packages", "Model"), console))
    lines = shown.getvalue().splitlines()
    assert len(lines) <= 30 - live.LINES_FOR_OTHERS + 2
    assert lines[0].strip() == "100 hosts: 100 at work"
    assert lines[2].split() == ["site_a", "(100)", "100", "0", "100", "at", "work"]
