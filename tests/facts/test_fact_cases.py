"""tests/facts/<module>.<Fact>/*.yaml: the command, an output in -> the typed value out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gevent import monkey
from pyinfra_testing.facts import make_fact_tests

from edgellm.facts.service import Service
from edgellm.facts.zram import OwnZram

HERE = Path(__file__).parent
FOLDERS = sorted(path.name for path in HERE.iterdir() if "." in path.name and path.is_dir())

for _folder in FOLDERS:
    globals()[f"Test_{_folder.replace('.', '_')}"] = make_fact_tests(
        "edgellm.facts", _folder, HERE / _folder
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(Service().command(), id="Service"),
        pytest.param(OwnZram().command("edgellm-zram.service", None), id="OwnZram"),
        pytest.param(OwnZram().command("systemd-zram-setup@zram0.service", "zram0"), id="zram0"),
    ],
)
def test_shell_of_a_fact_is_sound_and_runs_where_nothing_of_ours_is(command: str) -> None:
    done = subprocess.run(
        ["sh", "-euc", command],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
        timeout=10,
    )
    # systemctl may be missing here; a fault of the shell's own is never all right
    assert "yntax" not in done.stderr
    assert "unbound" not in done.stderr
    assert all("=" in line for line in done.stdout.splitlines())


def test_testing_facts_leaves_this_process_its_own_threads_and_sockets() -> None:
    assert not monkey.is_module_patched("threading")
    assert not monkey.is_module_patched("socket")
