"""Facts of the kernel, of slices and of the account: real output in -> values out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import FactProcessError

from edgellm import layout
from edgellm.cpuset import CpuSet
from edgellm.facts import cores, kernel
from edgellm.facts.account import AccountState, ServiceAccount
from edgellm.facts.cores import ReservedSlices, SliceCpus
from edgellm.facts.kernel import Governors, Swappiness

ALL = CpuSet(cpus=())
WITHIN_S = 10


def output_of(shell: str, path: Path | None = None) -> list[str]:
    done = subprocess.run(
        ["sh", "-uc", shell],
        capture_output=True,
        text=True,
        env={"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin"},
        timeout=WITHIN_S,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture
def slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """slices(system={…}, user={…}): what a host with these says, asked by the fact's own shell."""
    groups, before, programs = (tmp_path / name for name in ("cgroup", "before", "bin"))
    for directory in (groups, before, programs):
        directory.mkdir()
    monkeypatch.setattr(cores, "CGROUPS", str(groups))
    monkeypatch.setattr(cores, "CPUS_BEFORE", str(before / "cpuset.cpus"))
    systemctl = programs / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\nfor word; do :; done\ncase $word in --value) cat {tmp_path}/$2.group ;;\n"
        f"*) cat {tmp_path}/$2.show ;; esac\n"
    )
    systemctl.chmod(0o755)

    def ask(**states: dict[str, str | None]) -> dict[str, SliceCpus]:
        for name, state in states.items():
            group = state.get("group")
            (tmp_path / f"{name}.slice.group").write_text(f"{group or ''}\n")
            (tmp_path / f"{name}.slice.show").write_text(str(state["show"]))
            if group is not None:
                os.makedirs(f"{groups}{group}", exist_ok=True)
                if (cpus := state.get("cpus")) is not None:
                    Path(f"{groups}{group}/cpuset.cpus").write_text(cpus)
            if (recorded := state.get("recorded")) is not None:
                (before / f"cpuset.cpus.{name}.slice").write_text(recorded)
        return ReservedSlices().process(output_of(ReservedSlices().command(), programs))

    return ask


def test_slices_are_read_as_systemd_and_the_kernel_have_them(slices: Any, tmp_path: Path) -> None:
    found = slices(
        system={
            "show": "AllowedCPUs=0-1 4\nNeedDaemonReload=no\n",
            "group": "/system.slice",
            "cpus": "0-1,4\n",
            "recorded": "\n",
        },
        user={
            "show": "AllowedCPUs=\nNeedDaemonReload=yes\n",
            "group": "/user.slice",
            "cpus": "\n",
            "recorded": "2\n",
        },
    )
    assert found == {
        "system.slice": SliceCpus(
            file=f"{tmp_path}/cgroup/system.slice/cpuset.cpus",
            cpus=CpuSet.of((0, 1, 4)),
            allowed_cpus=CpuSet.of((0, 1, 4)),
            needs_daemon_reload=False,
            recorded=ALL,
        ),
        "user.slice": SliceCpus(
            file=f"{tmp_path}/cgroup/user.slice/cpuset.cpus",
            cpus=ALL,
            allowed_cpus=ALL,
            needs_daemon_reload=True,
            recorded=CpuSet.of((2,)),
        ),
    }


def test_a_slice_that_is_not_active_or_has_no_controller_has_no_file(slices: Any) -> None:
    show = "AllowedCPUs=\nNeedDaemonReload=no\n"
    found = slices(system={"show": show, "group": "/system.slice"}, user={"show": show})
    nothing = SliceCpus(
        file=None, cpus=ALL, allowed_cpus=ALL, needs_daemon_reload=False, recorded=None
    )
    assert found == {"system.slice": nothing, "user.slice": nothing}


def test_a_set_of_cores_that_is_none_fails_this_host_alone() -> None:
    with pytest.raises(FactProcessError):
        ReservedSlices().process(["Slice=system.slice", "AllowedCPUs=[not set]"])


def test_governors_are_read_by_the_file_that_each_was_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy, governor in (("policy0", "schedutil"), ("policy4", "performance")):
        (tmp_path / policy).mkdir()
        (tmp_path / policy / "scaling_governor").write_text(f"{governor}\n")
    monkeypatch.setattr(kernel, "GOVERNOR_FILES", f"{tmp_path}/policy*/scaling_governor")
    assert Governors().process(output_of(Governors().command())) == {
        f"{tmp_path}/policy0/scaling_governor": "schedutil",
        f"{tmp_path}/policy4/scaling_governor": "performance",
    }


def test_a_host_without_cpufreq_has_no_governors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "GOVERNOR_FILES", f"{tmp_path}/policy*/scaling_governor")
    assert Governors().process(output_of(Governors().command())) == {}


def test_swappiness_is_a_number_or_this_host_fails_alone() -> None:
    assert Swappiness().process(["60"]) == 60
    for output in ([], [""], ["cat: /proc/sys/vm/swappiness: No such file or directory"]):
        with pytest.raises(FactProcessError):
            Swappiness().process(output)


def test_the_account_is_read_as_the_name_service_has_it() -> None:
    line = f"Passwd=edgellm:x:997:995:edgellm server:{layout.STATE_DIR}:/usr/sbin/nologin"
    assert ServiceAccount().process([line, "Group=edgellm"]) == AccountState(
        home="/var/lib/edgellm",
        shell="/usr/sbin/nologin",
        comment="edgellm server",
        group="edgellm",
    )


def test_an_account_that_is_not_there_is_an_answer() -> None:
    # This machine has none of that name, and the fact's own shell says so
    assert not ServiceAccount().process(output_of(ServiceAccount().command())).is_there
