"""The server's runtime on the control machine: one archive for each architecture.

A host unpacks it and runs `PYTHONPATH=<unpacked> python3 -m edgellm_server...`: no pip, no virtual
environment, no compiler there. One build serves every Python from 3.10 on (abi3 and pure Python).
The same inputs give the same id and the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgellm import cache
from edgellm.errors import RuntimeBuildError
from edgellm.hardware import Arch
from edgellm.release import ID_HEX_DIGITS, Runtime

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements" / "host.txt"
SERVER_SOURCES = REPOSITORY / "edgellm_server"

RECIPE_VERSION = 1  # raise it when this file builds another tree from the same inputs
PYTHON_VERSION = "3.10"  # the oldest Python of a host
COMPRESS_LEVEL = 6  # 9 takes three times as long for 1 % less
STALE_BUILD_S = 86_400

# pip expands manylinux2014 alone to its legacy names; "any" is needed beside it for pure wheels.
_PLATFORMS = ("manylinux2014_{machine}", "manylinux_2_17_{machine}", "any")
_ELF_MACHINES = {Arch.X86_64: 62, Arch.ARM64: 183}  # elf(5): e_machine
_ELF_NAMES = {3: "x86", 40: "arm", 62: "x86_64", 183: "arm64", 243: "riscv"}
_FOREIGN_SUFFIXES = (".pyd", ".dll", ".dylib")
_SERVER_SUFFIXES = (".py", ".html")  # the server's code, and the chat page that it serves
_DROPPED_FOLDERS = frozenset({"__pycache__", "bin", "tests"})
# Of a .dist-info, pip's own notes go: they list files that are dropped here. METADATA (for
# importlib.metadata), WHEEL and the licences, which must travel with the code, stay.
_DROPPED_NOTES = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One file of the unpacked runtime."""

    name: str  # "xllamacpp/xllamacpp.abi3.so"
    path: Path
    mode: int  # 0o644 or 0o755
    sha256: str
    size_bytes: int


def build_runtime(
    arch: Arch,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    requirements: Path = REQUIREMENTS,
    server_sources: Path = SERVER_SOURCES,
) -> Runtime:
    """The runtime of `arch`, from the cache where the inputs are unchanged: then pip is not called.

    `progress` is told what takes long, as a sentence. Raises RuntimeBuildError.
    """
    with _as_build_error(arch, cache_dir):
        key = _inputs_key(arch, requirements, server_sources)
        runtimes = cache_dir / "runtimes"
        index = runtimes / "index" / f"{key}.json"
        with cache.locked(runtimes / "index" / f"{key}.lock"):
            runtime = _from_index(index, arch, runtimes)
            if runtime is None:
                runtime = _build(arch, runtimes, progress, requirements, server_sources)
                noted = {"id": runtime.id, "unpacked_size_bytes": runtime.unpacked_size_bytes}
                # Not where a source was edited meanwhile: the key would name another content.
                if _inputs_key(arch, requirements, server_sources) == key:
                    cache.write_text(index, json.dumps(noted) + "\n")
    return runtime


def _inputs_key(arch: Arch, requirements: Path, server_sources: Path) -> str:
    digest = hashlib.sha256(f"{RECIPE_VERSION}\n{arch.value}\n".encode())
    sources = _server_files(server_sources, arch)
    for path in (requirements, *sources):
        if not path.is_file():
            raise _fault(
                arch, f"the file {path}", "nothing there", "run from a clone of the repository"
            )
        name = path.name if path == requirements else path.relative_to(server_sources).as_posix()
        digest.update(f"{name}\n{cache.sha256_of(path)}\n".encode())
    return digest.hexdigest()[:ID_HEX_DIGITS]


def _server_files(server_sources: Path, arch: Arch) -> list[Path]:
    files = sorted(
        path
        for path in server_sources.rglob("*")
        if path.suffix in _SERVER_SUFFIXES
        and not _DROPPED_FOLDERS & set(path.relative_to(server_sources).parts)
    )
    if not any(path.suffix == ".py" for path in files):
        raise _fault(
            arch,
            f"the server's sources in {server_sources}",
            "no .py file there",
            "run from a clone of the repository",
        )
    return files


