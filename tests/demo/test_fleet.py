"""The demo fleet itself: one host of its own, beside whatever else is up on this machine.

Asserted from outside: with the plain ssh program, and with what /proc, /sys and /run show.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import machine
from demo.errors import DemoError
from demo.fleet import DemoHost, Fleet
from demo.processes import ProcessRecord

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces and mounts: needs root"),
]

NAME = "fleet-test"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    state_dir = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(NAME, 1, ssh_base_port=22910, http_base_port=18910, state_dir=state_dir)
    fleet.down()
    fleet.up()
    yield fleet
    fleet.down()


@pytest.fixture
def host(fleet: Fleet) -> DemoHost:
    """The host, on and reachable, whatever an earlier test did to it."""
    fleet.up()
    return fleet.hosts[0]


def ssh(
    fleet: Fleet, command: str, user: str = "root", stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*fleet.ssh_command(fleet.hosts[0], user), command],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def http_get(host: DemoHost, path: str) -> bytes:
    """The whole answer, empty when the connection was reset: then nobody listens in the host."""
    try:
        with socket.create_connection(("127.0.0.1", host.http_port), timeout=5) as client:
            client.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            return b"".join(iter(lambda: client.recv(4096), b""))
    except ConnectionResetError:
        return b""


def traces(fleet: Fleet, processes: list[ProcessRecord]) -> dict[str, list[str]]:
    """All that a fleet could leave on this machine, by kind; empty lists when it left nothing."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    listening: list[str] = []
    for port in (fleet.hosts[0].ssh_port, fleet.hosts[0].http_port):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                listening.append(str(port))
    netns = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {
        "processes": [str(process.pid) for process in processes if process.is_alive()],
        "mounts": [line for line in mounts if NAME in line or str(fleet.state_dir) in line],
        "network namespaces": [line for line in netns.stdout.splitlines() if f".{NAME}." in line],
        "cgroups": [str(path) for path in machine.cgroup2_mount().glob(f"edgellm.{NAME}*")],
        "ports": listening,
        "files": [str(path) for path in (fleet.state_dir, machine.RUN_DIR / NAME) if path.exists()],
    }


def processes_of(fleet: Fleet) -> list[ProcessRecord]:
    records: list[ProcessRecord] = []
    for path in (machine.cgroup2_mount() / f"edgellm.{fleet.name}").rglob("cgroup.procs"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):  # it ended just now
                records.append(ProcessRecord.of(int(pid)))
    return records


def test_systemd_is_pid_1_and_has_booted_without_a_failed_unit(
    fleet: Fleet, host: DemoHost
) -> None:
    said = ssh(fleet, "hostname; cat /proc/1/comm; systemctl is-system-running; nproc")
    assert said.stdout.split() == [host.name, "systemd", "running", str(os.cpu_count())]


@pytest.mark.usefixtures("host")
def test_root_ops_and_opspw_log_in_with_the_fleets_key_and_the_pinned_host_key(
    fleet: Fleet,
) -> None:
    for user in ("root", "ops", "opspw"):
        assert ssh(fleet, "id -un", user).stdout == f"{user}\n"


def test_another_host_key_is_refused(fleet: Fleet, host: DemoHost, tmp_path: Path) -> None:
    other = fleet.private_key.with_suffix(".pub").read_text()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{host.ssh_port} {other}")
    command = [
        part.replace(str(fleet.known_hosts), str(tmp_path / "known_hosts"))
        for part in fleet.ssh_command(host)
    ]
    refused = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr


@pytest.mark.usefixtures("host")
def test_ops_has_sudo_without_a_password_and_opspw_only_with_its_own(fleet: Fleet) -> None:
    assert ssh(fleet, "sudo -n id -un", "ops").stdout == "root\n"
    assert ssh(fleet, "sudo -n id -un", "opspw").returncode != 0
    assert ssh(fleet, "sudo -S id -un", "opspw", stdin="wrong\n").returncode != 0
    assert fleet.opspw_password_file.stat().st_mode & 0o777 == 0o600
    password = fleet.opspw_password_file.read_text()
    assert ssh(fleet, "sudo -S id -un", "opspw", stdin=password).stdout == "root\n"


def test_fleet_json_describes_the_hosts(fleet: Fleet, host: DemoHost) -> None:
    described = json.loads((fleet.state_dir / "fleet.json").read_text())
    assert described["name"] == NAME
    assert [(one["name"], one["ssh_port"]) for one in described["hosts"]] == [
        (host.name, host.ssh_port)
    ]
    assert {user["name"] for user in described["users"]} == {"root", "ops", "opspw"}
    assert Path(described["known_hosts"]).read_text().startswith(f"[127.0.0.1]:{host.ssh_port} ")


