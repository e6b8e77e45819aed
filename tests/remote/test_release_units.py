"""release_units and upstream_units: what of ours lies among systemd's units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
OURS = "# Rendered by edgellm; the next roll-out replaces it.\n"


@pytest.fixture
def ask(run: Run, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """ask(): the script's answer for tmp_path/release and tmp_path/units."""
    for name in ("release", "units"):
        (tmp_path / name).mkdir()

    def answer() -> dict[str, Any]:
        job = {
            "release": str(tmp_path / "release"),
            "unit_dir": str(tmp_path / "units"),
            "units": ["edgellm.service", "edgellm.socket"],
            "drop_ins": "upstream.d",
            "drop_in": "90-edgellm.conf",
            "mark": "# Rendered by edgellm;",
        }
        found: dict[str, Any] = run("release_units", job).answer
        return found

    return answer


def put(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_units_that_are_those_of_the_release_need_nothing(
    ask: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    for folder in ("release", "units"):
        put(tmp_path / folder / "edgellm.service", OURS)
    put(tmp_path / "release/upstream.d/vllm.service.conf", OURS)
    put(tmp_path / "units/vllm.service.d/90-edgellm.conf", OURS)
    assert ask() == {"differing": [], "surplus": []}


def test_other_text_and_a_missing_unit_are_to_be_installed(
    ask: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    service = put(tmp_path / "release/edgellm.service", OURS)
    put(tmp_path / "units/edgellm.service", OURS + "LimitNOFILE=1\n")
    drop_in = put(tmp_path / "release/upstream.d/vllm.service.conf", OURS)
    units = tmp_path / "units"
    assert ask() == {
        "differing": [
            [service, str(units / "edgellm.service")],
            [drop_in, str(units / "vllm.service.d/90-edgellm.conf")],
        ],
        "surplus": [],
    }


def test_a_socket_that_the_release_does_not_have_is_surplus(
    ask: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    socket = put(tmp_path / "units/edgellm.socket", OURS)
    assert ask()["surplus"] == [socket]


def test_only_drop_ins_of_ours_are_surplus(
    ask: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    put(tmp_path / "units/tgi.service.d/90-edgellm.conf", "# of somebody else\n")
    ours = put(tmp_path / "units/vllm.service.d/90-edgellm.conf", OURS)
    assert ask()["surplus"] == [ours]


def test_an_operators_unit_is_found_by_our_drop_in(run: Run, tmp_path: Path) -> None:
    put(tmp_path / "tgi.service.d/90-edgellm.conf", "# of somebody else\n")
    put(tmp_path / "edgellm-test-none.service.d/90-edgellm.conf", OURS)
    job = {"unit_dir": str(tmp_path), "drop_in": "90-edgellm.conf", "mark": OURS[:22]}
    found = run("upstream_units", {**job, "unit": None}).answer
    assert list(found) == ["edgellm-test-none.service"]
    state = found["edgellm-test-none.service"]
    assert (state["known"], state["active"], state["tuning"]) == (False, False, None)
    assert len(state["drop_in_sha256"]) == 64


def test_a_unit_that_is_asked_for_has_a_state_without_our_drop_in(run: Run, tmp_path: Path) -> None:
    job = {"unit_dir": str(tmp_path), "drop_in": "90-edgellm.conf", "mark": OURS[:22]}
    found = run("upstream_units", {**job, "unit": "edgellm-test-none.service"}).answer
    assert found["edgellm-test-none.service"]["drop_in_sha256"] is None
