"""The runtime, by a real pip: both architectures, the same bytes each time, wrong code refused."""

from __future__ import annotations

import gzip
import hashlib
import platform
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgellm import runtime_build
from edgellm.errors import RuntimeBuildError
from edgellm.hardware import Arch
from edgellm.release import Runtime
from edgellm.runtime_build import build_runtime

X86_64_ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00" + bytes(44)
ARM64_ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\xb7\x00" + bytes(44)
ARMV7_ELF = b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x03\x00\x28\x00" + bytes(44)


# With the real wheels, from the registry that pip is set up for


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=list(Arch), ids=lambda arch: arch.value)
def built(request: pytest.FixtureRequest, real_cache: Path) -> Runtime:
    arch: Arch = request.param
    return build_runtime(arch, real_cache)


def test_a_runtime_carries_the_engine_and_our_server_for_its_architecture(built: Runtime) -> None:
    with tarfile.open(built.archive) as tar:
        names = tar.getnames()
        engine = tar.extractfile("xllamacpp/xllamacpp.abi3.so")
        assert engine is not None
        start = engine.read(20)
        unpacked = sum(member.size for member in tar.getmembers())
    assert start[18] == {Arch.X86_64: 0x3E, Arch.ARM64: 0xB7}[built.arch]
    assert "edgellm_server/__init__.py" in names
    assert "edgellm_server/chat_page.html" in names
    assert "uvicorn/__main__.py" in names
    assert any(name.endswith("xllamacpp-2026.10.11549.dist-info/METADATA") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert unpacked == built.unpacked_size_bytes
    assert built.archive.stat().st_size == built.size_bytes
    assert hashlib.sha256(built.archive.read_bytes()).hexdigest() == built.sha256
    assert built.archive.name == f"{built.id}.tar.gz"


def test_nothing_in_an_archive_is_of_the_machine_that_made_it(built: Runtime) -> None:
    with tarfile.open(built.archive) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
    assert {oct(m.mode) for m in members if m.isfile()} <= {"0o644", "0o755"}
    assert {oct(m.mode) for m in members if m.isdir()} == {"0o755"}
    assert all(m.isfile() or m.isdir() for m in members)
    files = [m.name for m in members if m.isfile()]
    assert files == sorted(files)
    assert not [n for n in files if "__pycache__" in n or n.startswith("bin/") or "/tests/" in n]
    assert built.archive.read_bytes()[4:8] == bytes(4)  # gzip's time stamp


def test_a_second_call_is_fast_and_needs_no_pip(
    built: Runtime, real_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    start = time.monotonic()
    assert build_runtime(built.arch, real_cache) == built
    assert time.monotonic() - start < 0.2


def test_two_builds_in_two_caches_are_the_same_bytes(real_cache: Path, tmp_path: Path) -> None:
    one = build_runtime(Arch.X86_64, real_cache)
    other = build_runtime(Arch.X86_64, tmp_path)
    assert (one.id, one.sha256) == (other.id, other.sha256)


def test_the_engine_starts_from_the_unpacked_runtime(real_cache: Path, tmp_path: Path) -> None:
    if Arch.X86_64.machine != platform.machine():
        pytest.skip("needs an x86_64 machine")
    runtime = build_runtime(Arch.X86_64, real_cache)
    with tarfile.open(runtime.archive) as tar:
        tar.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "edgellm_server.selfcheck"],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"ok": true' in done.stdout


# With small wheels of our own, from a folder


class Inputs:
    """A requirement file, a folder of wheels as pip's only index, and a server of one file."""

    def __init__(self, root: Path):
        self.wheels = root / "wheels"
        self.requirements = root / "host.txt"
        self.server = root / "edgellm_server"
        self.wheels.mkdir()
        self.server.mkdir()
        (self.server / "app.py").write_text("READY = True\n")
        self.requirements.write_text("")

    def add(self, files: dict[str, bytes], tag: str = "py3-none-any", sha256: str = "") -> None:
        path = self.wheels / f"engine-1.0-{tag}.whl"
        info = "engine-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
            metadata = "Metadata-Version: 2.1\nName: engine\nVersion: 1.0\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(
                f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
            )
            wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\nengine = engine:run\n")
            wheel.writestr(f"{info}/RECORD", "")
        digest = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
        self.requirements.write_text(f"engine==1.0 --hash=sha256:{digest}\n")

    def build(self, arch: Arch, cache: Path) -> Runtime:
        return build_runtime(
            arch, cache, requirements=self.requirements, server_sources=self.server
        )


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    made = Inputs(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.wheels))
    return made


