"""path_states: what lies at each path, without following a link."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm.facts.paths import PathState, PathStates

Run = Callable[..., Any]


def state(run: Run, path: Path | str) -> dict[str, str]:
    found = run("path_states", [str(path)]).answer
    assert list(found) == [str(path)]
    single: dict[str, str] = found[str(path)]
    return single


def test_a_file_has_mode_owner_group_and_digest(run: Run, account: Any, tmp_path: Path) -> None:
    path = tmp_path / "server.env"
    path.write_bytes(b"A=1\n")
    path.chmod(0o640)
    assert state(run, path) == {
        "kind": "file",
        "mode": "0640",
        "owner": account.user,
        "group": account.group,
        "sha256": hashlib.sha256(b"A=1\n").hexdigest(),
    }


def test_a_directory_has_mode_owner_and_group(run: Run, account: Any, tmp_path: Path) -> None:
    path = tmp_path / "edgellm"
    path.mkdir()
    path.chmod(0o2755)
    assert state(run, path) == {
        "kind": "directory",
        "mode": "2755",
        "owner": account.user,
        "group": account.group,
    }


def test_a_link_has_its_target_as_written_whether_it_is_there_or_not(
    run: Run, tmp_path: Path
) -> None:
    link = tmp_path / "current"
    link.symlink_to("releases/3f2a")
    found = state(run, link)
    assert (found["kind"], found["target"]) == ("link", "releases/3f2a")
    assert "sha256" not in found


def test_what_is_not_there_is_absent(run: Run, tmp_path: Path) -> None:
    assert state(run, tmp_path / "nothing") == {"kind": "absent"}


def test_a_path_below_a_file_is_absent(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert state(run, tmp_path / "file" / "below") == {"kind": "absent"}


def test_a_pipe_is_other_and_is_not_opened(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert state(run, tmp_path / "pipe")["kind"] == "other"


def test_every_path_that_was_asked_for_is_answered(run: Run, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b with space", "c'quote", "dü")]
    assert list(run("path_states", paths).answer) == paths


def test_the_fact_reads_the_scripts_own_line(run: Run, account: Any, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("x")
    line = run("path_states", [str(link), str(tmp_path / "no")]).stdout
    found = PathStates().process(["a banner of the login shell", *line.splitlines()])
    assert found[str(tmp_path / "no")] == PathState(kind="absent")
    assert found[str(link)].target == "x"
    assert found[str(link)].owner == account.user
