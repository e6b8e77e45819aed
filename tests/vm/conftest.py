"""One arm64 machine, once for all tests of this folder. They run in the order of their files.

Slow, as every instruction is emulated: 8 to 13 minutes. EDGELLM_VM_KEEP=1 leaves the machine up, to
look around after a failure: sudo python3 -m demo.arm64_machine ssh
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.arm64_machine import Arm64Machine, missing_tools
from demo.processes import locked_directory
from tests.e2e.support import Run

from .support import NAME, Board, Control, tiny_model_settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is a `vm` test."""
    here = Path(__file__).parent
    lacks = missing_tools()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vm)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="builds a root file system: needs root"))
            elif lacks:
                item.add_marker(pytest.mark.skip(reason=f"no {', '.join(lacks)}: use `make vm`"))


@pytest.fixture(scope="session")
def arm64() -> Iterator[Arm64Machine]:
    """A fresh machine. A second run in this clone waits: it would take the first one's down."""
    with locked_directory(Path(__file__).parent):
        arm64 = Arm64Machine()
        arm64.down()
        try:
            arm64.up()
            yield arm64
        finally:
            if os.environ.get("EDGELLM_VM_KEEP") != "1":
                arm64.down()


@pytest.fixture(scope="session")
def board(arm64: Arm64Machine) -> Board:
    return Board(arm64)


@pytest.fixture(scope="session")
def control(arm64: Arm64Machine, tmp_path_factory: pytest.TempPathFactory) -> Control:
    """control(n_ctx=256): one run of the real command line, with the model that counts."""
    folder = tmp_path_factory.mktemp("control")
    return Control(arm64, folder, tiny_model_settings(folder))


@dataclass(frozen=True)
class FirstRollOut:
    """The run that met an empty machine, and what that was like before it."""

    things_before: dict[str, str]
    swappiness_before: str
    run: Run

    @property
    def release(self) -> str:
        return str(self.run.host(NAME)["release"])


@pytest.fixture(scope="session")
def first(board: Board, control: Control) -> FirstRollOut:
    return FirstRollOut(board.things(), board.read("/proc/sys/vm/swappiness"), control())