def test_http_port_reaches_what_listens_on_the_hosts_own_loopback(
    fleet: Fleet, host: DemoHost
) -> None:
    assert http_get(host, "/hostname") == b""
    serve = "systemd-run --quiet --unit=web python3 -m http.server --bind 127.0.0.1 8000 -d /etc"
    fleet.exec(host, *serve.split())
    deadline = time.monotonic() + 10
    answer = b""
    while b"200 OK" not in answer and time.monotonic() < deadline:
        time.sleep(0.1)
        answer = http_get(host, "/hostname")
    assert answer.endswith(b"\r\n\r\n" + host.name.encode() + b"\n")
    fleet.exec(host, "systemctl", "stop", "web")


def test_a_vm_sysctl_is_the_hosts_own_and_a_kernel_sysctl_is_read_only(
    fleet: Fleet, host: DemoHost
) -> None:
    machines = Path("/proc/sys/vm/swappiness").read_text()
    fleet.exec(host, "sysctl", "-qw", "vm.swappiness=93")
    assert ssh(fleet, "cat /proc/sys/vm/swappiness").stdout == "93\n"
    assert Path("/proc/sys/vm/swappiness").read_text() == machines
    assert ssh(fleet, "echo 1 > /proc/sys/kernel/panic").returncode != 0
    assert ssh(fleet, "echo h > /proc/sysrq-trigger").returncode != 0


def test_reboot_is_another_boot_with_the_same_disk_and_persisted_sysctls(
    fleet: Fleet, host: DemoHost
) -> None:
    look = "cat /proc/sys/kernel/random/boot_id /root/kept /run/lost"
    ssh(fleet, "echo kept > /root/kept; echo lost > /run/lost; sync")
    ssh(fleet, "echo vm.swappiness=94 > /etc/sysctl.d/90-test.conf")
    before = ssh(fleet, look).stdout.split()
    fleet.reboot(host)
    after = ssh(fleet, look).stdout.split()
    assert before[1:] == ["kept", "lost"]
    assert after[1:] == ["kept"]
    assert after[0] != before[0]
    assert after[0] == fleet.boot_id(host)
    assert ssh(fleet, "cat /proc/sys/vm/swappiness").stdout == "94\n"


def test_reboot_over_ssh_really_reboots(fleet: Fleet, host: DemoHost) -> None:
    before = fleet.boot_id(host)
    ssh(fleet, "systemctl reboot")
    deadline = time.monotonic() + 30
    while fleet.boot_id(host) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    fleet.wait_ssh(host, 30)
    assert ssh(fleet, "cat /proc/sys/kernel/random/boot_id").stdout.strip() != before


@pytest.mark.parametrize("graceful", [False, True])
def test_a_host_that_is_off_refuses_ssh_at_once_until_it_is_on_again(
    fleet: Fleet, host: DemoHost, graceful: bool
) -> None:
    fleet.power_off(host, graceful=graceful)
    assert fleet.state(host) == ("powered off" if graceful else "plug pulled")
    started = time.monotonic()
    assert ssh(fleet, "true").returncode == 255
    assert time.monotonic() - started < 5
    with pytest.raises(DemoError, match=r"poweron edge-1"):
        fleet.exec(host, "true")
    fleet.power_on(host)
    assert ssh(fleet, "true").returncode == 0


def test_a_cut_link_fails_new_connections_soon_and_comes_back(fleet: Fleet, host: DemoHost) -> None:
    fleet.cut_link(host)
    started = time.monotonic()
    assert ssh(fleet, "true").returncode == 255
    assert time.monotonic() - started < 6
    assert fleet.exec(host, "hostname").stdout == f"{host.name}\n"
    fleet.restore_link(host)
    assert ssh(fleet, "true").returncode == 0


def test_a_full_disk_is_full_for_services_too(fleet: Fleet, host: DemoHost) -> None:
    fleet.fill_disk(host, "/srv/small", 1_000_000)
    write = "dd if=/dev/zero of=/srv/small/file bs=1M count=5"
    assert "No space left on device" in ssh(fleet, write).stderr
    # a unit with mounts of its own
    unit = ("systemd-run", "--quiet", "--wait", "--pipe", "-p", "PrivateTmp=yes")
    in_unit = fleet.exec(host, *unit, *write.split(), check=False)
    assert in_unit.returncode != 0
    fleet.free_disk(host, "/srv/small")
    assert ssh(fleet, write).returncode == 0


