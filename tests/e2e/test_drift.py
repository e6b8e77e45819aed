"""What was changed on a host behind our back: an audit names it, the next run puts it right, and
neither touches anything more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    ACCOUNT,
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
UNIT_FILE = f"{SYSTEMD}/edgellm.service"
PID = "$(systemctl show edgellm --property=MainPID --value)"
THREAD = f"$(ls /proc/{PID}/task | tail -n 1)"
RESTART = "systemctl daemon-reload && systemctl restart edgellm"


def rot(path: str) -> str:
    """The command that changes a byte as a worn card does: under the same size and time."""
    return (
        f"touch -r {path} /tmp/time && printf x | dd of={path} bs=1 seek=500 conv=notrunc "
        f"status=none && touch -r /tmp/time {path} && rm /tmp/time"
    )


@dataclass(frozen=True)
class Drift:
    """What an update or a hand did, what an audit names for it, and what puts it right."""

    what: str
    command: str
    named: tuple[str, ...]  # knobs, a file of the release by its name in it
    repaired_by: tuple[str, ...]


# One a host at a time, to be repaired by one run
ROUNDS = (
    (
        Drift(
            "entrypoint edited, open to all, and in force",
            f"sed -i s/--batch/--other/ {CURRENT}/entrypoint.sh && "
            f"chmod 777 {CURRENT}/entrypoint.sh && {RESTART}",
            ("entrypoint.sh",),
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "unit edited, and in force",
            f"sed -i s/^LimitNOFILE=.*/LimitNOFILE=2000/ {SYSTEMD}/edgellm.service && {RESTART}",
            (UNIT_FILE,),
            (UNITS, SERVICE),
        ),
        Drift(
            "current points elsewhere",
            f"ln -sfn /tmp {CURRENT}",
            ("release",),
            (SERVICE,),
        ),
    ),
    (
        Drift(
            "folders open to all and given away",
            "chmod 777 /opt/edgellm /opt/edgellm/models && chown edgellm /opt/edgellm/runtimes",
            ("/opt/edgellm", "/opt/edgellm/models", "/opt/edgellm/runtimes"),
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "model open to all and given away",
            f"chmod 666 {MODEL_PATH} && chown edgellm {MODEL_PATH}",
            ("model",),
            (MODEL, SERVICE),  # verified where it is, not sent again
        ),
        Drift(
            "runtime damaged, and in force",
            # It cannot start, and systemd says so
            f"rm {CURRENT}/runtime/uvicorn/main.py && ! systemctl restart edgellm",
            ("runtime", "service"),
            (RUNTIME, SERVICE),
        ),
    ),
    (
        Drift(
            "service stopped and disabled",
            "systemctl disable --now edgellm",
            ("service",),
            (SERVICE,),
        ),
        Drift(
            "limits edited",
            "echo '# mine' >> /etc/security/limits.d/90-edgellm.conf",
            ("login_limits",),
            (KERNEL_FILES,),
        ),
        Drift(
            "model damaged",
            f"printf x | dd of={MODEL_PATH} bs=1 seek=5000 conv=notrunc status=none",
            ("model",),
            (MODEL, SERVICE),
        ),
    ),
    (
        Drift(
            "server.env removed",
            f"rm {CURRENT}/server.env",
            ("server.env",),
            (RELEASE_FILES, SERVICE),
        ),
        Drift(
            "unit edited, not in force yet",
            f"sed -i s/^Nice/#/ {SYSTEMD}/edgellm.service && "
            f"echo '# mine' >> {SYSTEMD}/edgellm.service",
            (UNIT_FILE,),
            (UNITS, SERVICE),
        ),
        Drift(
            "slice removed",
            f"rm {SYSTEMD}/edgellm.slice && systemctl daemon-reload",
            ("/etc/systemd/system/edgellm.slice",),
            (UNITS, SERVICE),
        ),
    ),
    (
        Drift(
            "socket stopped and disabled",
            "systemctl disable --now edgellm.socket",  # and the service with it
            ("socket",),
            (SERVICE,),
        ),
        Drift(
            "socket moved to another port, and in force",
            f"sed -i s/:8000/:8001/ {SYSTEMD}/edgellm.socket && systemctl daemon-reload && "
            "systemctl stop edgellm && systemctl restart edgellm.socket && "
            "systemctl restart edgellm",
            ("/etc/systemd/system/edgellm.socket",),
            (UNITS, SERVICE),
        ),
        Drift(
            "socket removed",
            f"rm {SYSTEMD}/edgellm.socket && systemctl daemon-reload",
            ("/etc/systemd/system/edgellm.socket",),
            (UNITS, SERVICE),
        ),
    ),
    (
        Drift("model rotten", rot(MODEL_PATH), ("model",), (MODEL, SERVICE)),
        Drift(
            "runtime rotten",
            rot(f"{CURRENT}/runtime/uvicorn/main.py"),
            ("runtime",),
            (RUNTIME, SERVICE),
        ),
        Drift(
            "Python updated since the runtime ran",
            f"sed -i 's/[0-9.]*$/3.9/' {CURRENT}/runtime/.complete",
            ("runtime",),
            (RUNTIME, SERVICE),  # run once more where it is, not sent again
        ),
    ),
    (
        Drift(
            "a thread pinned elsewhere",
            f"taskset -p -c 0 {THREAD}",
            ("cpus",),
            (SERVICE,),
        ),
        Drift(
            "a thread of another policy",
            f"chrt --other -p 0 {THREAD}",
            ("scheduling",),
            (SERVICE,),
        ),
        Drift(
            "limit of the process lowered",
            f"runuser -u edgellm -- prlimit --pid {PID} --nofile=1000:1000",
            ("nofile",),
            (SERVICE,),
        ),
    ),
    (
        Drift(
            "account removed",
            "systemctl stop edgellm.socket edgellm && userdel edgellm",
            ("account", "socket"),
            (ACCOUNT, SERVICE),
        ),
        Drift(
            "drop-in of somebody's own",
            f"mkdir {SYSTEMD}/edgellm.service.d && "
            "printf '[Service]\\nEnvironment=MINE=1\\n' "
            f">{SYSTEMD}/edgellm.service.d/mine.conf && {RESTART}",
            ("drop_ins",),
            (SERVICE,),
        ),
        Drift(
            "home given away",
            "chown root:root /var/lib/edgellm",
            ("account",),
            (ACCOUNT,),
        ),
    ),
)


@pytest.mark.parametrize(
    "drifts", ROUNDS, ids=["; ".join(drift.what for drift in drifts) for drifts in ROUNDS]
)
def test_drift_is_named_then_repaired_by_the_operations_concerned_and_then_nothing_changes(
    served: None,
    first: FirstRollOut,
    roll_out: CommandLine,
    ssh: Ssh,
    drifts: tuple[Drift, ...],
) -> None:
    for host in THREE:  # rolled out to on another day: an account made anew has today's
        ssh(host, "chage --lastday 2026-01-01 edgellm")
    before = states(ssh)
    for host, drift in zip(THREE, drifts, strict=True):
        ssh(host, drift.command)
    broken = states(ssh)
    audited = roll_out(deploy="audit")
    assert audited.exit_code == 2, audited.output
    assert audited.drifted() == {
        host: sorted(drift.named) for host, drift in zip(THREE, drifts, strict=True)
    }
    assert files(states(ssh)) == files(broken)  # an audit only reads
    run = roll_out(*FAST).assert_ok(*THREE)
    assert run.changed() == {
        host: list(drift.repaired_by) for host, drift in zip(THREE, drifts, strict=True)
    }
    assert run.repaired() == audited.drifted()
    after = states(ssh)
    assert {host: differences(before[host], after[host]) for host in THREE} == {
        host: [] for host in THREE
    }
    for host in THREE:
        # a way back that leads nowhere would be worse than none
        ssh(host, "test ! -L /opt/edgellm/previous || test -d /opt/edgellm/previous/")
    # What the audit of the next round names is exactly its own drifts: nothing of these is left
    roll_out(*FAST).assert_ok(*THREE).assert_changed_nothing()


def test_hosts_in_order_have_nothing_to_name(served: None, roll_out: CommandLine, ssh: Ssh) -> None:
    before = states(ssh)
    assert roll_out(deploy="audit").assert_ok(*THREE).drifted() == {host: [] for host in THREE}
    assert states(ssh) == before


def files(states: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Without what a server that starts again and again shows of itself."""
    return {
        host: {what: how for what, how in state.items() if not what.startswith("running ")}
        for host, state in states.items()
    }


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
