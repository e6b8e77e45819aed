"""The live table: hosts and stages while a run executes, on a terminal only.

Whatever else is printed meanwhile (pyinfra's own lines, those of -v) scrolls by above it. Elsewhere
(a pipe, a log, TERM=dumb, EDGELLM_LIVE=off) nothing of it is there and the plain lines stay.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyinfra.api.state import BaseStateCallback
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from edgellm.progress import HostProgress, Mark, Row, group_of, headline, rows, stages_of

if TYPE_CHECKING:
    from pyinfra.api import Host, State

REFRESHES_PER_SECOND = 4
PRINT_EVERY_S = 0.1
LINES_FOR_OTHERS = 12  # of the terminal's height: what is printed above, and the table's own frame
GLYPHS = {Mark.DONE: "✓", Mark.NOW: "▸", Mark.FAILED: "✗", Mark.WAITING: "·"}
PLAIN_GLYPHS = {Mark.DONE: "+", Mark.NOW: ">", Mark.FAILED: "X", Mark.WAITING: "."}
COLOURS = {Mark.DONE: "green", Mark.NOW: "cyan", Mark.FAILED: "red", Mark.WAITING: "dim"}


class Lines:
    """What is to be printed above the table, of stdout and stderr in their order.

    The table is drawn anew below all that is printed: a line at a time, that would take 500 hosts
    longer than what they do.
    """

    def __init__(self, console: Console, *, every_s: float = PRINT_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._waiting: list[str] = []
        self._printed_at = -math.inf

    def add(self, lines: list[str]) -> None:
        self._waiting += lines
        if time.monotonic() - self._printed_at >= self._every_s:
            self.show()

    def show(self) -> None:
        lines, self._waiting = self._waiting, []
        if lines:
            encoding = self._console.encoding
            told = [line.encode(encoding, "replace").decode(encoding) for line in lines]
            self._console.print(Text("\n").join(map(Text.from_ansi, told)), soft_wrap=True)
            self._printed_at = time.monotonic()


class Above(io.TextIOBase):
    """In the place of stdout or stderr: whole lines, printed above the table.

    Rich's own has no encoding, for which click writes past it, into the table.
    """

    def __init__(self, lines: Lines, encoding: str) -> None:
        self._lines, self._encoding = lines, encoding
        self._begun = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"

    def isatty(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        self._lines.add(lines)
        return len(text)

    def end(self) -> None:
        """What waits still, and what did not end with a line break."""
        if self._begun:
            self.write("\n")
        self._lines.show()


class _Table(Live):
    """Lines that wait do so until the next refresh at most."""

    lines: Lines

    def refresh(self) -> None:
        self.lines.show()
        super().refresh()


@dataclass(slots=True, kw_only=True)
class _Board:
    """What the table is made of; filled in by pyinfra's callbacks."""

    state: State
    live: _Table | None = None
    streams: tuple[Any, ...] = ()  # stdout and stderr as they were
    stages: tuple[str, ...] = ()
    at: dict[str, int] = field(default_factory=dict)  # host -> the stage it is in
    done: set[str] = field(default_factory=set)
    transfers: dict[str, str] = field(default_factory=dict)
    held_back: set[str] = field(default_factory=set)

    def hosts(self) -> list[HostProgress]:
        return [self._progress(host) for host in self.state.inventory if self._is_of_run(host)]

    def _is_of_run(self, host: Host) -> bool:
        return bool(self.state.is_host_in_limit(host))

    def _progress(self, host: Host) -> HostProgress:
        failed = None
        if host not in self.state.activated_hosts:
            failed = "unreachable"
        elif host in self.state.failed_hosts and host.name not in self.held_back:
            failed = "failed"
        return HostProgress(
            name=host.name,
            group=group_of([group for group in host.groups if group != "all"]),
            stage=self.at.get(host.name),
            is_done=host.name in self.done,
            failed=failed,
            is_held_back=host.name in self.held_back,
            transfer=self.transfers.get(host.name),
        )


_board: _Board | None = None


class _Callbacks(BaseStateCallback):
    @staticmethod
    def operation_start(state: State, op_hash: str) -> None:
        if _board is not None and _board.live is None:
            _start(_board)

    @staticmethod
    def operation_host_start(state: State, host: Host, op_hash: str) -> None:
        if _board is None:
            return
        stage = min(state.get_op_meta(op_hash).names).partition(" | ")[0]
        if stage in _board.stages:
            _board.at[host.name] = _board.stages.index(stage)

    @staticmethod
    def operation_host_success(
        state: State, host: Host, op_hash: str, retry_count: int = 0
    ) -> None:
        if _board is None:
            return
        _board.transfers.pop(host.name, None)
        if host.op_hash_order and host.op_hash_order[-1] == op_hash:
            _board.done.add(host.name)

    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        stop()


def attach(state: State) -> None:
    """From the first operation on, where somebody looks: before it, pyinfra asks its questions."""
    global _board
    if _board is None and is_wanted():
        _board = _Board(state=state)
        state.add_callback_handler(_Callbacks())


def is_wanted() -> bool:
    told_not_to = os.environ.get("EDGELLM_LIVE") == "off" or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and sys.stderr.isatty() and not told_not_to


def is_shown() -> bool:
    return _board is not None and _board.live is not None


def note_transfer(host: str, told: str) -> None:
    """'model m: 120 of 429 MB'."""
    if _board is not None:
        _board.transfers[host] = told


def note_held_back(host: str) -> None:
    """For pyinfra an operation of it fails, as there is no other way to leave a host out."""
    if _board is not None:
        _board.held_back.add(host)


def stop() -> None:
    """The lines below are the terminal's again; the table is gone, the report's is to come."""
    global _board
    board, _board = _board, None
    if board is None or board.live is None:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Above):
                stream.end()
    finally:
        sys.stdout, sys.stderr = board.streams
        board.live.stop()


def _start(board: _Board) -> None:
    state = board.state
    board.stages = stages_of(min(state.get_op_meta(h).names) for h in state.get_op_order())
    # Its spinner writes to the line that the table ends with
    os.environ["PYINFRA_PROGRESS"] = "off"
    console = Console(file=sys.stdout)
    board.live = _Table(
        get_renderable=lambda: picture(board.hosts(), board.stages, console),
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        vertical_overflow="crop",
        redirect_stdout=False,
        redirect_stderr=False,
    )
    board.live.lines = Lines(console)
    board.streams = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (Above(board.live.lines, stream.encoding) for stream in board.streams)
    board.live.start()
    atexit.register(stop)


def picture(hosts: list[HostProgress], stages: tuple[str, ...], console: Console) -> Table:
    """The table as it is now, no higher than the terminal leaves room for."""
    glyphs = GLYPHS if console.encoding.lower().startswith("utf") else PLAIN_GLYPHS
    table = Table(title=headline(hosts), title_justify="left", title_style="bold", box=None)
    table.add_column("host", no_wrap=True)
    for stage in stages:
        table.add_column(stage, justify="center", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    most_rows = max(3, console.height - LINES_FOR_OTHERS)
    for row in rows(hosts, stages, most_rows=most_rows):
        table.add_row(*_cells(row, glyphs), style="red" if row.failed else None)
    return table


def _cells(row: Row, glyphs: dict[Mark, str]) -> list[str]:
    cells = [
        f"[{COLOURS[cell]}]{glyphs[cell]}[/]" if isinstance(cell, Mark) else escape(cell)
        for cell in row.cells
    ]
    return [escape(row.name), *cells, escape(row.note)]
