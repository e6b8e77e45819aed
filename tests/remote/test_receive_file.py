"""receive_file: a large file in one or more connections, in place only when it is whole."""

from __future__ import annotations

import hashlib
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
Start = Callable[..., "subprocess.Popen[bytes]"]

CONTENT = bytes(range(256)) * 4096  # 1 MiB
HALF = len(CONTENT) // 2
WITHIN_S = 10


class Receiver:
    """One destination, and the receiver's three actions on it."""

    def __init__(self, run: Run, directory: Path, content: bytes = CONTENT):
        self._run = run
        self.path = directory / "models" / "m.gguf"
        self.part = directory / "models" / ".m.gguf.part"
        self.manifest = directory / "models" / "m.gguf.manifest.json"
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.size_bytes = len(content)

    def job(self, action: str) -> dict[str, Any]:
        return {
            "action": action,
            "path": str(self.path),
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
        }

    def __call__(self, action: str, data: bytes = b"") -> dict[str, Any]:
        done = self._run("receive_file", self.job(action), stdin=data)
        assert (done.returncode, done.stderr) == (0, "")
        answer: dict[str, Any] = done.answer
        return answer


@pytest.fixture
def receive(run: Run, tmp_path: Path) -> Receiver:
    return Receiver(run, tmp_path)


