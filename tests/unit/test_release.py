"""A release's id is its content."""

from __future__ import annotations

import pytest

from edgellm.release import Release, ReleaseFile, release_id

MODEL = "7671c0c304e6ce5a7fc577bcb12aba01e2c155cc2efd29b2213c95b18edaf6ed"
RUNTIME = "78aca52756f61423"
UNIT = ReleaseFile(name="edgellm.service", content="[Service]\nNice=0\n", mode=0o644)
ENTRY = ReleaseFile(name="entrypoint.sh", content="#!/bin/sh\nexec true\n", mode=0o755)


def test_equal_content_has_one_id_in_whatever_order_it_comes() -> None:
    one = Release.of(model_sha256=MODEL, runtime_id=RUNTIME, files=[UNIT, ENTRY])
    other = Release.of(model_sha256=MODEL, runtime_id=RUNTIME, files=[ENTRY, UNIT])
    assert one == other
    assert [file.name for file in one.files] == ["edgellm.service", "entrypoint.sh"]


def test_the_id_is_the_same_in_every_version_of_the_product() -> None:
    # A changed rule would make every host of every fleet place a new release.
    assert release_id(model_sha256=MODEL, runtime_id=RUNTIME, files=[UNIT, ENTRY]) == (
        "f85de6f8169c59ff"
    )


@pytest.mark.parametrize(
    "changed",
    [
        Release.of(model_sha256="0" * 64, runtime_id=RUNTIME, files=[UNIT, ENTRY]),
        Release.of(model_sha256=MODEL, runtime_id="0ec9256e610ff004", files=[UNIT, ENTRY]),
        Release.of(model_sha256=MODEL, runtime_id=RUNTIME, files=[UNIT]),
        Release.of(
            model_sha256=MODEL,
            runtime_id=RUNTIME,
            files=[ReleaseFile(name=UNIT.name, content=UNIT.content, mode=0o600), ENTRY],
        ),
        Release.of(
            model_sha256=MODEL,
            runtime_id=RUNTIME,
            files=[ReleaseFile(name=UNIT.name, content=UNIT.content + "\n", mode=0o644), ENTRY],
        ),
    ],
    ids=["model", "runtime", "a file less", "a mode", "a line"],
)
def test_a_change_of_anything_is_another_release(changed: Release) -> None:
    assert changed.id != Release.of(model_sha256=MODEL, runtime_id=RUNTIME, files=[UNIT, ENTRY]).id


def test_a_release_without_a_model_is_another_one_and_always_the_same() -> None:
    without = Release.of(model_sha256=None, runtime_id=RUNTIME, files=[UNIT, ENTRY])
    assert without.model_sha256 is None
    assert without.id == "622e0b64db96fe7b"


def test_text_moved_from_a_name_into_its_content_is_another_release() -> None:
    one = ReleaseFile(name="a", content="bc", mode=0o644)
    other = ReleaseFile(name="ab", content="c", mode=0o644)
    assert release_id(model_sha256=MODEL, runtime_id=RUNTIME, files=[one]) != release_id(
        model_sha256=MODEL, runtime_id=RUNTIME, files=[other]
    )


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two files of one name"):
        release_id(model_sha256=MODEL, runtime_id=RUNTIME, files=[UNIT, UNIT])
