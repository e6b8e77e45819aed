"""Whole plans as reviewed text. After a deliberate change: pytest tests/golden --update-golden."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.fitness import check_host
from edgellm.hardware import HostProfile, plain
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning

HARDWARE = Path(__file__).parents[1] / "hardware"
PLANS = Path(__file__).with_name("plans")
DOCS = Path(__file__).parents[2] / "docs" / "tuning.md"
BOARDS = sorted(path.parent.name for path in HARDWARE.glob("*/probe.txt"))


@pytest.mark.parametrize("name", BOARDS)
def test_plan_of_a_board_is_the_reviewed_one(
    name: str,
    board: Callable[[str], HostProfile],
    settings_with: Callable[..., Settings],
    update_golden: bool,
) -> None:
    profile, settings = board(name), settings_with()
    plan = plain(plan_tuning(profile, settings))
    # One line a reason: the file is read by people.
    plan["reasons"] = [
        f"{r['knob']}{' (left alone)' * r['left_alone']}{' (warning)' * r['warning']}: {r['text']}"
        for r in plan["reasons"]
    ]
    errors = check_host(profile, settings, group_arch=profile.arch, disk_needed_bytes=10**9)
    actual = json.dumps({"unfit": [str(e) for e in errors], "plan": plan}, indent=2) + "\n"
    path = PLANS / f"{name}.json"
    if update_golden:
        path.write_text(actual, encoding="ascii")
    assert actual == path.read_text(encoding="ascii")


def test_every_knob_of_a_plan_has_its_line_in_the_docs() -> None:
    docs = DOCS.read_text(encoding="utf-8")
    for path in PLANS.glob("*.json"):
        for text in json.loads(path.read_text(encoding="ascii"))["plan"]["reasons"]:
            knob = text.partition(":")[0].partition(" ")[0]
            assert f"`{knob}`" in docs, f"{path.stem}: {knob}"


def test_every_reviewed_plan_belongs_to_a_board() -> None:
    assert sorted(path.stem for path in PLANS.glob("*.json")) == BOARDS
