"""What all tests share: the boards of tests/hardware and a complete set of settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm.hardware import HostProfile
from edgellm.parse import parse_profile
from edgellm.settings import Settings

HARDWARE = Path(__file__).with_name("hardware")

# The size of Qwen2.5-0.5B-Instruct Q4_0, which every expected number below refers to.
MODEL_SIZE_BYTES = 428_730_208
REQUIRED_SETTINGS = {
    "model_name": "qwen2.5-0.5b-instruct",
    "model_source": "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q4_0.gguf@main",
    "model_sha256": "0" * 64,
    "model_size_bytes": MODEL_SIZE_BYTES,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew from what the code does now; review the diff as text",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def settings_with() -> Callable[..., Settings]:
    """settings_with(threads=2): the defaults, with these set."""

    def build(**data: Any) -> Settings:
        return Settings.from_host_data({**REQUIRED_SETTINGS, **data}, host="edge-01")

    return build


@pytest.fixture(scope="session")
def probe_text() -> Callable[[str], str]:
    """probe_text("rk3588"): that board's probe output."""

    def read(board: str) -> str:
        return (HARDWARE / board / "probe.txt").read_text(encoding="ascii")

    return read


@pytest.fixture(scope="session")
def board(probe_text: Callable[[str], str]) -> Callable[[str], HostProfile]:
    """board("rk3588"): that board's profile."""

    def read(name: str) -> HostProfile:
        return parse_profile(probe_text(name), control_time_s=None)

    return read
