"""What somebody changed on a host by hand is put right by the next run, and nothing more is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    FAST,
    KERNEL_FILES,
    MODEL,
    MODEL_PATH,
    RELEASE_FILES,
    RUNTIME,
    SERVICE,
    THREE,
    UNITS,
    CommandLine,
    Ssh,
    differences,
    snapshot,
    wait_ready,
    wait_until,
)

CURRENT = "/opt/edgellm/current"
SYSTEMD = "/etc/systemd/system"
RESTART = "systemctl daemon-reload && systemctl restart edgellm"


@dataclass(frozen=True)
class Drift:
    """What somebody did by hand, and the operations that put it right."""

    what: str
    command: str
    repaired_by: tuple[str, ...]


# One a host at a time, to be repaired by one run
ROUNDS = (
    (
        Drift(
            "entrypoint edited, open to all, and in force",
            f"sed -i s/--batch/--other/ {CURRENT}/entrypoint.sh && "
            f"chmod 777 {CURRENT}/entrypoint.sh && {RESTART}",
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "unit edited, and in force",
            f"sed -i s/^LimitNOFILE=.*/LimitNOFILE=2000/ {SYSTEMD}/edgellm.service && {RESTART}",
            (UNITS, SERVICE),
        ),
        Drift(
            "current points elsewhere",
            f"ln -sfn /tmp {CURRENT}",
            (SERVICE,),
        ),
    ),
    (
        Drift(
            "folders open to all and given away",
            "chmod 777 /opt/edgellm /opt/edgellm/models && chown edgellm /opt/edgellm/runtimes",
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "model open to all and given away",
            f"chmod 666 {MODEL_PATH} && chown edgellm {MODEL_PATH}",
            (MODEL, SERVICE),  # verified where it is, not sent again
        ),
        Drift(
            "runtime damaged, and in force",
            # It cannot start, and systemd says so
            f"rm {CURRENT}/runtime/uvicorn/main.py && ! systemctl restart edgellm",
            (RUNTIME, SERVICE),
        ),
    ),
    (
        Drift(
            "service stopped and disabled",
            "systemctl disable --now edgellm",
            (SERVICE,),
        ),
        Drift(
            "limits edited",
            "echo '# mine' >> /etc/security/limits.d/90-edgellm.conf",
            (KERNEL_FILES,),
        ),
        Drift(
            "model damaged",
            f"printf x | dd of={MODEL_PATH} bs=1 seek=5000 conv=notrunc status=none",
            (MODEL, SERVICE),
        ),
    ),
    (
        Drift(
            "server.env removed",
            f"rm {CURRENT}/server.env",
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "unit edited, not in force yet",
            f"sed -i s/^Nice/#/ {SYSTEMD}/edgellm.service && "
            f"echo '# mine' >> {SYSTEMD}/edgellm.service",
            (UNITS, SERVICE),
        ),
        Drift(
            "slice removed",
            f"rm {SYSTEMD}/edgellm.slice && systemctl daemon-reload",
            (UNITS, SERVICE),
        ),
    ),
    (
        Drift(
            "socket stopped and disabled",
            "systemctl disable --now edgellm.socket",  # and the service with it
            (SERVICE,),
        ),
        Drift(
            "socket moved to another port, and in force",
            f"sed -i s/:8000/:8001/ {SYSTEMD}/edgellm.socket && systemctl daemon-reload && "
            "systemctl stop edgellm && systemctl restart edgellm.socket && "
            "systemctl restart edgellm",
            (UNITS, SERVICE),
        ),
        Drift(
            "socket removed",
            f"rm {SYSTEMD}/edgellm.socket && systemctl daemon-reload",
            (UNITS, SERVICE),
        ),
    ),
)


@pytest.mark.parametrize(
    "drifts", ROUNDS, ids=["; ".join(drift.what for drift in drifts) for drifts in ROUNDS]
)
def test_drift_is_repaired_by_the_operations_concerned_and_then_nothing_changes(
    served: None,
    first: FirstRollOut,
    roll_out: CommandLine,
    ssh: Ssh,
    drifts: tuple[Drift, ...],
) -> None:
    before = states(ssh)
    for host, drift in zip(THREE, drifts, strict=True):
        ssh(host, drift.command)
    broken = states(ssh)
    assert all(differences(before[host], broken[host]) for host in THREE)
    repaired = roll_out(*FAST).assert_ok(*THREE).changed()
    assert repaired == {
        host: list(drift.repaired_by) for host, drift in zip(THREE, drifts, strict=True)
    }
    after = states(ssh)
    assert {host: differences(before[host], after[host]) for host in THREE} == {
        host: [] for host in THREE
    }
    for host in THREE:
        # a way back that leads nowhere would be worse than none
        ssh(host, "test ! -L /opt/edgellm/previous || test -d /opt/edgellm/previous/")
    roll_out(*FAST).assert_ok(*THREE).assert_changed_nothing()


def states(ssh: Ssh) -> dict[str, dict[str, str]]:
    with ThreadPoolExecutor() as pool:
        return dict(zip(THREE, pool.map(lambda host: state(ssh, host), THREE), strict=True))


def state(ssh: Ssh, host: str) -> dict[str, str]:
    """The host's files, and of the running service what files decide about it."""
    running = ssh.values(
        host,
        """systemctl show edgellm --property=ActiveState,UnitFileState,NeedDaemonReload
        systemctl show edgellm.socket \
            --property=ActiveState,UnitFileState,NeedDaemonReload,Listen | sed s/^/Socket/
        echo listening=$(ss -Hltn 'sport >= :8000' | awk '{ print $4 }')
        pid=$(systemctl show edgellm --property=MainPID --value)
        echo policy=$(sed 's/.*) //' /proc/$pid/stat | cut -d' ' -f39)
        echo files=$(grep 'open files' /proc/$pid/limits)
        echo cgroup=$(cat /proc/$pid/cgroup)
        echo deleted=$(grep -c '/opt/edgellm/.*(deleted)' /proc/$pid/maps)
        """,
    )
    files = snapshot(ssh, host)
    # it has inode and time of the model in it, and a model sent again is another file
    del files[f"sha256 {MODEL_PATH}.manifest.json"]
    return files | {f"running {name}": value for name, value in running.items()}


def test_killed_server_is_started_again_by_systemd(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    restarts = int(ssh.service(host, "NRestarts")["NRestarts"])
    pid = ssh.main_pid(host)
    ssh(host, f"kill -KILL {pid}")
    wait_until("another process", lambda: ssh.main_pid(host) not in (0, pid))
    wait_ready(fleet, host)
    assert int(ssh.service(host, "NRestarts")["NRestarts"]) == restarts + 1
    assert ssh.running_release(host) == first.release(host)
    roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()
