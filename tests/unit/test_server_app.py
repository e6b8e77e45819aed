"""The operator's own app: a folder of the control machine -> files of the release, or its fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.errors import SettingsError
from edgellm.server_app import MAX_FILE_BYTES, MAX_FILES, app_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my_app"
    path.mkdir()
    (path / "main.py").write_text("app = 1\r\n", newline="")
    return path


def test_files_are_named_as_they_lie_and_their_text_is_kept_to_the_byte(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "a.py").write_text("")
    files = app_files(folder, "main:app")
    assert [(file.name, file.content, file.mode) for file in files] == [
        ("app/main.py", "app = 1\r\n", 0o644),
        ("app/parts/a.py", "", 0o644),
    ]


def test_caches_and_hidden_files_are_left_out(folder: Path) -> None:
    for name in ("__pycache__", ".git"):
        (folder / name).mkdir()
        (folder / name / "x").write_bytes(b"\xff")
    (folder / ".env").write_text("SECRET=1")
    assert [file.name for file in app_files(folder, "main:app")] == ["app/main.py"]


def test_a_package_is_a_module_too(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "__init__.py").write_text("")
    assert len(app_files(folder, "site:app")) == 2


def test_a_link_within_the_folder_is_its_text(folder: Path) -> None:
    (folder / "b.py").symlink_to("main.py")
    assert [file.content for file in app_files(folder, "main:app")] == ["app = 1\r\n"] * 2


def _out(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    (folder / "a.py").symlink_to("../secret")


def _folder_link(folder: Path) -> None:
    (folder / "up").symlink_to("..")


def _too_many(folder: Path) -> None:
    for number in range(MAX_FILES):
        (folder / f"{number}.py").write_text("")


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        pytest.param(_out, "a.py, which leads out of it", id="link out"),
        pytest.param(_folder_link, "no links to folders", id="link to a folder"),
        pytest.param(_too_many, f"have {MAX_FILES + 1}", id="too many"),
        pytest.param(
            lambda f: (f / "big.txt").write_text("x" * (MAX_FILE_BYTES + 1)), "big.txt", id="big"
        ),
        pytest.param(
            lambda f: (f / "logo.png").write_bytes(b"\x89PNG\xff"), "logo.png (not UTF-8)", id="png"
        ),
        pytest.param(lambda f: (f / "a b.py").write_text(""), "'a b.py'", id="space in a name"),
        pytest.param(lambda f: (f / "main.py").unlink(), "main.py or main/__init__.py", id="none"),
        pytest.param(lambda f: (f / "gone.py").symlink_to("x"), "gone.py", id="dangling link"),
    ],
)
def test_what_cannot_be_sent_is_named(
    folder: Path, spoil: Callable[[Path], object], fault: str
) -> None:
    spoil(folder)
    with pytest.raises(SettingsError) as caught:
        app_files(folder, "main:app")
    assert fault in str(caught.value)
    assert caught.value.fix


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"server_app_dir .*nowhere.*have none"):
        app_files(tmp_path / "nowhere", "main:app")
