"""Facts that are scripts of edgellm.remote or the host probe: what they ask, how they read."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import FactProcessError

from edgellm.facts.host_profile import HostProfileFact, probe_command
from edgellm.facts.installed import Installed
from edgellm.facts.paths import ArtifactsWhole, PathState, PathStates
from edgellm.facts.service import ReleaseUnits, UnitsState
from edgellm.facts.upstream import UpstreamUnits
from edgellm.hardware import Arch, HostProfile, RecordedHost
from edgellm.remote import script

SCRIPT_FACTS = (PathStates, ArtifactsWhole, Installed, ReleaseUnits, UpstreamUnits)


def words(command: Any) -> list[str]:
    return shlex.split(command.get_raw_value())


def test_path_states_asks_for_its_paths_as_json() -> None:
    paths = ("/etc/edgellm", "/srv/with space", "/srv/it's")
    assert words(PathStates().command(paths)) == [
        "python3",
        "-c",
        script("path_states"),
        json.dumps(list(paths)),
    ]


def test_artifacts_whole_asks_for_models_and_runtimes() -> None:
    asked = json.loads(words(ArtifactsWhole().command({"/m": "ab"}, {"/r": "rt"}))[-1])
    assert asked == {"models": {"/m": "ab"}, "runtimes": {"/r": "rt"}}


def test_installed_asks_for_the_directories_of_the_layout() -> None:
    asked = json.loads(words(Installed().command())[-1])
    assert asked["releases"] == "/opt/edgellm/releases"
    assert asked["current"] == "/opt/edgellm/current"


def test_release_units_asks_for_the_units_of_one_release() -> None:
    asked = json.loads(words(ReleaseUnits().command("3f2a"))[-1])
    assert asked["release"] == "/opt/edgellm/releases/3f2a"
    assert asked["units"] == ["edgellm.service", "edgellm.socket", "edgellm.slice"]


def test_release_units_read_as_what_is_to_change() -> None:
    line = json.dumps({"differing": [["/r/a", "/u/a"]], "surplus": ["/u/b"]})
    assert ReleaseUnits().process([line]) == UnitsState(
        differing=(("/r/a", "/u/a"),), surplus=("/u/b",)
    )


def test_path_states_read_as_path_states() -> None:
    line = json.dumps({"/a": {"kind": "link", "target": "b"}, "/c": {"kind": "absent"}})
    assert PathStates().process([line]) == {
        "/a": PathState(kind="link", target="b"),
        "/c": PathState(kind="absent"),
    }


def test_only_true_is_whole() -> None:
    line = json.dumps({"/a": True, "/b": False, "/c": "yes", "/d": 1, "/e": None})
    found = ArtifactsWhole().process([line])
    assert found == {"/a": True, "/b": False, "/c": False, "/d": False, "/e": False}


@pytest.mark.parametrize("fact", SCRIPT_FACTS)
@pytest.mark.parametrize(
    "output",
    [
        pytest.param([], id="nothing"),
        pytest.param([""], id="an empty line"),
        pytest.param(["sh: 1: python3: not found"], id="a shell's error"),
        pytest.param(['{"/a": '], id="cut short"),
        pytest.param(["[]"], id="a list"),
        pytest.param(["null"], id="null"),
        pytest.param(["[" * 100_000], id="nested without bound"),
        pytest.param(['{"/a": {"shape": 1}}'], id="an unknown shape"),
        pytest.param(['{"releases": 1, "models": 2, "runtimes": 3}'], id="numbers for lists"),
        pytest.param(
            ['{"releases": {"a": 1}, "models": [], "runtimes": [], "current": 1, "previous": 1}'],
            id="a number for a release",
        ),
    ],
)
def test_output_that_is_not_the_scripts_fails_this_host_alone(
    fact: type[Any], output: list[str]
) -> None:
    # pyinfra ends the whole run on any other exception in process()
    try:
        found = fact().process(output)
    except FactProcessError:
        return
    assert fact is ArtifactsWhole
    assert not any(found.values())


@pytest.mark.parametrize("name", ["raspberry-pi-5", "kunpeng-920", "i5-8250u"])
def test_a_boards_probe_output_reads_as_its_profile(
    probe_text: Callable[[str], str], board: Callable[[str], HostProfile], name: str
) -> None:
    found = HostProfileFact().process(probe_text(name).splitlines())
    assert found.arch in tuple(Arch)
    assert found.cpus_online == board(name).cpus_online


@pytest.mark.parametrize(
    "output", [[], [""], ["sh: syntax error"], ["@@ format", "99"], ["@@ format", "1"]]
)
def test_a_probe_output_that_does_not_read_fails_this_host_alone(output: list[str]) -> None:
    with pytest.raises(FactProcessError, match="fix"):
        HostProfileFact().process(output)


@pytest.mark.parametrize("kept", ["recorded", "measured"])
def test_the_probe_brings_what_a_roll_out_recorded_even_cut_short(
    tmp_path: Path, kept: str
) -> None:
    """Run here for real, on files in a place of our own."""
    whole = RecordedHost(
        kernel="6.1",
        python="3.11.2",
        cpus_online="0-1",
        cgroup_version=2,
        distribution="debian 12",
        mem_total_bytes=2,
        mem_available_bytes=1,
    ).to_json_text()
    command = probe_command()
    for name in ("recorded", "measured"):
        path = f"/opt/edgellm/{name}.json"
        assert path in command
        command = command.replace(path, str(tmp_path / f"{name}.json"))
        text = whole if name == kept else whole.rstrip("\n")[:-2]  # cut in the middle of a line
        (tmp_path / f"{name}.json").write_text(text)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    profile = HostProfileFact().process(done.stdout.splitlines())
    assert (profile.recorded is None) is (kept != "recorded")
    assert profile.measured_json is not None
    assert profile.cpus_online
    assert profile.cgroup.effective_nodes


def test_the_probe_travels_without_its_comments() -> None:
    lines = probe_command().splitlines()
    assert not [line for line in lines if line.lstrip().startswith("#") or not line.strip()]
    assert len(probe_command().encode()) < 32 * 1024
