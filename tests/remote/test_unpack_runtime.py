"""unpack_runtime: a runtime gets its name only after it has run on this very host."""

from __future__ import annotations

import io
import os
import signal
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
Member = "tuple[tarfile.TarInfo, bytes]"

OK = (
    "import json\nprint('a warning of a library')\nprint(json.dumps({'ok': True, 'engine': '1.0'}))"
)
ID = "6e4a47a4ba10c119"


def file_member(name: str, content: str = "", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content.encode()), mode
    return info, content.encode()


def typed_member(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, 0o755
    return info, b""


class Host:
    """A runtimes directory with one archive in it, and the script's way to unpack it."""

    def __init__(self, run: Run, directory: Path):
        self._run = run
        self.outside = directory
        self.runtimes = directory / "runtimes"
        self.runtimes.mkdir()
        self.directory = self.runtimes / ID
        self.archive = self.runtimes / f"{ID}.tar.gz"
        self.manifest = self.runtimes / f"{ID}.tar.gz.manifest.json"

    def receives(self, *members: tuple[tarfile.TarInfo, bytes], selfcheck: str = OK) -> None:
        with tarfile.open(self.archive, "w:gz") as tar:
            for info, content in (
                typed_member("edgellm_server", tarfile.DIRTYPE),
                file_member("edgellm_server/__init__.py"),
                file_member("edgellm_server/selfcheck.py", selfcheck),
                *members,
            ):
                tar.addfile(info, io.BytesIO(content))
        self.manifest.write_text("{}")

    def unpack(self, archive: bool = True, **options: Any) -> dict[str, Any]:
        job = {
            "archive": str(self.archive) if archive else None,
            "directory": str(self.directory),
            "id": ID,
        }
        done = self._run("unpack_runtime", job, **options)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = done.answer
        return answer

    def is_whole(self, **options: Any) -> bool:
        wanted = {"models": {}, "runtimes": {str(self.directory): ID}}
        whole: bool = self._run("artifact_states", wanted, **options).answer[str(self.directory)]
        return whole

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.runtimes))


@pytest.fixture
def host(run: Run, tmp_path: Path) -> Host:
    return Host(run, tmp_path)


def test_a_runtime_that_runs_here_gets_its_name_and_its_archive_is_gone(host: Host) -> None:
    host.receives()
    assert host.unpack() == {"ok": True, "selfcheck": {"ok": True, "engine": "1.0"}}
    assert host.names == [ID]
    assert host.is_whole()
    assert (host.directory / "edgellm_server" / "selfcheck.py").read_text() == OK


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param(lambda path: path.unlink(), id="removed"),
        pytest.param(lambda path: path.write_text("other"), id="edited"),
        pytest.param(lambda path: path.chmod(0o666), id="open to others"),
        pytest.param(lambda path: path.with_name("more.py").touch(), id="another beside it"),
        pytest.param(lambda path: path.parent.chmod(0o777), id="its folder open to others"),
    ],
)
def test_a_runtime_that_was_touched_since_is_not_whole(
    host: Host, touch: Callable[[Path], None]
) -> None:
    host.receives()
    host.unpack()
    touch(host.directory / "edgellm_server" / "__init__.py")
    assert not host.is_whole()


def test_a_runtime_with_bytecode_that_a_person_caused_is_whole(host: Host) -> None:
    host.receives()
    host.unpack()
    cache = host.directory / "edgellm_server" / "__pycache__"
    cache.mkdir()
    (cache / "app.cpython-311.pyc").touch()
    assert host.is_whole()


def test_bytecode_of_the_self_check_does_not_stay(host: Host) -> None:
    host.receives(selfcheck=f"import edgellm_server.other\n{OK}")
    host.receives(
        file_member("edgellm_server/other.py"), selfcheck=f"import edgellm_server.other\n{OK}"
    )
    assert host.unpack()["ok"] is True
    assert not list(host.directory.rglob("__pycache__"))


def test_modes_of_the_archive_are_kept(host: Host) -> None:
    host.receives(file_member("tool", "#!/bin/sh\n", 0o755))
    host.unpack()
    assert stat.S_IMODE((host.directory / "tool").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("selfcheck", "error"),
    [
        pytest.param(
            "import sys\nsys.exit('libgomp.so.1: cannot open shared object file')",
            "libgomp.so.1: cannot open shared object file",
            id="exit",
        ),
        pytest.param("raise ImportError('no engine')", "ImportError: no engine", id="traceback"),
        pytest.param(
            "import json; print(json.dumps({'ok': False, 'error': 'no avx2'}))",
            "no avx2",
            id="its own word",
        ),
        pytest.param("print('all well')", "no output", id="no JSON"),
        pytest.param("", "no output", id="nothing"),
        pytest.param("print('[1]')", "no output", id="JSON that is no object"),
        pytest.param("print('null')", "no output", id="null"),
    ],
)
def test_a_runtime_that_fails_its_self_check_leaves_no_directory(
    host: Host, selfcheck: str, error: str
) -> None:
    host.receives(selfcheck=selfcheck)
    assert host.unpack() == {"ok": False, "kind": "selfcheck", "error": error}
    assert ID not in host.names
    assert not [name for name in host.names if name.endswith(".unpacking")]


