"""Scripts that run on a host before our runtime is there: old Pythons, nothing but the library."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyinfra.connectors.util import make_unix_command

import edgellm.remote
from edgellm.remote import script, script_command

FOLDER = Path(edgellm.remote.__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
OLDEST_PYTHON = (3, 10)
# Linux takes 128 KiB for one argument; sudo's and sh's quoting grow it, and old sshds cut earlier.
MAX_COMMAND_BYTES = 32 * 1024
LARGEST_ARGUMENT = [f"/opt/edgellm/releases/3abadcf8e3b5c3fa/file-{n}" for n in range(20)]


def modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a script has no package to import from"
            yield str(node.module)


def test_there_are_scripts() -> None:
    assert "receive_file" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_script_is_read_by_the_oldest_python_of_a_host(name: str) -> None:
    ast.parse(script(name), feature_version=OLDEST_PYTHON)


def with_shared_text(name: str) -> ast.Module:
    """The file, with what it imports from a file beside it in the place of that import."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    body: list[ast.stmt] = []
    for statement in tree.body:
        module = statement.module if isinstance(statement, ast.ImportFrom) else None
        if module and module.startswith("edgellm.remote."):
            body += with_shared_text(module.rpartition(".")[2]).body
        else:
            body.append(statement)
    tree.body = body
    return tree


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_means_the_same_as_the_file(name: str) -> None:
    assert ast.dump(ast.parse(script(name))) == ast.dump(with_shared_text(name))


def test_what_two_scripts_share_is_sent_with_both() -> None:
    assert "def fingerprint(" in script("artifact_states")
    assert "def fingerprint(" in script("unpack_runtime")


@pytest.mark.parametrize("name", NAMES)
def test_script_imports_the_standard_library_only(name: str) -> None:
    imported = {module.partition(".")[0] for module in modules(ast.parse(script(name)))}
    assert imported <= sys.stdlib_module_names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sudo", [False, True])
def test_command_line_stays_far_below_the_kernels_limit(name: str, sudo: bool) -> None:
    command = make_unix_command(script_command(name, LARGEST_ARGUMENT), _sudo=sudo)
    assert len(command.get_raw_value().encode()) < MAX_COMMAND_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_script_is_ascii_so_that_no_locale_of_a_host_matters(name: str) -> None:
    assert script(name).isascii()


def test_the_command_survives_the_shell_with_quotes_and_spaces_in_its_argument(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / name) for name in ("it's", 'say "x"', "$HOME", "a b")]
    command = make_unix_command(script_command("path_states", paths))
    done = subprocess.run(
        ["sh", "-c", command.get_raw_value()], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {path: {"kind": "absent"} for path in paths}


def test_what_goes_to_standard_input_is_not_on_the_command_line() -> None:
    command = script_command("write_files", stdin=[{"content": "very secret"}])
    assert "very secret" not in command.get_raw_value()
    assert json.loads(command.connector_arguments["_stdin"]) == [{"content": "very secret"}]
