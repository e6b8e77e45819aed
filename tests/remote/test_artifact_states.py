"""artifact_states: whole by the manifest, and by the bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Path:
    """A model as receive_file leaves it."""
    path = tmp_path / "m.gguf"
    job = {"path": str(path), "sha256": SHA256, "size_bytes": len(CONTENT)}
    run("receive_file", {**job, "action": "append"}, stdin=CONTENT)
    assert run("receive_file", {**job, "action": "finish"}).answer["ok"] is True
    return path


def model_is_whole(run: Run, path: Path, sha256: str = SHA256) -> bool:
    answer = run("artifact_states", {"models": {str(path): sha256}, "runtimes": {}}).answer
    whole: bool = answer[str(path)]
    return whole


def test_a_model_that_was_just_received_is_whole(run: Run, model: Path) -> None:
    assert model_is_whole(run, model)


def test_another_digest_than_the_one_verified_is_not_whole(run: Run, model: Path) -> None:
    assert not model_is_whole(run, model, "0" * 64)


def test_a_model_that_was_touched_is_not_whole(run: Run, model: Path) -> None:
    os.utime(model, ns=(1, 1))
    assert not model_is_whole(run, model)


def test_a_model_that_others_may_write_to_is_not_whole(run: Run, model: Path) -> None:
    model.chmod(0o666)
    assert not model_is_whole(run, model)


def test_a_model_that_was_truncated_is_not_whole(run: Run, model: Path) -> None:
    times = (model.stat().st_atime_ns, model.stat().st_mtime_ns)
    os.truncate(model, len(CONTENT) - 1)
    os.utime(model, ns=times)
    assert not model_is_whole(run, model)


def test_a_model_replaced_by_a_file_of_the_same_size_and_time_is_not_whole(
    run: Run, model: Path
) -> None:
    times = (model.stat().st_atime_ns, model.stat().st_mtime_ns)
    other = model.with_name("other")
    other.write_bytes(b"x" * len(CONTENT))
    os.utime(other, ns=times)
    other.replace(model)
    assert not model_is_whole(run, model)


def test_a_model_without_a_manifest_is_not_whole(run: Run, model: Path) -> None:
    model.with_name("m.gguf.manifest.json").unlink()
    assert not model_is_whole(run, model)


@pytest.mark.parametrize("damage", ["", "{", "null", "[]"])
def test_a_damaged_manifest_is_not_whole_and_no_error(run: Run, model: Path, damage: str) -> None:
    model.with_name("m.gguf.manifest.json").write_text(damage)
    assert not model_is_whole(run, model)


def test_a_manifest_without_its_model_is_not_whole(run: Run, model: Path) -> None:
    model.unlink()
    assert not model_is_whole(run, model)


def test_a_byte_that_rotted_under_an_unchanged_stat_is_not_whole(run: Run, model: Path) -> None:
    flip_a_byte(model)
    assert not model_is_whole(run, model)


def flip_a_byte(path: Path) -> None:
    """As a worn card does: nothing but the byte tells."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(3)
        (byte,) = file.read(1)
        file.seek(3)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size,
        before.st_mtime_ns,
        before.st_ino,
    )


def test_a_model_that_cannot_be_read_is_not_whole_and_no_error(run: Run, model: Path) -> None:
    # Its manifest still vouches for the stat, and the card gives an error for a block
    answer = run(
        "artifact_states",
        {"models": {str(model): SHA256}, "runtimes": {}},
        replacing={
            "    digest = hashlib.sha256()\n    add_bytes": "    raise OSError(5)\n    add_bytes"
        },
    ).answer
    assert answer == {str(model): False}


def test_reading_steps_back_for_a_server_that_answers(run: Run, model: Path) -> None:
    said = run(
        "artifact_states",
        {"models": {}, "runtimes": {}},
        replacing={"print(json.dumps(states))": "print(os.sched_getscheduler(0))"},
    )
    assert said.answer == os.SCHED_IDLE


def test_a_model_of_another_size_is_not_read(run: Run, model: Path) -> None:
    # A sparse file of 1 TiB could not be hashed within the test's time
    os.truncate(model, 1 << 40)
    assert not model_is_whole(run, model)


def test_a_runtime_without_its_marker_or_with_another_is_not_whole(
    run: Run, tmp_path: Path
) -> None:
    old, other, half = (tmp_path / name for name in ("old", "other", "half"))
    for directory, text in ((old, "rt-1\n"), (other, "rt-0\n"), (half, None)):
        directory.mkdir()
        if text is not None:
            (directory / ".complete").write_text(text)
    wanted = {str(path): "rt-1" for path in (old, other, half, tmp_path / "absent")}
    assert run("artifact_states", {"models": {}, "runtimes": wanted}).answer == {
        str(old): False,
        str(other): False,
        str(half): False,
        str(tmp_path / "absent"): False,
    }
