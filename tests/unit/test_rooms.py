"""The floor plan, held by the imports themselves: which room may know which."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
EDGELLM = REPO / "edgellm"
SERVER = REPO / "edgellm_server"

PURE_ROOMS = (
    "comparison",
    "cpuset",
    "desired",
    "diagnosis",
    "drift",
    "errors",
    "gguf",
    "hardware",
    "health",
    "layout",
    "measured",
    "observed",
    "parse",
    "progress",
    "redaction",
    "release",
    "report",
    "settings",
    "tuning",
)
# Rooms of the control machine's disk and network: no hosts, so no pyinfra.
CONTROL_ROOMS = (
    "cache",
    "inventory",
    "model_source",
    "render",
    "report_files",
    "reports",
    "runtime_build",
    "server_app",
)

# Whatever touches the world outside the arguments; pydantic stays at the edges. pathlib is left
# out: a Path is a value, until one of IO_CALLS is made on it.
IMPURE = frozenset(
    {
        "asyncio", "concurrent", "fcntl", "ftplib", "gevent", "glob", "http", "httpx", "io",
        "jinja2", "logging", "multiprocessing", "os", "paramiko", "pydantic", "pyinfra", "random",
        "requests", "select", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile",
        "threading", "time", "urllib", "yaml",
    }
)  # fmt: skip
IO_CALLS = frozenset(
    {
        "eval", "exec", "exists", "glob", "input", "is_dir", "is_file", "iterdir", "mkdir", "open",
        "print", "read_bytes", "read_text", "resolve", "rglob", "stat", "unlink", "write_bytes",
        "write_text",
    }
)  # fmt: skip


def existing(rooms: tuple[str, ...]) -> list[Path]:
    """The file of each room, or all files of one that is a folder."""
    files = [path for room in rooms if (path := EDGELLM / f"{room}.py").exists()]
    return files + [path for room in rooms for path in sorted((EDGELLM / room).glob("*.py"))]


def named(path: Path) -> str:
    """'cpuset', 'drift/causes'."""
    return path.relative_to(EDGELLM).with_suffix("").as_posix()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, at any depth of nesting."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def calls(path: Path) -> set[str]:
    """Names of all functions and methods that a file calls."""
    functions = (node.func for node in nodes(path) if isinstance(node, ast.Call))
    return {
        function.id if isinstance(function, ast.Name) else function.attr
        for function in functions
        if isinstance(function, (ast.Name, ast.Attribute))
    }


def edgellm_imports(path: Path) -> set[str]:
    """Modules of our own package that a file imports: {'cpuset', 'errors'}."""
    names = set()
    for node in nodes(path):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "edgellm" and len(parts) > 1:
                names.add(parts[1])
    return names


@pytest.mark.parametrize("path", existing(PURE_ROOMS), ids=named)
def test_pure_room_touches_nothing_but_its_arguments(path: Path) -> None:
    assert imports(path) & IMPURE == set()
    assert calls(path) & IO_CALLS == set()


@pytest.mark.parametrize("path", existing(PURE_ROOMS), ids=named)
def test_pure_room_imports_pure_rooms_only(path: Path) -> None:
    assert edgellm_imports(path) <= set(PURE_ROOMS)


@pytest.mark.parametrize("path", existing(CONTROL_ROOMS), ids=named)
def test_room_of_the_control_machine_does_not_know_pyinfra(path: Path) -> None:
    assert "pyinfra" not in imports(path)
    assert edgellm_imports(path) & {"facts", "operations", "steps", "prepare", "recorder"} == set()


def test_neither_package_imports_the_other() -> None:
    for path in EDGELLM.rglob("*.py"):
        assert "edgellm_server" not in imports(path), path
    for path in SERVER.rglob("*.py"):
        assert not imports(path) & {"edgellm", "pyinfra"}, path


def test_the_fact_runs_a_script_of_plain_ascii() -> None:
    # It travels on a command line, to shells of every locale.
    script = (EDGELLM / "facts" / "host_probe.sh").read_bytes()
    assert script.isascii()
    assert b"\r" not in script
