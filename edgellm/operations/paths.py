"""Small files, directories and links on a host: written only where they differ, atomically."""

from __future__ import annotations

import posixpath
from collections.abc import Generator, Sequence
from dataclasses import asdict

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from edgellm import layout
from edgellm.desired import HostDirectory as HostDirectory
from edgellm.desired import HostFile as HostFile
from edgellm.facts.paths import PathStates
from edgellm.facts.reading import read
from edgellm.operations.containment import host_operation
from edgellm.remote import script_command

# Made for a file of ours where nobody had made them, and removed with it where nothing else came
FOLDERS = frozenset(
    posixpath.dirname(path)
    for path in (layout.ZRAM_GENERATOR_CONF, *map(layout.drop_in_path, layout.RESERVED_SLICES))
)


@host_operation()
def present(
    files: tuple[HostFile, ...],
    directories: tuple[HostDirectory, ...] = (),
    links: tuple[tuple[str, str], ...] = (),
    absent: tuple[str, ...] = (),
) -> Generator[StringCommand]:
    """Directories, then files, then links (path, target), each as given; `absent` is not there.

    Contents travel on standard input: they are in no argument list and in no temporary file.
    """
    paths = tuple(sorted([file.path for file in files] + [item.path for item in directories]))
    if not paths and not links and not absent:
        host.noop("nothing planned for this host")
        return
    states = read(PathStates, paths=(*paths, *(path for path, _ in links), *absent))
    stale = 0
    for directory in directories:
        if states[directory.path] != directory.state:
            stale += 1
            yield StringCommand(
                "install",
                "-d",
                "-m",
                directory.mode,
                "-o",
                directory.owner,
                "-g",
                directory.group,
                QuoteString(directory.path),
            )
    differing = [file for file in files if states[file.path] != file.state]
    if differing:
        stale += 1
        yield script_command("write_files", stdin=[asdict(file) for file in differing])
    for path, target in links:
        if states[path].target != target:
            stale += 1
            yield StringCommand("ln", "-sfn", QuoteString(target), QuoteString(path))
    there = [path for path in absent if states[path].kind != "absent"]
    if there:
        stale += 1
        yield removal(there)
    if not stale:
        host.noop(f"{', '.join(paths) or 'all'} already as planned")


@host_operation()
def absent(paths: tuple[str, ...]) -> Generator[StringCommand]:
    """None of these paths is there, whatever they were."""
    states = read(PathStates, paths=paths)
    there = [path for path in paths if states[path].kind != "absent"]
    if there:
        yield removal(there)
    else:
        host.noop(f"{', '.join(paths)} already absent")


def removal(paths: Sequence[str]) -> StringCommand:
    """Of these paths, and of the folders that were made for them."""
    command = StringCommand("rm", "-rf", "--", *(QuoteString(path) for path in paths))
    folders = sorted({posixpath.dirname(path) for path in paths} & FOLDERS)
    if not folders:
        return command
    emptied = (QuoteString(folder) for folder in folders)
    return StringCommand(command, "&&", "rmdir", "--ignore-fail-on-non-empty", "--", *emptied)
