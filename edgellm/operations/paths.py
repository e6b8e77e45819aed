"""Small files, directories and links on a host: written only where they differ, atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import asdict, dataclass

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand

from edgellm.facts.paths import PathState, PathStates
from edgellm.facts.reading import read
from edgellm.operations.containment import host_operation
from edgellm.remote import script_command


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """One text file and whose it is."""

    path: str
    content: str
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"

    @property
    def state(self) -> PathState:
        """What PathStates says where the file is as it should be."""
        return PathState(
            kind="file",
            mode=self.mode,
            owner=self.owner,
            group=self.group,
            sha256=hashlib.sha256(self.content.encode()).hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDirectory:
    """One directory and whose it is."""

    path: str
    mode: str = "0755"
    owner: str = "root"
    group: str = "root"

    @property
    def state(self) -> PathState:
        return PathState(kind="directory", mode=self.mode, owner=self.owner, group=self.group)


@host_operation()
def present(
    files: tuple[HostFile, ...],
    directories: tuple[HostDirectory, ...] = (),
    links: tuple[tuple[str, str], ...] = (),
) -> Generator[StringCommand]:
    """Directories, then files, then links (path, target), each as given.

    Contents travel on standard input: they are in no argument list and in no temporary file.
    """
    paths = tuple(sorted([file.path for file in files] + [item.path for item in directories]))
    if not paths and not links:
        host.noop("nothing planned for this host")
        return
    states = read(PathStates, paths=paths + tuple(path for path, _ in links))
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
    if not stale:
        host.noop(f"{', '.join(paths)} already as planned")


@host_operation()
def absent(paths: tuple[str, ...]) -> Generator[StringCommand]:
    """None of these paths is there, whatever they were."""
    states = read(PathStates, paths=paths)
    there = [path for path in paths if states[path].kind != "absent"]
    if there:
        yield StringCommand("rm", "-rf", "--", *(QuoteString(path) for path in there))
    else:
        host.noop(f"{', '.join(paths)} already absent")
