"""The operator's own ASGI app: a folder of the control machine -> files of the release."""

from __future__ import annotations

import os
import re
from pathlib import Path

from edgellm.errors import SettingsError
from edgellm.release import ReleaseFile

# It is source that is compared, hashed and kept with each release, not data.
MAX_FILES = 64
MAX_FILE_BYTES = 256 * 1024
FOLDER = "app"  # of a release
LEFT_OUT = frozenset({"__pycache__"})  # and whatever begins with a dot


def app_files(folder: Path, app: str) -> tuple[ReleaseFile, ...]:
    """Every file in `folder`, as app/<its path there>, sorted. `app` is 'module:attribute'.

    Raises SettingsError: no such folder, too much in it, a link out of it, a file that is not
    UTF-8 text, no such module.
    """
    root = folder.resolve()
    if not root.is_dir():
        raise _fault(folder, "a folder on the control machine", "none", "correct server_app_dir")
    paths = _paths(folder, root)
    if len(paths) > MAX_FILES:
        raise _fault(
            folder, f"{MAX_FILES} files at most", f"{len(paths)}", "leave the app's own files in it"
        )
    files = tuple(_file(folder, root, path) for path in paths)
    module = app.partition(":")[0].replace(".", "/")
    names = {file.name for file in files}
    if not names & {f"{FOLDER}/{module}.py", f"{FOLDER}/{module}/__init__.py"}:
        raise _fault(
            folder,
            f"{module}.py or {module}/__init__.py, as server_app={app} says",
            ", ".join(sorted(name.removeprefix(f"{FOLDER}/") for name in names)) or "nothing",
            "correct server_app or server_app_dir",
        )
    return files


def _paths(folder: Path, root: Path) -> list[Path]:
    paths: list[Path] = []
    for directory, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if _is_wanted(name))
        here = Path(directory)
        for name in subfolders:
            if (here / name).is_symlink():
                raise _fault(
                    folder, "no links to folders", str(here / name), "put the folder there"
                )
        paths += [here / name for name in sorted(names) if _is_wanted(name)]
    return sorted(paths)


def _is_wanted(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(".")


def _file(folder: Path, root: Path, path: Path) -> ReleaseFile:
    name = path.relative_to(root).as_posix()
    if not path.resolve().is_relative_to(root) or not path.is_file():
        raise _fault(folder, "files of its own", f"{name}, which leads out of it", "copy it there")
    if not re.fullmatch(r"[A-Za-z0-9_./-]+", name):
        raise _fault(folder, "names of letters, digits, . _ -", repr(name), "rename it")
    size_bytes = path.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        raise _fault(
            folder,
            f"files of {MAX_FILE_BYTES // 1024} KiB at most",
            f"{name} of {size_bytes // 1024} KiB",
            "have the app read large data from the host",
        )
    try:
        content = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        have = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise _fault(folder, "files of UTF-8 text", f"{name} ({have})", "leave it out") from None
    return ReleaseFile(name=f"{FOLDER}/{name}", content=content, mode=0o644)


def _fault(folder: Path, want: str, have: str, fix: str) -> SettingsError:
    return SettingsError(what=f"server_app_dir {folder}", want=want, have=have, fix=fix)
