"""tests/operations/<module>.<operation>/*.yaml: facts in -> exact commands out."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyinfra_testing.operations import make_operation_tests

import edgellm.operations

HERE = Path(__file__).parent
FOLDERS = sorted(path.name for path in HERE.iterdir() if "." in path.name and path.is_dir())
# Their arguments and commands hold functions and errors, which YAML cannot write: test_calls.py,
# test_trials.py
IN_PYTHON = {
    *("model.present", "runtime.present", "smoke.given_up", "smoke.verified"),
    *("record.confirmed", "smoke.in_order", "trials.measured"),
    *("bench.compared", "diagnose.bundled", "smoke.asked"),
}

for _folder in FOLDERS:
    globals()[f"Test_{_folder.replace('.', '_')}"] = make_operation_tests(
        "edgellm.operations", _folder, HERE / _folder
    )


def operations() -> Iterator[str]:
    for module in pkgutil.iter_modules(edgellm.operations.__path__):
        found = import_module(f"edgellm.operations.{module.name}")
        for name, value in vars(found).items():
            if hasattr(value, "_inner") and value.__module__ == found.__name__:
                yield f"{module.name}.{name}"


def test_every_operation_has_cases() -> None:
    assert set(operations()) == {*FOLDERS, *IN_PYTHON}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_operation_has_a_case_where_it_is_already_so_and_one_where_it_changes(
    folder: str,
) -> None:
    cases: list[dict[str, Any]] = [
        yaml.safe_load(path.read_text(encoding="utf-8")) for path in (HERE / folder).iterdir()
    ]
    assert any(case["commands"] == [] for case in cases)
    assert any(case["commands"] for case in cases)
