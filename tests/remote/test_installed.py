"""installed: names and links under the install directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm.facts.installed import InstallDir, Installed, InstalledRelease

Run = Callable[..., Any]


@pytest.fixture
def look(run: Run, tmp_path: Path) -> Callable[[], Any]:
    def at_the_directory() -> Any:
        names = ("releases", "models", "runtimes", "current", "previous")
        done = run("installed", {name: str(tmp_path / name) for name in names})
        assert (done.returncode, done.stderr) == (0, "")
        return done

    return at_the_directory


def test_a_host_without_anything_of_ours_is_empty_and_no_error(look: Callable[[], Any]) -> None:
    assert look().answer == {
        "releases": {},
        "models": [],
        "runtimes": [],
        "current": None,
        "previous": None,
        "leftovers": [],
    }


def test_a_release_is_listed_with_the_names_that_its_links_end_in(
    look: Callable[[], Any], tmp_path: Path
) -> None:
    release = tmp_path / "releases" / "3f2a"
    release.mkdir(parents=True)
    (release / "server.env").write_text("")
    (release / "model.gguf").symlink_to("../../models/abc.gguf")
    (release / "runtime").symlink_to("../../runtimes/rt-1")
    (tmp_path / "current").symlink_to("releases/3f2a")
    found = look().answer
    assert found["releases"] == {
        "3f2a": {
            "mtime_ns": release.stat().st_mtime_ns,
            "links": ["abc.gguf", "rt-1"],
        }
    }
    assert (found["current"], found["previous"]) == ("3f2a", None)


def test_what_is_under_way_is_not_listed(look: Callable[[], Any], tmp_path: Path) -> None:
    for name in ("models/.m.gguf.part", "models/m.gguf", "runtimes/.rt.unpacking", "runtimes/rt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    found = look().answer
    assert (found["models"], found["runtimes"]) == (["m.gguf"], ["rt"])


def test_stray_files_among_the_releases_do_not_end_the_script(
    look: Callable[[], Any], tmp_path: Path
) -> None:
    releases = tmp_path / "releases"
    releases.mkdir()
    (releases / "notes.txt").write_text("left by a person")
    (releases / "nowhere").symlink_to("gone")
    assert sorted(look().answer["releases"]) == ["notes.txt", "nowhere"]


def test_the_fact_reads_the_scripts_own_line(look: Callable[[], Any], tmp_path: Path) -> None:
    release = tmp_path / "releases" / "3f2a"
    release.mkdir(parents=True)
    (release / "runtime").symlink_to("../../runtimes/rt-1")
    (tmp_path / "previous").symlink_to("releases/3f2a")
    found = Installed().process(look().stdout.splitlines())
    assert found == InstallDir(
        releases=(
            InstalledRelease(id="3f2a", mtime_ns=release.stat().st_mtime_ns, links=("rt-1",)),
        ),
        models=(),
        runtimes=(),
        current=None,
        previous="3f2a",
    )


def test_what_cut_transfers_and_unpackings_left_is_told_by_its_path(
    look: Callable[[], Any], tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / ".abc.gguf.part").write_bytes(b"half")
    (tmp_path / "runtimes" / ".3f2a.unpacking").mkdir(parents=True)
    answer = look().answer
    assert answer["models"] == []
    assert answer["runtimes"] == []
    assert answer["leftovers"] == [
        str(tmp_path / "models" / ".abc.gguf.part"),
        str(tmp_path / "runtimes" / ".3f2a.unpacking"),
    ]