def wait_for(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < ends_at, "it did not come to pass in time"
        time.sleep(0.01)


def end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    return process.communicate(timeout=WITHIN_S)


def test_a_new_file_starts_at_offset_0_and_its_directory_is_made(receive: Receiver) -> None:
    assert receive("offset") == {"ok": True, "offset": 0}
    assert stat.S_IMODE(receive.path.parent.stat().st_mode) == 0o755
    assert not receive.path.exists()


def test_a_file_that_came_whole_is_in_place_after_finish_and_not_before(
    receive: Receiver,
) -> None:
    assert receive("append", CONTENT) == {"ok": True, "offset": len(CONTENT)}
    assert not receive.path.exists()
    assert receive("finish") == {"ok": True, "offset": len(CONTENT)}
    assert receive.path.read_bytes() == CONTENT
    assert stat.S_IMODE(receive.path.stat().st_mode) == 0o644
    assert sorted(os.listdir(receive.path.parent)) == ["m.gguf", "m.gguf.manifest.json"]


def test_the_manifest_notes_digest_size_time_inode_mode_and_owner(receive: Receiver) -> None:
    receive("append", CONTENT)
    receive("finish")
    found = receive.path.stat()
    assert json.loads(receive.manifest.read_text()) == {
        "sha256": receive.sha256,
        "size_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "mode": 0o644,
        "uid": os.getuid(),
        "gid": os.getgid(),
    }


def test_a_transfer_resumes_where_it_stopped(receive: Receiver) -> None:
    receive("append", CONTENT[:HALF])
    assert receive("offset") == {"ok": True, "offset": HALF}
    assert receive("append", CONTENT[HALF:]) == {"ok": True, "offset": len(CONTENT)}
    assert receive("finish")["ok"] is True
    assert receive.path.read_bytes() == CONTENT


def test_a_short_file_is_not_finished_and_what_came_is_kept(receive: Receiver) -> None:
    receive("append", CONTENT[:HALF])
    assert receive("finish") == {"ok": False, "kind": "short", "offset": HALF}
    assert not receive.path.exists()
    assert receive("offset") == {"ok": True, "offset": HALF}


def test_a_part_that_is_too_long_is_not_finished_and_begun_anew(receive: Receiver) -> None:
    receive("append", CONTENT + b"more")
    assert receive("finish")["kind"] == "short"
    assert receive("offset") == {"ok": True, "offset": 0}
    receive("append", CONTENT)
    assert receive("finish")["ok"] is True


def test_wrong_bytes_of_the_right_number_are_removed(receive: Receiver) -> None:
    wrong = b"x" * len(CONTENT)
    receive("append", wrong)
    answer = receive("finish")
    assert answer == {
        "ok": False,
        "kind": "digest",
        "have": hashlib.sha256(wrong).hexdigest(),
    }
    assert os.listdir(receive.path.parent) == []
    assert receive("offset") == {"ok": True, "offset": 0}


def test_a_new_file_of_the_same_name_replaces_the_old_one_whole(
    run: Run, receive: Receiver, tmp_path: Path
) -> None:
    receive("append", CONTENT)
    receive("finish")
    with receive.path.open("rb") as server:
        newer = Receiver(run, tmp_path, b"newer")
        newer("append", b"newer")
        assert newer("finish")["ok"] is True
        assert server.read() == CONTENT
    assert receive.path.read_bytes() == b"newer"


def test_a_disk_too_small_is_told_before_the_first_byte(run: Run, tmp_path: Path) -> None:
    receive = Receiver(run, tmp_path)
    receive.size_bytes = 1 << 60
    answer = receive("offset")
    assert (answer["ok"], answer["kind"], answer["needed_bytes"]) == (False, "disk_full", 1 << 60)
    assert 0 < answer["free_bytes"] < 1 << 60


def test_a_directory_that_cannot_be_made_is_an_answer_and_no_traceback(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "models").write_text("a file where a directory belongs")
    answer = Receiver(run, tmp_path)("offset")
    assert (answer["ok"], answer["kind"]) == (False, "os")


def test_a_second_transfer_of_the_same_file_is_locked_out_while_one_is_under_way(
    start: Start, receive: Receiver
) -> None:
    first = start("receive_file", receive.job("append"))
    assert first.stdin is not None
    first.stdin.write(CONTENT[:HALF])
    first.stdin.flush()
    wait_for(lambda: receive.part.exists() and receive.part.stat().st_size > 0)
    for action in ("offset", "append", "finish"):
        assert receive(action) == {"ok": False, "kind": "locked"}
    stdout, _ = end(first)
    assert json.loads(stdout) == {"ok": True, "offset": HALF}
    assert receive("offset") == {"ok": True, "offset": HALF}


def test_a_link_that_stalls_frees_the_lock_and_keeps_what_came(
    start: Start, receive: Receiver
) -> None:
    stalled = start(
        "receive_file", receive.job("append"), replacing={"STALL_S = 45": "STALL_S = 0.2"}
    )
    assert stalled.stdin is not None
    assert stalled.stdout is not None
    stalled.stdin.write(CONTENT[:HALF])
    stalled.stdin.flush()  # and never a byte more, nor an end
    assert json.loads(stalled.stdout.readline()) == {"ok": True, "offset": HALF}
    assert stalled.wait(timeout=WITHIN_S) == 0
    end(stalled)
    assert receive("offset") == {"ok": True, "offset": HALF}


def test_a_power_cut_in_mid_append_leaves_no_file_in_place_and_a_part_to_resume(
    start: Start, receive: Receiver
) -> None:
    receiver = start("receive_file", receive.job("append"))
    assert receiver.stdin is not None
    receiver.stdin.write(CONTENT[:HALF])
    receiver.stdin.flush()
    wait_for(lambda: receive.part.exists() and receive.part.stat().st_size > 0)
    receiver.send_signal(signal.SIGKILL)
    end(receiver)
    assert not receive.path.exists()
    assert not receive.manifest.exists()
    offset = receive("offset")["offset"]
    assert 0 < offset <= HALF
    assert receive("append", CONTENT[offset:])["offset"] == len(CONTENT)
    assert receive("finish")["ok"] is True
    assert receive.path.read_bytes() == CONTENT


def test_a_power_cut_between_the_file_and_its_manifest_is_mended_by_the_next_run(
    run: Run, start: Start, receive: Receiver
) -> None:
    receive("append", CONTENT)
    cut = start(
        "receive_file",
        receive.job("finish"),
        replacing={
            "        with open(part,": "        os.kill(os.getpid(), 9)\n        with open(part,"
        },
    )
    end(cut)
    assert cut.returncode == -signal.SIGKILL
    assert receive.path.read_bytes() == CONTENT
    wanted = {"models": {str(receive.path): receive.sha256}, "runtimes": {}}
    assert run("artifact_states", wanted).answer == {str(receive.path): False}
    assert receive("offset") == {"ok": True, "offset": len(CONTENT)}  # nothing is sent again
    assert receive("finish")["ok"] is True
    assert run("artifact_states", wanted).answer == {str(receive.path): True}


def test_a_receiver_that_opened_the_part_just_before_it_was_renamed_cannot_touch_the_file(
    start: Start, receive: Receiver
) -> None:
    receive("append", CONTENT)
    # It opens the part, and is then slower than a whole `finish` of another run
    late = start(
        "receive_file",
        receive.job("append"),
        replacing={"    try:\n        fcntl": "    os.read(0, 3)\n    try:\n        fcntl"},
    )
    wait_for(lambda: _has_open(late.pid, receive.part))
    assert receive("finish")["ok"] is True
    stdout, _ = late.communicate(b"go\n" + b"bytes of a run that lost the race", timeout=WITHIN_S)
    assert json.loads(stdout) == {"ok": False, "kind": "locked"}
    assert receive.path.read_bytes() == CONTENT


def _has_open(pid: int, path: Path) -> bool:
    descriptors = Path(f"/proc/{pid}/fd")
    for descriptor in descriptors.iterdir():
        try:
            if descriptor.readlink() == path:
                return True
        except OSError:
            continue
    return False


def test_a_file_that_is_whole_already_is_not_asked_for_again(receive: Receiver) -> None:
    receive("offset")
    receive("append", CONTENT)
    assert receive("finish")["ok"] is True
    inode = receive.path.stat().st_ino
    assert receive("offset") == {"ok": True, "offset": receive.size_bytes}
    assert receive("finish") == {"ok": True, "offset": receive.size_bytes}
    assert receive.path.stat().st_ino == inode
    assert not receive.part.exists()


@pytest.mark.parametrize(
    "touch", [lambda path: os.utime(path, ns=(1, 1)), lambda p: p.chmod(0o666)]
)
def test_a_file_that_was_touched_since_is_verified_again_and_not_asked_for(
    receive: Receiver, touch: Callable[[Path], None]
) -> None:
    receive("append", CONTENT)
    receive("finish")
    inode = receive.path.stat().st_ino
    touch(receive.path)
    assert receive("offset") == {"ok": True, "offset": len(CONTENT)}
    assert receive("finish") == {"ok": True, "offset": len(CONTENT)}
    assert receive.path.stat().st_ino == inode
    assert stat.S_IMODE(receive.path.stat().st_mode) == 0o644


def test_a_file_that_was_damaged_since_is_asked_for_again(receive: Receiver) -> None:
    receive("append", CONTENT)
    receive("finish")
    receive.path.write_bytes(b"x" * len(CONTENT))
    assert receive("offset") == {"ok": True, "offset": len(CONTENT)}
    assert receive("finish")["kind"] == "digest"
    assert receive("offset") == {"ok": True, "offset": 0}
    receive("append", CONTENT)
    assert receive("finish")["ok"] is True
    assert receive.path.read_bytes() == CONTENT


def test_a_file_that_rotted_untouched_is_asked_for_again_and_stays_until_the_new_one_is_whole(
    receive: Receiver,
) -> None:
    receive("append", CONTENT)
    receive("finish")
    before = receive.path.stat()
    with receive.path.open("r+b") as file:
        file.write(b"x")
    os.utime(receive.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    rotten = receive.path.read_bytes()
    assert receive("offset") == {"ok": True, "offset": 0}
    receive("append", CONTENT[:HALF])
    assert receive.path.read_bytes() == rotten  # a server that starts meanwhile has a file
    assert receive("offset") == {"ok": True, "offset": HALF}
    receive("append", CONTENT[HALF:])
    assert receive("finish") == {"ok": True, "offset": len(CONTENT)}
    assert receive.path.read_bytes() == CONTENT
    assert receive.path.stat().st_ino != before.st_ino  # who maps the rotten one can be told
    assert not receive.part.exists()