def _from_index(index: Path, arch: Arch, runtimes: Path) -> Runtime | None:
    """None: not built yet, or what is there does not fit its notes and is built anew."""
    try:
        noted = json.loads(index.read_text())
        archive = runtimes / f"{noted['id']}.tar.gz"
        stamp = cache.Stamp.read(archive)
        if stamp is None or stamp != cache.Stamp.of(archive, stamp.sha256):
            return None
        return Runtime(
            id=str(noted["id"]),
            arch=arch,
            archive=archive,
            sha256=stamp.sha256,
            size_bytes=stamp.size_bytes,
            unpacked_size_bytes=int(noted["unpacked_size_bytes"]),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _build(
    arch: Arch,
    runtimes: Path,
    progress: Progress | None,
    requirements: Path,
    server_sources: Path,
) -> Runtime:
    _sweep(runtimes)
    tell = progress or (lambda _: None)
    with tempfile.TemporaryDirectory(dir=runtimes, prefix=".build-") as directory:
        root = Path(directory) / "root"
        tell(f"runtime for {arch.value}: pip fetches {requirements.name}")
        _pip_install(arch, requirements, root)
        _strip(root)
        _add_server(server_sources, root, arch)
        tell(f"runtime for {arch.value}: packing")
        entries = _entries(root)
        for entry in entries:
            _check_compiled(entry, arch)
        runtime_id = _content_id(entries, arch)
        archive = runtimes / f"{runtime_id}.tar.gz"
        temporary = Path(directory) / archive.name
        sha256 = _pack(entries, temporary)
        cache.place(temporary, archive, sha256)
    return Runtime(
        id=runtime_id,
        arch=arch,
        archive=archive,
        sha256=sha256,
        size_bytes=archive.stat().st_size,
        unpacked_size_bytes=sum(entry.size_bytes for entry in entries),
    )


def _pip_install(arch: Arch, requirements: Path, root: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-compile", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--target", str(root)]
    command += ["--implementation", "cp", "--python-version", PYTHON_VERSION]
    command += ["--abi", "abi3", "--abi", "none"]
    for platform in _PLATFORMS:
        command += ["--platform", platform.format(machine=arch.machine)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        raise _fault(
            arch,
            f"pip in {sys.executable}",
            "no module named pip",
            f"{sys.executable} -m ensurepip",
        )
    raise _fault(
        arch,
        f"every wheel of {requirements}",
        "; ".join(lines[-3:]) or f"pip exited {done.returncode}",
        "check network and pip's index settings; "
        "a package without a pure or abi3 wheel cannot be in this file",
    )


def _strip(root: Path) -> None:
    """Drops what no host needs: scripts, bytecode, tests, pip's notes."""
    for path in sorted(root.rglob("*"), reverse=True):
        if path.is_dir() and path.name in _DROPPED_FOLDERS:
            shutil.rmtree(path)
        elif path.parent.suffix == ".dist-info" and path.name in _DROPPED_NOTES:
            path.unlink()


def _add_server(server_sources: Path, root: Path, arch: Arch) -> None:
    for source in _server_files(server_sources, arch):
        target = root / SERVER_SOURCES.name / source.relative_to(server_sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _entries(root: Path) -> list[_Entry]:
    entries = []
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        info = path.stat()
        entries.append(
            _Entry(
                name=path.relative_to(root).as_posix(),
                path=path,
                mode=0o755 if info.st_mode & stat.S_IXUSR else 0o644,
                sha256=cache.sha256_of(path),
                size_bytes=info.st_size,
            )
        )
    return sorted(entries, key=lambda entry: entry.name)


def _check_compiled(entry: _Entry, arch: Arch) -> None:
    """Refuses here what would fail on the host: another machine's code, another Python's code."""
    with entry.path.open("rb") as file:
        start = file.read(20)
    is_elf = start.startswith(b"\x7fELF")
    name = entry.path.name
    if name.endswith(_FOREIGN_SUFFIXES) or (".so" in entry.path.suffixes and not is_elf):
        raise _fault(arch, "compiled files for Linux", f"{entry.name}, no ELF file", _REBUILD)
    if not is_elf:
        return
    machine = int.from_bytes(start[18:20], "little")
    is_64_bit_little_endian = start[4:6] == b"\x02\x01"
    if not is_64_bit_little_endian or machine != _ELF_MACHINES[arch]:
        have = _ELF_NAMES.get(machine, f"machine {machine}")
        raise _fault(arch, f"{entry.name} for {arch.value}", f"it is for {have}", _REBUILD)
    if ".cpython-" in name:
        raise _fault(
            arch,
            f"{entry.name} for every Python (abi3)",
            "it is tied to one Python version",
            "replace the package by a pure or abi3 one in requirements/host.txt",
        )


_REBUILD = "correct requirements/host.txt: a wheel there is for another platform"


def _content_id(entries: list[_Entry], arch: Arch) -> str:
    rows = [[entry.name, entry.mode, entry.sha256] for entry in entries]
    text = json.dumps([arch.value, rows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX_DIGITS]


def _pack(entries: list[_Entry], archive: Path) -> str:
    """A .tar.gz without a trace of when, where and by whom. Returns its SHA-256."""
    folders = {
        parent.as_posix()
        for entry in entries
        for parent in Path(entry.name).parents
        if parent != Path()
    }
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", COMPRESS_LEVEL, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for folder in sorted(folders):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.size, info.mode = entry.size_bytes, entry.mode
            with entry.path.open("rb") as file:
                tar.addfile(info, file)
    return cache.sha256_of(archive)


def _sweep(runtimes: Path) -> None:
    """Removes the folders of builds that were killed."""
    for path in runtimes.glob(".build-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_BUILD_S:
                shutil.rmtree(path, ignore_errors=True)


def _fault(arch: Arch, want: str, have: str, fix: str) -> RuntimeBuildError:
    return RuntimeBuildError(what=f"runtime for {arch.value}", want=want, have=have, fix=fix)


@contextlib.contextmanager
def _as_build_error(arch: Arch, cache_dir: Path) -> Iterator[None]:
    """The disk's errors -> RuntimeBuildError."""
    try:
        yield
    except OSError as error:
        raise _fault(
            arch,
            f"a build under {cache_dir}",
            f"{error.filename or cache_dir}: {error.strerror or error}",
            "check space and permissions on the control machine",
        ) from None