def test_a_runtime_with_instructions_that_this_cpu_lacks_is_told_by_its_signal(
    host: Host,
) -> None:
    host.receives(selfcheck="import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    assert host.unpack() == {"ok": False, "kind": "signal", "signal": int(signal.SIGILL)}
    assert ID not in host.names


def test_a_self_check_that_hangs_is_ended(host: Host) -> None:
    host.receives(selfcheck="import time\ntime.sleep(60)")
    answer = host.unpack(replacing={"timeout=300": "timeout=0.5"})
    assert (answer["ok"], answer["kind"]) == (False, "selfcheck")
    assert ID not in host.names


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(file_member("../outside", "x"), id="parent"),
        pytest.param(file_member("edgellm_server/../../outside", "x"), id="parent further in"),
        pytest.param(typed_member("link", tarfile.SYMTYPE, "/etc/passwd"), id="symbolic link"),
        pytest.param(
            typed_member("hard", tarfile.LNKTYPE, "edgellm_server/__init__.py"), id="hard link"
        ),
        pytest.param(typed_member("pipe", tarfile.FIFOTYPE), id="pipe"),
        pytest.param(typed_member("device", tarfile.CHRTYPE), id="device"),
    ],
)
def test_a_member_that_could_leave_the_directory_is_refused_and_nothing_stays(
    host: Host, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    host.receives(member)
    answer = host.unpack()
    assert (answer["ok"], answer["kind"]) == (False, "archive")
    assert answer["error"] == f"unexpected member {member[0].name}"
    assert host.names == [host.archive.name, host.manifest.name]
    assert not (host.outside / "outside").exists()


def test_a_member_with_an_absolute_path_is_refused(host: Host, tmp_path: Path) -> None:
    host.receives(file_member(str(tmp_path / "outside"), "x"))
    assert host.unpack()["kind"] == "archive"
    assert not (tmp_path / "outside").exists()


def test_a_damaged_archive_is_an_answer_and_no_traceback(host: Host) -> None:
    host.receives()
    host.archive.write_bytes(host.archive.read_bytes()[:-40])
    answer = host.unpack()
    assert answer["ok"] is False
    assert answer["error"]
    assert ID not in host.names


def test_an_archive_that_is_not_there_is_an_answer_and_no_traceback(host: Host) -> None:
    answer = host.unpack()
    assert (answer["ok"], answer["kind"]) == (False, "os")


def test_what_a_power_cut_left_half_unpacked_is_replaced(host: Host) -> None:
    staging = host.runtimes / f".{ID}.unpacking"
    staging.mkdir()
    (staging / "half").write_text("of an earlier run")
    host.directory.mkdir()
    (host.directory / "no-marker").write_text("in it")
    host.receives()
    assert host.unpack()["ok"] is True
    assert host.names == [ID]
    assert not (host.directory / "half").exists()
    assert not (host.directory / "no-marker").exists()


def test_a_failed_runtime_leaves_the_one_that_is_in_use_alone(host: Host) -> None:
    host.receives()
    host.unpack()
    host.receives(selfcheck="raise SystemExit(1)")
    assert host.unpack()["ok"] is False
    assert host.is_whole()


# The host's Python was updated, or a byte has rotted

ANOTHER_PYTHON = {"{sys.version_info.major}.{sys.version_info.minor}": "3.99"}


def test_a_byte_that_rotted_under_an_unchanged_stat_makes_a_runtime_not_whole(host: Host) -> None:
    host.receives(file_member("libengine.so", "x" * 1000))
    host.unpack()
    library = host.directory / "libengine.so"
    before = library.stat()
    with library.open("r+b") as file:
        file.write(b"y")
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not host.is_whole()
    assert host.unpack(archive=False) == {"ok": False, "kind": "bytes"}


def test_a_runtime_that_ran_under_another_python_is_run_again_and_not_unpacked(
    host: Host,
) -> None:
    host.receives()
    host.unpack()
    inode = (host.directory / "edgellm_server" / "selfcheck.py").stat().st_ino
    assert not host.is_whole(replacing=ANOTHER_PYTHON)
    answer = host.unpack(archive=False, replacing=ANOTHER_PYTHON)
    assert answer == {"ok": True, "selfcheck": {"ok": True, "engine": "1.0"}}
    assert host.is_whole(replacing=ANOTHER_PYTHON)
    assert not host.is_whole()
    assert (host.directory / "edgellm_server" / "selfcheck.py").stat().st_ino == inode
    assert not list(host.directory.rglob("__pycache__"))


def test_a_runtime_that_does_not_run_under_another_python_stays_not_whole(host: Host) -> None:
    host.receives(selfcheck=f"import os\nif os.path.exists('{host.outside}/updated'): 1/0\n{OK}")
    host.unpack()
    (host.outside / "updated").touch()
    answer = host.unpack(archive=False, replacing=ANOTHER_PYTHON)
    assert answer == {
        "ok": False,
        "kind": "selfcheck",
        "error": "ZeroDivisionError: division by zero",
    }
    assert host.names == [ID]
    assert not host.is_whole(replacing=ANOTHER_PYTHON)


def test_a_runtime_that_is_not_there_has_nothing_to_run_again(host: Host) -> None:
    assert host.unpack(archive=False) == {"ok": False, "kind": "bytes"}
    assert host.names == []