def names_in(runtime: Runtime) -> list[str]:
    with tarfile.open(runtime.archive) as tar:
        return [member.name for member in tar.getmembers() if member.isfile()]


def test_scripts_bytecode_tests_and_pips_notes_stay_behind(inputs: Inputs, tmp_path: Path) -> None:
    inputs.add(
        {
            "engine/__init__.py": b"def run(): pass\n",
            "engine/tests/test_engine.py": b"",
            "engine/__pycache__/__init__.cpython-310.pyc": b"",
        }
    )
    (inputs.server / "__pycache__").mkdir()
    (inputs.server / "__pycache__" / "app.py").write_text("")
    assert names_in(inputs.build(Arch.ARM64, tmp_path / "c")) == [
        "edgellm_server/app.py",
        "engine-1.0.dist-info/METADATA",
        "engine-1.0.dist-info/WHEEL",
        "engine-1.0.dist-info/entry_points.txt",
        "engine/__init__.py",
    ]


@pytest.mark.parametrize(
    ("name", "content", "tag", "want_and_have"),
    [
        (
            "engine/core.abi3.so",
            X86_64_ELF,
            "py3-none-any",
            "want engine/core.abi3.so for arm64, have it is for x86_64",
        ),
        (
            "engine/core.abi3.so",
            ARMV7_ELF,
            "py3-none-any",
            "want engine/core.abi3.so for arm64, have it is for arm;",
        ),
        (
            "engine/lib/libcore.so.1",
            X86_64_ELF,
            "cp310-abi3-manylinux2014_aarch64",
            "want engine/lib/libcore.so.1 for arm64, have it is for x86_64",
        ),
        (
            "engine/core.cpython-310-aarch64-linux-gnu.so",
            ARM64_ELF,
            "py3-none-any",
            "for every Python (abi3), have it is tied to one Python version",
        ),
        (
            "engine/core.so",
            b"\xcf\xfa\xed\xfe",
            "py3-none-any",
            "want compiled files for Linux, have engine/core.so, no ELF file",
        ),
        (
            "engine/core.pyd",
            b"MZ",
            "py3-none-any",
            "want compiled files for Linux, have engine/core.pyd, no ELF file",
        ),
    ],
)
def test_code_that_could_not_run_on_the_host_is_refused_here(
    inputs: Inputs, tmp_path: Path, name: str, content: bytes, tag: str, want_and_have: str
) -> None:
    inputs.add({name: content}, tag=tag)
    with pytest.raises(RuntimeBuildError) as caught:
        inputs.build(Arch.ARM64, tmp_path / "c")
    assert want_and_have in str(caught.value)
    assert list((tmp_path / "c").rglob("*.tar.gz")) == []


@pytest.mark.parametrize(
    ("tag", "sha256", "have"),
    [
        ("cp310-abi3-manylinux2014_x86_64", "", "No matching distribution found for engine==1.0"),
        ("cp310-cp310-manylinux2014_aarch64", "", "No matching distribution found"),
        ("py3-none-any", "0" * 64, "Got"),
    ],
    ids=["another architecture", "one Python", "another digest"],
)
def test_what_pip_refuses_is_told_in_pips_last_lines(
    inputs: Inputs, tmp_path: Path, tag: str, sha256: str, have: str
) -> None:
    inputs.add({"engine/core.abi3.so": ARM64_ELF}, tag=tag, sha256=sha256)
    with pytest.raises(RuntimeBuildError, match="runtime for arm64: want every wheel of") as caught:
        inputs.build(Arch.ARM64, tmp_path / "c")
    assert have in str(caught.value)