@pytest.mark.usefixtures("host")
def test_a_removed_package_is_installed_again_without_any_network(fleet: Fleet) -> None:
    assert (
        ssh(fleet, "DEBIAN_FRONTEND=noninteractive apt-get -qqy purge numactl libnuma1").returncode
        == 0
    )
    assert ssh(fleet, "command -v numactl").returncode != 0
    install = "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qqy install numactl"
    installed = ssh(fleet, f"sudo sh -c '{install}'", "ops")
    assert installed.returncode == 0, installed.stderr
    assert "physcpubind" in ssh(fleet, "numactl --show").stdout


def test_up_again_changes_nothing_and_repairs_what_died(fleet: Fleet, host: DemoHost) -> None:
    boot_id = fleet.boot_id(host)
    started = time.monotonic()
    fleet.up()
    assert time.monotonic() - started < 3
    assert fleet.boot_id(host) == boot_id
    forwarder = ProcessRecord.read(machine.RUN_DIR / NAME / "forwarder")
    supervisor = ProcessRecord.read(machine.RUN_DIR / NAME / f"{host.name}.supervisor")
    assert forwarder is not None
    assert supervisor is not None
    forwarder.kill()
    assert ssh(fleet, "true").returncode == 255
    supervisor.kill()
    fleet.up()
    assert ssh(fleet, "true").returncode == 0
    assert fleet.boot_id(host) != boot_id


@pytest.mark.usefixtures("host")
def test_a_fleet_of_another_shape_or_place_under_the_same_name_is_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    with pytest.raises(DemoError, match="run 'down' first"):
        Fleet(NAME, 2, ssh_base_port=22910, http_base_port=18910, state_dir=fleet.state_dir).up()
    with pytest.raises(DemoError, match="its state in"):
        Fleet(NAME, 1, ssh_base_port=22910, http_base_port=18910, state_dir=tmp_path).up()


def test_a_taken_port_is_named(host: DemoHost, tmp_path: Path) -> None:
    other = Fleet(
        "fleet-test-ports", 1, ssh_base_port=22920, http_base_port=18910, state_dir=tmp_path
    )
    with pytest.raises(DemoError, match=rf"port {host.http_port} .*--http-base-port"):
        other.up()
    assert not (machine.RUN_DIR / "fleet-test-ports").exists()


def test_a_folder_with_other_files_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    other = Fleet(
        "fleet-test-other", 1, ssh_base_port=22930, http_base_port=18930, state_dir=tmp_path
    )
    with pytest.raises(DemoError, match="other files in it"):
        other.up()
    other.down()
    assert (tmp_path / "thesis.tex").exists()


def test_down_leaves_nothing_and_says_whether_there_was_something(
    fleet: Fleet, host: DemoHost
) -> None:
    # what a test may well leave running in a host
    background = subprocess.Popen(
        fleet.exec_command(host, ["sleep", "1000"]), stdin=subprocess.DEVNULL
    )
    reaper = threading.Thread(target=background.wait)
    reaper.start()
    time.sleep(0.2)
    processes = processes_of(fleet)
    assert len(processes) > 8
    assert all(traces(fleet, processes).values())
    started = time.monotonic()
    assert fleet.down() is True
    assert time.monotonic() - started < 5
    reaper.join(timeout=5)
    assert traces(fleet, processes) == {kind: [] for kind in traces(fleet, processes)}
    assert fleet.down() is False


def test_down_after_an_interrupted_up_leaves_nothing(fleet: Fleet) -> None:
    command = f"python3 demo/fleet.py up --name {NAME} --size 1 --ssh-base-port 22910"
    command += f" --http-base-port 18910 --state-dir {fleet.state_dir}"
    repository = Path(__file__).resolve().parents[2]
    for delay_s in (0.15, 0.3, 0.5, 0.8):
        up = subprocess.Popen(
            command.split(), cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        time.sleep(delay_s)
        up.send_signal(2)
        up.communicate(timeout=20)
        processes = processes_of(fleet)
        fleet.down()
        assert traces(fleet, processes) == {kind: [] for kind in traces(fleet, processes)}, delay_s
    shutil.rmtree(fleet.state_dir, ignore_errors=True)


def test_a_fleet_whose_processes_all_ended_from_outside_blocks_no_other_clone(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.up()
    for process in processes_of(fleet):
        process.kill()
    other = Fleet(NAME, 1, ssh_base_port=22910, http_base_port=18910, state_dir=tmp_path / "b")
    try:
        other.up()
        assert other.system_state(other.hosts[0]) == "running"
    finally:
        other.down()
    shutil.rmtree(fleet.state_dir, ignore_errors=True)
    assert traces(fleet, []) == {kind: [] for kind in traces(fleet, [])}
