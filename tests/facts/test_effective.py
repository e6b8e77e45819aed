"""Effective: what it asks a host, and how the script's answer is read."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from pyinfra.api.exceptions import FactProcessError

from edgellm.cpuset import CpuSet
from edgellm.facts.effective import Effective
from edgellm.observed import (
    Account,
    EffectiveState,
    NodePages,
    ProcessState,
    ResourceLimit,
    SliceState,
    SysctlLine,
    ThreadState,
    ZramSwap,
)
from edgellm.remote import script

# Composed by hand, in the shape of the script's own answer (tests/remote/test_effective_state.py)
ANSWER: dict[str, Any] = {
    "account": {
        "uid": 997,
        "group": "edgellm",
        "comment": "edgellm server",
        "home": "/var/lib/edgellm",
        "shell": "/usr/sbin/nologin",
    },
    "service_state": "active",
    "n_restarts": 1,
    "main_pid": 612,
    "processes": [
        {
            "pid": 612,
            "uid": 997,
            "program": "/usr/bin/python3.11",
            "threads": [
                {"tid": 612, "comm": "python3", "policy": "batch", "priority": 0, "cpus": "2-3"}
            ],
            "vm_locked_bytes": 31457280,
            "nofile": {"soft": 65536, "hard": 65536},
            "memlock": {"soft": None, "hard": None},
        }
    ],
    "foreign_drop_ins": ["/run/systemd/system.control/edgellm.slice.d/50-CPUWeight.conf"],
    "cgroup_version": 2,
    "slices": [
        {
            "name": "edgellm.slice",
            "allowed_cpus": "2-3",
            "effective_cpus": "2-3",
            "own_cpus": "2-3",
            "cpu_weight": 1000,
            "cpu_weight_set": 1000,
        }
    ],
    "nr_throttled": 0,
    "node_pages": [{"node": 1, "anonymous": 9000, "file": 12}],
    "cpus_online": "0-3",
    "swappiness": 100,
    "swappiness_of_kernel": True,
    "swappiness_lines": [{"path": "/etc/sysctl.d/90-edgellm.conf", "value": 100}],
    "zram_swaps": [
        {"device": "zram0", "algorithm": "lzo-rle", "size_bytes": 1048576, "priority": 100}
    ],
    "zram_device": "zram0",
    "zram_unit_enabled": True,
    "governors": [],
    "nofile_of_systemd": {"soft": 1048576, "hard": 1048576},
    "memlock_of_systemd": None,
    "realtime_confirmed": None,
    "realtime_trial": None,
}


def read(answer: Any) -> EffectiveState:
    return Effective().process([json.dumps(answer)])


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ANSWER.items() if key != name}


def test_it_asks_for_our_units_and_the_slices_beside_ours() -> None:
    words = shlex.split(Effective().command().get_raw_value())
    assert words[:3] == ["python3", "-c", script("effective_state")]
    asked = json.loads(words[3])
    assert asked["service"] == "edgellm.service"
    assert asked["units"] == ["edgellm.service", "edgellm.socket", "edgellm.slice"]
    assert asked["slices"] == ["edgellm.slice", "system.slice", "user.slice"]
    assert asked["zram_unit"] == "edgellm-zram.service"
    assert asked["realtime_confirmed"] == "/opt/edgellm/realtime-confirmed"
    # Every name that the script looks up is among what it is given
    assert {name for name in asked if f'asked["{name}"]' in words[2]} == asked.keys()
    assert words[2].count('asked["') == sum(words[2].count(f'asked["{name}"]') for name in asked)


def test_the_answer_reads_as_values() -> None:
    two = CpuSet.of([2, 3])
    limit = ResourceLimit(soft=65536, hard=65536)
    assert read(ANSWER) == EffectiveState(
        account=Account(
            uid=997,
            group="edgellm",
            comment="edgellm server",
            home="/var/lib/edgellm",
            shell="/usr/sbin/nologin",
        ),
        service_state="active",
        n_restarts=1,
        main_pid=612,
        processes=(
            ProcessState(
                pid=612,
                uid=997,
                program="/usr/bin/python3.11",
                threads=(
                    ThreadState(tid=612, comm="python3", policy="batch", priority=0, cpus=two),
                ),
                vm_locked_bytes=31457280,
                nofile=limit,
                memlock=ResourceLimit(soft=None, hard=None),
            ),
        ),
        foreign_drop_ins=("/run/systemd/system.control/edgellm.slice.d/50-CPUWeight.conf",),
        cgroup_version=2,
        slices=(
            SliceState(
                name="edgellm.slice",
                allowed_cpus=two,
                effective_cpus=two,
                own_cpus=two,
                cpu_weight=1000,
                cpu_weight_set=1000,
            ),
        ),
        nr_throttled=0,
        node_pages=(NodePages(node=1, anonymous=9000, file=12),),
        cpus_online=CpuSet.parse("0-3"),
        swappiness=100,
        swappiness_of_kernel=True,
        swappiness_lines=(SysctlLine(path="/etc/sysctl.d/90-edgellm.conf", value=100),),
        zram_swaps=(
            ZramSwap(device="zram0", algorithm="lzo-rle", size_bytes=1048576, priority=100),
        ),
        zram_device="zram0",
        zram_unit_enabled=True,
        governors=(),
        nofile_of_systemd=ResourceLimit(soft=1048576, hard=1048576),
        memlock_of_systemd=None,
        realtime_confirmed=None,
        realtime_trial=None,
    )


def test_what_is_null_is_not_known() -> None:
    found = read({**ANSWER, "account": None, "cpus_online": None, "nofile_of_systemd": None})
    assert (found.account, found.cpus_online, found.nofile_of_systemd) == (None, None, None)


def test_cpus_that_cannot_be_read_are_not_known() -> None:
    found = read({**ANSWER, "cpus_online": "0-3,x"})
    assert found.cpus_online is None


@pytest.mark.parametrize(
    "output",
    [
        pytest.param([], id="nothing"),
        pytest.param(["sh: 1: python3: not found"], id="a shell's error"),
        pytest.param(["[]"], id="a list"),
        pytest.param(["{}"], id="an empty object"),
        pytest.param([json.dumps(ANSWER)[:-20]], id="cut short"),
        *(
            pytest.param([json.dumps({**ANSWER, name: 1})], id=f"a number for {name}")
            for name in ("account", "processes", "slices", "swappiness_lines", "nofile_of_systemd")
        ),
        *(
            pytest.param(
                [json.dumps({k: v for k, v in ANSWER.items() if k != name})], id=f"no {name}"
            )
            for name in ANSWER
        ),
    ],
)
def test_output_that_is_not_the_scripts_fails_this_host_alone(output: list[str]) -> None:
    with pytest.raises(FactProcessError):
        Effective().process(output)