def test_a_changed_line_of_the_server_is_another_runtime(inputs: Inputs, tmp_path: Path) -> None:
    inputs.add({"engine/core.abi3.so": ARM64_ELF})
    before = inputs.build(Arch.ARM64, tmp_path / "c")
    (inputs.server / "app.py").write_text("READY = False\n")
    after = inputs.build(Arch.ARM64, tmp_path / "c")
    assert before.id != after.id
    (inputs.server / "app.py").write_text("READY = True\n")
    assert inputs.build(Arch.ARM64, tmp_path / "c") == before


def test_the_servers_pages_travel_with_its_code_and_its_other_files_do_not(
    inputs: Inputs, tmp_path: Path
) -> None:
    inputs.add({"engine/core.abi3.so": ARM64_ELF})
    bare = inputs.build(Arch.ARM64, tmp_path / "c")
    page = inputs.server / "page.html"
    page.write_text("<!doctype html>")
    (inputs.server / "notes.txt").write_text("not for hosts")
    with_page = inputs.build(Arch.ARM64, tmp_path / "c")
    assert sorted(set(names_in(with_page)) - set(names_in(bare))) == ["edgellm_server/page.html"]
    page.write_text("<!doctype html><title>new</title>")
    assert len({bare.id, with_page.id, inputs.build(Arch.ARM64, tmp_path / "c").id}) == 3


def test_one_pure_tree_has_an_id_for_each_architecture(inputs: Inputs, tmp_path: Path) -> None:
    inputs.add({"engine/__init__.py": b""})
    ids = {inputs.build(arch, tmp_path / "c").id for arch in Arch}
    assert len(ids) == 2


def test_a_damaged_archive_is_built_anew(inputs: Inputs, tmp_path: Path) -> None:
    inputs.add({"engine/__init__.py": b""})
    built = inputs.build(Arch.ARM64, tmp_path / "c")
    whole = built.archive.read_bytes()
    built.archive.write_bytes(whole[:100])
    assert inputs.build(Arch.ARM64, tmp_path / "c") == built
    assert gzip.decompress(built.archive.read_bytes()) == gzip.decompress(whole)


def test_four_builds_at_once_call_pip_once(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs.add({"engine/__init__.py": b""})
    told: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        built = list(
            pool.map(
                lambda _: build_runtime(
                    Arch.ARM64,
                    tmp_path / "c",
                    progress=told.append,
                    requirements=inputs.requirements,
                    server_sources=inputs.server,
                ),
                range(4),
            )
        )
    assert len(set(built)) == 1
    assert told == ["runtime for arm64: pip fetches host.txt", "runtime for arm64: packing"]


def test_without_our_sources_the_fix_is_a_clone(inputs: Inputs, tmp_path: Path) -> None:
    (inputs.server / "app.py").unlink()
    with pytest.raises(RuntimeBuildError, match=r"have no \.py file there; fix: run from a clone"):
        inputs.build(Arch.ARM64, tmp_path / "c")


def test_a_python_without_pip_is_one_clear_error(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(RuntimeBuildError, match=r"have no module named pip; fix: .* -m ensurepip"):
        inputs.build(Arch.X86_64, tmp_path / "c")


def test_the_recipe_is_part_of_the_key(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs.add({"engine/__init__.py": b""})
    inputs.build(Arch.ARM64, tmp_path / "c")
    monkeypatch.setattr(runtime_build, "RECIPE_VERSION", runtime_build.RECIPE_VERSION + 1)
    inputs.build(Arch.ARM64, tmp_path / "c")
    assert len(list((tmp_path / "c" / "runtimes" / "index").glob("*.json"))) == 2
