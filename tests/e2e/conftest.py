"""Four real hosts, once for all tests of this folder.

edge-1 logs in as root, edge-2 as a user with sudo, edge-3 as one whose sudo asks for a password:
these three are the fleet that most tests roll out to. edge-4 is the spare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.fleet import Fleet

from .support import MODEL_PATH, SPARE, THREE, CommandLine, Run, Ssh, snapshot


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is e2e, and without root there is no fleet to be had."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="makes namespaces and mounts: needs root"))


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Fresh hosts. EDGELLM_E2E_KEEP=1 leaves them up, to look around after a failure."""
    fleet = Fleet("e2e", len(THREE) + 1, ssh_base_port=26010, http_base_port=26110)
    fleet.down()
    try:
        fleet.up()
        yield fleet
    finally:
        if os.environ.get("EDGELLM_E2E_KEEP") != "1":
            fleet.down()


@pytest.fixture(scope="session")
def roll_out(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """roll_out("--limit", "edge-1"): one run of the real command line."""
    return CommandLine(fleet, tmp_path_factory.mktemp("control"))


@pytest.fixture(scope="session")
def ssh(fleet: Fleet) -> Ssh:
    """ssh("edge-1", "uname -m"): the command's output."""
    return Ssh(fleet)


@dataclass(frozen=True)
class FirstRollOut:
    """The run that met empty hosts, and what those were like before it."""

    before: dict[str, dict[str, str]]
    run: Run

    def release(self, host: str) -> str:
        return str(self.run.host(host)["release"])


@pytest.fixture(scope="session")
def first(fleet: Fleet, roll_out: CommandLine, ssh: Ssh) -> FirstRollOut:
    """The first roll-out to the three hosts; the test of that name asserts on it."""
    before = {name: snapshot(ssh, name) for name in (*THREE, SPARE)}
    return FirstRollOut(before, roll_out())


KEPT_RELEASES = 2  # the default of keep_releases


@pytest.fixture
def served(fleet: Fleet, roll_out: CommandLine, ssh: Ssh, first: FirstRollOut) -> Iterator[None]:
    """The three hosts run the release of the first roll-out, before the test and after it."""
    # The test before this one failed, or a way back left a release that the next run prunes.
    if unhealthy(fleet, first) or any(n_releases(fleet, name) > KEPT_RELEASES for name in THREE):
        fleet.up()
        roll_out().assert_ok(*THREE)
    yield
    assert unhealthy(fleet, first) == []


def n_releases(fleet: Fleet, name: str) -> int:
    return len(fleet.exec(name, "ls", "/opt/edgellm/releases").stdout.split())


def unhealthy(fleet: Fleet, first: FirstRollOut) -> list[str]:
    """What keeps the three hosts from running the first release. Without ssh: it may be cut."""
    faults = []
    for name in THREE:
        if fleet.state(name) != "running":
            faults.append(f"{name}: {fleet.state(name)}")
            continue
        look = f"systemctl is-active edgellm; readlink /opt/edgellm/current; ls {MODEL_PATH}"
        said = fleet.exec(name, "sh", "-c", look, check=False).stdout.split()
        if said != ["active", f"releases/{first.release(name)}", MODEL_PATH]:
            faults.append(f"{name}: {said}")
    return faults
