"""How often a run asks a host: each question costs the latency of its link, and all hosts wait."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import FAST, SERVICE, THREE, UNITS, CommandLine, Ssh

# Counts the ssh channels of the run, one line a channel: the port of its host
COUNTING = """
import paramiko as _paramiko

_open_session = _paramiko.Transport.open_session


def _counted(self, *args, **kwargs):
    with open({log!r}, "a") as log:
        print(self.getpeername()[1], file=log)
    return _open_session(self, *args, **kwargs)


_paramiko.Transport.open_session = _counted
"""
# The host's profile, all else in one, and the smoke test
ROUND_TRIPS = 3
# Where sudo asks for a password, the program that answers it is made first, and removed
WITH_SUDO_PASSWORD = ROUND_TRIPS + 2


def counted(roll_out: CommandLine, log: Path, hosts: tuple[str, ...] = THREE) -> Path:
    """An inventory of these hosts whose run counts into `log`."""
    log.unlink(missing_ok=True)
    inventory = roll_out.inventory("counted", hosts)
    inventory.write_text(inventory.read_text() + COUNTING.format(log=str(log)))
    return inventory


def round_trips(fleet: Fleet, log: Path) -> dict[str, int]:
    ports = Counter(int(line) for line in log.read_text().splitlines())
    return {name: ports[fleet.host(name).ssh_port] for name in THREE}


def test_an_unchanged_run_asks_each_host_three_times(
    served: None, fleet: Fleet, roll_out: CommandLine, tmp_path: Path
) -> None:
    log = tmp_path / "channels"
    run = roll_out(*FAST, inventory=counted(roll_out, log))
    run.assert_ok(*THREE).assert_changed_nothing()
    assert round_trips(fleet, log) == {
        "edge-1": ROUND_TRIPS,  # root
        "edge-2": ROUND_TRIPS,  # sudo
        "edge-3": WITH_SUDO_PASSWORD,
    }


def test_without_requests_there_is_no_smoke_test(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, tmp_path: Path
) -> None:
    log = tmp_path / "channels"
    run = roll_out("--data", "smoke_requests=0", inventory=counted(roll_out, log))
    run.assert_ok(*THREE).assert_changed_nothing()
    assert round_trips(fleet, log)["edge-1"] == ROUND_TRIPS - 1
    record = run.host("edge-1")
    assert record["release"] == first.release("edge-1")
    assert record["ttft_ms"] is None


def test_what_an_operation_has_changed_is_seen_by_the_next_ones(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    host, unit = "edge-1", "/etc/systemd/system/edgellm.service"
    limit = ssh.service(host, "LimitNOFILE")
    # Before the run systemd needs no reload; once the run has written the unit, it does
    ssh(
        host,
        f"sed -i s/^LimitNOFILE=.*/LimitNOFILE=2000/ {unit} && systemctl daemon-reload && "
        "systemctl restart edgellm",
    )
    assert ssh.service(host, "LimitNOFILE") == {"LimitNOFILE": "2000"}
    run = roll_out("--limit", host, *FAST).assert_ok(host)
    assert run.changed()[host] == [UNITS, SERVICE]
    assert ssh.service(host, "LimitNOFILE", "NeedDaemonReload") == {
        **limit,
        "NeedDaemonReload": "no",
    }
