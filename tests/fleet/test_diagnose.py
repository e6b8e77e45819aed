"""deploys/diagnose.py over hosts that are in order, new, without Python, or mute."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.rolled_out import RolledOut

MARK = "f" * 32
SCRIPT = "kernel_log()"
DOWN = {"success": False, "stderr": "sh: not found"}


def nothing(host: RolledOut) -> RolledOut:
    return host


@pytest.fixture(scope="module")
def mixed(new_fleet: Callable[[], Any]) -> Any:
    fleet = new_fleet()
    # A fake host does not run the script: it answers with the mark that is known to it
    fleet.more_lines = (
        "from edgellm.operations import diagnose as _diagnose",
        f"_diagnose.new_mark = lambda: {MARK!r}",
    )
    answer = {SCRIPT: "\n".join((f"{MARK} memory", "MemTotal: 8 kB", f"{MARK} end"))}
    fleet.add("pi5-01", since=nothing, responses=answer)
    fleet.add("new", responses=answer)
    fleet.add("bad-settings", data={"thread": 4}, responses=answer)
    fleet.add("no-python", responses={"def runtime_is_whole": DOWN, **answer})
    fleet.add("mute", responses={SCRIPT: DOWN})
    fleet.add_unreachable("off-01")
    return fleet.run("diagnose", "--debug")


def files_of(ended: Any, name: str) -> dict[str, str]:
    path = ended.reports / "latest" / "diagnose" / f"_fake_{name}.tar.gz"
    with tarfile.open(path) as archive:
        members = {member.name.rpartition("/")[2]: member for member in archive.getmembers()}
        found = {name: archive.extractfile(member) for name, member in members.items()}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_every_host_that_answers_a_shell_has_its_bundle(mixed: Any) -> None:
    assert mixed.statuses == {
        **dict.fromkeys(("pi5-01", "new", "bad-settings", "no-python"), "ok"),
        "mute": "failed",
        "off-01": "unreachable",
    }
    assert "Traceback" not in mixed.output
    assert mixed.returncode == 1


def test_a_bundle_has_profile_plan_and_every_knob(mixed: Any) -> None:
    files = files_of(mixed, "pi5-01")
    assert json.loads(files["profile.json"])["board_model"].startswith("Raspberry Pi 5")
    assert json.loads(files["plan.json"])["engine"]["n_threads"] == 3
    knobs = {knob["knob"]: knob for knob in json.loads(files["knobs.json"])}
    assert knobs["swappiness"]["effective"] == "10"
    assert "release due: " in files["README.txt"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("bad-settings", "thread is not a setting"), ("no-python", "plan: ")],
)
def test_without_a_plan_the_readme_says_why_and_the_rest_is_there(
    mixed: Any, name: str, why: str
) -> None:
    files = files_of(mixed, name)
    assert "plan.json" not in files
    assert why in files["README.txt"]
    assert "memory.txt" in files
    assert "profile.json" in files


def test_a_diagnosis_changes_nothing(mixed: Any) -> None:
    assert {tuple(host["changed"]) for host in mixed.report["hosts"]} == {()}
    said = mixed.output.split("[fake] simulating command on ")[1:]
    assert [text for text in said if "systemctl start" in text or "systemctl stop" in text] == []
