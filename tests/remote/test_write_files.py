"""write_files: whole files or none, with their mode and owner, contents by standard input."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def file_at(account: Any) -> Callable[..., dict[str, str]]:
    def describe(path: Path, content: str = "new\n", mode: str = "0644") -> dict[str, str]:
        return {
            "path": str(path),
            "content": content,
            "mode": mode,
            "owner": account.user,
            "group": account.group,
        }

    return describe


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_written_with_content_and_mode(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    files = [
        file_at(tmp_path / "entrypoint.sh", "#!/bin/sh\n", "0755"),
        file_at(tmp_path / "probe.key", "secret ü\n", "0600"),
    ]
    done = run("write_files", stdin=files)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "entrypoint.sh").read_text() == "#!/bin/sh\n"
    assert (tmp_path / "probe.key").read_text(encoding="utf-8") == "secret ü\n"
    assert mode_of(tmp_path / "entrypoint.sh") == 0o755
    assert mode_of(tmp_path / "probe.key") == 0o600


def test_the_mode_does_not_depend_on_the_umask_of_the_login(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        run("write_files", stdin=[file_at(tmp_path / "server.env", mode="0664")])
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "server.env") == 0o664


def test_missing_parents_are_made(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "releases" / "3abadcf8e3b5c3fa" / "server.env"
    assert run("write_files", stdin=[file_at(path)]).returncode == 0
    assert path.read_text() == "new\n"
    assert mode_of(path.parent) == 0o755


def test_an_existing_file_is_replaced_by_rename_so_that_its_readers_keep_theirs(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "server.env"
    path.write_text("old\n")
    with path.open() as reader:
        assert run("write_files", stdin=[file_at(path)]).returncode == 0
        assert reader.read() == "old\n"
    assert path.read_text() == "new\n"


def test_nothing_but_the_file_is_left_in_the_directory(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    run("write_files", stdin=[file_at(tmp_path / "server.env")])
    assert os.listdir(tmp_path) == ["server.env"]


def test_a_link_in_the_files_place_is_replaced_and_its_target_left_alone(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    target, link = tmp_path / "target", tmp_path / "server.env"
    target.write_text("not ours\n")
    link.symlink_to(target)
    assert run("write_files", stdin=[file_at(link)]).returncode == 0
    assert not link.is_symlink()
    assert target.read_text() == "not ours\n"


def test_a_directory_in_the_files_place_is_an_error_that_names_it(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "server.env"
    path.mkdir()
    done = run("write_files", stdin=[file_at(path)])
    assert done.returncode == 1
    assert done.stderr.startswith(f"could not write {path}: ")
    assert os.listdir(tmp_path) == ["server.env"]


def test_an_owner_that_the_host_does_not_have_is_one_line_and_no_traceback(
    run: Run, file_at: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    file = {**file_at(tmp_path / "api_keys"), "group": "no-such-group"}
    done = run("write_files", stdin=[file])
    assert done.returncode == 1
    assert done.stderr.startswith(f"could not write {tmp_path / 'api_keys'}: ")
    assert len(done.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_no_file_at_all_is_no_error(run: Run) -> None:
    assert run("write_files", stdin=[]).returncode == 0


def test_a_kill_at_any_time_leaves_the_old_file_or_the_new_one(
    start: Callable[..., subprocess.Popen[bytes]],
    file_at: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:
    path = tmp_path / "big"
    old, new = "o" * 3_000_000, "n" * 3_000_000
    for delay_ms in range(20, 100, 20):
        path.write_text(old)
        process = start("write_files")
        assert process.stdin is not None
        process.stdin.write(json.dumps([file_at(path, new)]).encode())
        process.stdin.close()
        time.sleep(delay_ms / 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
        assert path.read_text() in (old, new)
