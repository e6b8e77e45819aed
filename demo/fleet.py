"""A real little fleet on this machine: `sudo python3 demo/fleet.py up`, and `down`.

Every host is systemd as PID 1 and sshd in namespaces of its own. Nothing is added to the
machine's own network: a fleet is reached on 127.0.0.1 only, one port for a host's sshd and one
for the 127.0.0.1:8000 inside the host.

Tests use `Fleet`. Not a security boundary: root in a host is root on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
if __package__ in (None, ""):  # started as a program: make its own package importable
    sys.path[0] = str(REPOSITORY)

from demo import container, image, machine  # noqa: E402 (needs the line above)
from demo.container import BootSpec, remove_cgroup  # noqa: E402
from demo.errors import DemoError  # noqa: E402
from demo.forward import Route, write_routes  # noqa: E402
from demo.processes import ProcessRecord, locked_directory, machine_boot_id  # noqa: E402
from demo.processes import replace_text as _replace_text  # noqa: E402

SSH_BASE_PORT = 22010
HTTP_BASE_PORT = 18000
MODEL_SERVER_PORT = 8000  # on the host's own 127.0.0.1
# Every fleet has this network to itself, in namespaces without a way out, so fleets cannot clash
# with each other, nor with the machine's networks.
NETWORK = "10.77.0"
FIRST_HOST_NUMBER = 10
MAX_HOSTS = 200
BOOT_DEADLINE_S = 90.0
STATE_MARKER = ".edgellm-fleet"  # a folder with this file in it is a fleet's, and `down` removes it


@dataclasses.dataclass(frozen=True)
class DemoHost:
    """One host. `index` counts from 1; ports are on this machine's 127.0.0.1."""

    name: str
    index: int
    ssh_port: int
    http_port: int
    address: str = "127.0.0.1"

    @property
    def fleet_address(self) -> str:
        """Where the fleet's other hosts see it: '10.77.0.11'."""
        return f"{NETWORK}.{FIRST_HOST_NUMBER + self.index}"


class Fleet:
    """A fleet by name. Making the object changes nothing; `up` and `down` do.

    `name` is lower-case letters, digits and '-'; hosts are '<host_prefix>-1' to '-<size>', with
    ssh on 127.0.0.1:<ssh_base_port + index> and the host's own 127.0.0.1:8000 on
    127.0.0.1:<http_base_port + index>. `state_dir` is '<repository>/.demo/<name>' unless given,
    `cache_dir` (images) '<repository>/.cache/images'. All methods raise DemoError, and take a
    host as a DemoHost or by name.
    """

    def __init__(
        self,
        name: str = "demo",
        size: int = 3,
        *,
        ssh_base_port: int = SSH_BASE_PORT,
        http_base_port: int = HTTP_BASE_PORT,
        host_prefix: str = "edge",
        state_dir: Path | None = None,
        cache_dir: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        for what, text in (("fleet name", name), ("host prefix", host_prefix)):
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", text):
                raise DemoError(
                    what,
                    want="1 to 22 lower-case letters, digits and '-'",
                    have=repr(text),
                    fix="choose another one",
                )
        if not 1 <= size <= MAX_HOSTS:
            raise DemoError(
                f"fleet {name}",
                want=f"1 to {MAX_HOSTS} hosts",
                have=str(size),
                fix="choose another size",
            )
        self.name = name
        self.hosts: tuple[DemoHost, ...] = tuple(
            DemoHost(f"{host_prefix}-{i}", i, ssh_base_port + i, http_base_port + i)
            for i in range(1, size + 1)
        )
        self.state_dir = (state_dir or REPOSITORY / ".demo" / name).resolve()
        self.cache_dir = (cache_dir or REPOSITORY / ".cache" / "images").resolve()
        self.known_hosts = self.state_dir / "ssh" / "known_hosts"
        self.private_key = self.state_dir / "ssh" / "id_ed25519"
        self.opspw_password_file = self.state_dir / "ssh" / "opspw.password"
        self._say = say
        self._run_dir = machine.RUN_DIR / name
        self._forwarder_record = self._run_dir / "forwarder"
        # '.' cannot be in a name, so no fleet's prefix is another fleet's
        self._netns_prefix = f"edgellm.{name}."
        self._control_netns = f"{self._netns_prefix}control"
        self._image: Path | None = None

    # --- up and down --------------------------------------------------------------------------

    def up(self) -> None:
        """Every host is on, its systemd has finished booting, and sshd answers through its port.

        What is there and healthy stays; what is missing is made; a host that is off is switched
        on, a cut link is restored. About 1 s when all is well; 100 s more, once, for the image.
        """
        machine.check_machine()
        with locked_directory(self._run_dir):
            try:
                self._up()
            finally:
                if not (self._run_dir / "owner.json").exists():
                    machine.unregister(self.name)

    def _up(self) -> None:
        owner = self._check_owner()
        if owner is None and self._left_behind():
            self._say(f"fleet {self.name}: clearing what was left before")
            self._clear()
        if not self._forwarder_is_alive():
            self._check_ports()
        if not all(self._spec_path(host).exists() for host in self.hosts):
            machine.make_folder_of_user(self.cache_dir.parent)
            self._image = image.ensure_image(self.cache_dir, self._say)
        if not self._has_own_state_dir():
            raise DemoError(
                f"fleet {self.name}",
                want=f"{self.state_dir} to be new, empty, or a fleet's state",
                have="other files in it",
                fix="choose another folder with --state-dir",
            )
        machine.make_folder_of_user(self.state_dir)
        (self.state_dir / STATE_MARKER).touch()
        machine.register(self.name, self._owner())
        machine.make_fleet_cgroup(self._cgroup())
        self._set_up_keys()
        self._set_up_network()
        hosts_dir = self.state_dir / "hosts"
        hosts_dir.mkdir(mode=0o700, exist_ok=True)
        (self.state_dir / "consoles").mkdir(exist_ok=True)
        public_key = self.private_key.with_suffix(".pub").read_text()
        password = self.opspw_password_file.read_text().strip()
        for host in self.hosts:
            container.make_disk(self._spec(host), public_key, password)
        self._write_fleet_json()
        if not self._forwarder_is_alive():
            self._start_forwarder()
        for host in self.hosts:
            self._start(host)
        # they boot at the same time, and each gets as long as it would have alone
        for host in self.hosts:
            self._wait_booted(host, BOOT_DEADLINE_S)

    def down(self) -> bool:
        """Removes all of the fleet: processes, namespaces, cgroups, ports, state dir.

        Returns False when nothing of it was there. The image cache stays.
        """
        machine.check_machine()
        with locked_directory(self._run_dir):
            self._check_owner(any_shape=True)
            was_there = self._left_behind()
            self._clear()
            machine.unregister(self.name)
        return was_there

    def _left_behind(self) -> bool:
        return (
            (self.state_dir / STATE_MARKER).exists()
            or self._cgroup().exists()
            or any(machine.NETNS_DIR.glob(f"{self._netns_prefix}*"))
            or (self._run_dir / "owner.json").exists()
        )

    def _clear(self) -> None:
        """Everything but the registration. Needs no state to be whole, or to be there at all."""
        # A host's PID 1 before the rest: its end takes along what `exec` started, whose parents
        # outside the host then still live to reap it.
        for path in (
            *self._run_dir.glob("*.supervisor"),
            *self._run_dir.glob("*.init"),
            self._forwarder_record,
        ):
            record = ProcessRecord.read(path)
            if record is not None:
                record.kill()
        remove_cgroup(self._cgroup())
        machine.delete_network_namespaces(self._netns_prefix)
        if self._has_own_state_dir():
            image.remove_tree(self.state_dir)
        if self.state_dir.parent == REPOSITORY / ".demo":
            with contextlib.suppress(OSError):  # other fleets are in it
                self.state_dir.parent.rmdir()
        for path in self._run_dir.iterdir():
            path.unlink()

    def _has_own_state_dir(self) -> bool:
        """False for a folder with other files in it: never take that over, let alone remove it."""
        return (
            not self.state_dir.exists()
            or (self.state_dir / STATE_MARKER).exists()
            or (self.state_dir.is_dir() and not any(self.state_dir.iterdir()))
        )

    def _owner(self) -> dict[str, object]:
        return {
            "boot_id": machine_boot_id(),
            "state_dir": str(self.state_dir),
            "size": len(self.hosts),
            "hosts": [dataclasses.asdict(host) for host in self.hosts],
        }

    def _check_owner(self, *, any_shape: bool = False) -> dict[str, object] | None:
        """The registration if the fleet is up and is ours; `any_shape`: with any hosts and ports.

        A registration whose state dir was deleted by hand is nobody's, and so is another clone's
        of which no process is left: it was ended from outside.
        """
        owner = machine.owner_of(self.name)
        if owner is None or not Path(str(owner["state_dir"])).is_dir():
            return None
        if owner["state_dir"] != str(self.state_dir):
            if not self._any_process_is_alive():
                return None
            raise DemoError(
                f"fleet {self.name}",
                want=f"its state in {self.state_dir}",
                have=f"a fleet of that name is up with its state in {owner['state_dir']}",
                fix="run 'down' from there, or choose another name with --name",
            )
        if owner != self._owner() and not any_shape:
            raise DemoError(
                f"fleet {self.name}",
                want=f"{len(self.hosts)} hosts, ssh from port {self.hosts[0].ssh_port}",
                have=f"it is up with {owner['size']} hosts or with other ports or names",
                fix="run 'down' first, or ask for what is up",
            )
        return owner

    def _check_ports(self) -> None:
        for host in self.hosts:
            for use, port in (("ssh", host.ssh_port), ("http", host.http_port)):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind(("127.0.0.1", port))
                    except OSError as error:
                        raise DemoError(
                            f"port {port} on 127.0.0.1",
                            want=f"it free, for {use} of {self.name}'s host {host.name}",
                            have=error.strerror or str(error),
                            fix=f"end what listens there ('ss -ltnp sport = :{port}'), or choose "
                            f"other ports with --{use}-base-port",
                        ) from None

    # --- the pieces ---------------------------------------------------------------------------

    def _cgroup(self) -> Path:
        return machine.cgroup2_mount() / f"edgellm.{self.name}"

    def _netns(self, host: DemoHost) -> str:
        return f"{self._netns_prefix}{host.name}"

    def _spec_path(self, host: DemoHost) -> Path:
        return self._run_dir / f"{host.name}.json"

    def _spec(self, host: DemoHost) -> BootSpec:
        path = self._spec_path(host)
        if path.exists():
            return BootSpec.read(path)
        if self._image is None:
            raise self._is_off(host)
        spec = BootSpec(
            name=host.name,
            image=str(self._image),
            disk_dir=str(self.state_dir / "hosts" / host.name),
            network_namespace=str(machine.NETNS_DIR / self._netns(host)),
            cgroup=str(self._cgroup() / host.name),
            supervisor_cgroup=str(self._cgroup() / "supervisor"),
            run_dir=str(self._run_dir),
            console=str(self.state_dir / "consoles" / f"{host.name}.log"),
        )
        spec.write(path)
        return spec

    def _set_up_keys(self) -> None:
        folder = self.private_key.parent
        if folder.is_dir():
            return
        making = folder.with_name(".ssh.making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        key = making / self.private_key.name
        container.make_key(key, f"edgellm fleet {self.name}")
        password = f"{secrets.token_urlsafe(18)}\n"
        _replace_text(making / self.opspw_password_file.name, password, mode=0o600)
        for path in (making, *making.iterdir()):
            os.chown(path, *machine.invoking_user())
        making.rename(folder)

    def _set_up_network(self) -> None:
        """All or nothing: a bridge in the control namespace, and a link to each host's."""
        whole = self._run_dir / "network"
        names = [self._control_netns, *map(self._netns, self.hosts)]
        links_up = "".join(f"link set to-{host.index} up\n" for host in self.hosts)
        if whole.exists() and all((machine.NETNS_DIR / name).exists() for name in names):
            machine.ip("-n", self._control_netns, batch=links_up)
            return
        # Nothing may live on in a namespace that is about to lose its name.
        for host in self.hosts:
            self._kill(host)
        forwarder = ProcessRecord.read(self._forwarder_record)
        if forwarder is not None:
            forwarder.kill()
        machine.delete_network_namespaces(self._netns_prefix)
        for name in names:
            machine.ip("netns", "add", name)
        control = "link set lo up\nlink add hosts type bridge\n"
        control += f"addr add {NETWORK}.1/24 dev hosts\nlink set hosts up\n"
        # A bridge without any live port is down, and takes a second to notice the next one: with
        # a port that stays, cutting and restoring the only host's link works at once.
        control += "link add stay type veth peer name stay-peer\nlink set stay master hosts\n"
        control += "link set stay up\nlink set stay-peer up\n"
        for host in self.hosts:
            link = f"to-{host.index}"
            control += f"link add {link} type veth peer name eth0 netns {self._netns(host)}\n"
            control += f"link set {link} master hosts\n"
        machine.ip("-n", self._control_netns, batch=control + links_up)
        for host in self.hosts:
            inside = "link set lo up\n"
            inside += f"addr add {host.fleet_address}/24 dev eth0\nlink set eth0 up\n"
            machine.ip("-n", self._netns(host), batch=inside)
        whole.touch()

    def _routes(self) -> Iterator[Route]:
        control = str(machine.NETNS_DIR / self._control_netns)
        for host in self.hosts:
            inside = str(machine.NETNS_DIR / self._netns(host))
            # ssh takes the link, so that cutting the link cuts it
            yield Route(host.ssh_port, control, host.fleet_address, 22)
            yield Route(host.http_port, inside, "127.0.0.1", MODEL_SERVER_PORT)

    def _any_process_is_alive(self) -> bool:
        paths = [*self._run_dir.glob("*.supervisor"), self._forwarder_record]
        records = [ProcessRecord.read(path) for path in paths]
        return any(record is not None and record.is_alive() for record in records)

    def _forwarder_is_alive(self) -> bool:
        record = ProcessRecord.read(self._forwarder_record)
        return record is not None and record.is_alive()

    def _start_forwarder(self) -> None:
        routes = self._run_dir / "routes.json"
        write_routes(routes, list(self._routes()))
        cgroup = str(self._cgroup() / "supervisor")
        self._start_daemon("demo.forward", str(routes), str(self._forwarder_record), cgroup)

    def _start_daemon(self, module: str, *arguments: str) -> None:
        """Returns when the daemon is on its own, with its record written."""
        log = self.state_dir / "daemons.log"
        with log.open("ab") as output:
            started = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={
                    "PATH": machine.TOOL_PATH,
                    "PYTHONPATH": str(REPOSITORY),
                    "PYTHONDONTWRITEBYTECODE": "1",  # or the clone gets files of root
                    "LANG": "C.UTF-8",
                },
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
                check=False,
            )
        if started.returncode != 0:
            raise DemoError(
                f"fleet {self.name}",
                want=f"{module} to start",
                have=f"exit {started.returncode}, and it said:\n{_tail(log)}\n",
                fix="run 'down', then 'up'",
            )

    def _start(self, host: DemoHost) -> None:
        spec = self._spec(host)
        supervisor = ProcessRecord.read(spec.supervisor_record)
        if supervisor is None or not supervisor.is_alive():
            self._start_daemon("demo.container", "supervise", str(spec.spec_path))

    def _kill(self, host: DemoHost) -> None:
        """As if the plug were pulled."""
        for suffix in ("supervisor", "init"):
            record = ProcessRecord.read(self._run_dir / f"{host.name}.{suffix}")
            if record is not None:
                record.kill()
        remove_cgroup(self._cgroup() / host.name)

    def _write_fleet_json(self) -> None:
        pins = "".join(
            f"[{host.address}]:{host.ssh_port} {container.host_public_key(self._spec(host))}\n"
            for host in self.hosts
        )
        key = str(self.private_key)
        fleet: dict[str, object] = {
            "name": self.name,
            "known_hosts": str(self.known_hosts),
            "users": [
                {"name": "root", "key": key, "sudo": "not needed"},
                {"name": "ops", "key": key, "sudo": "without a password"},
                {
                    "name": "opspw",
                    "key": key,
                    "sudo": "with a password",
                    "password_file": str(self.opspw_password_file),
                },
            ],
            "hosts": [dataclasses.asdict(host) for host in self.hosts],
        }
        for path, text in (
            (self.known_hosts, pins),
            (self.state_dir / "fleet.json", json.dumps(fleet, indent=1) + "\n"),
        ):
            if not path.exists() or path.read_text() != text:
                _replace_text(path, text)
                os.chown(path, *machine.invoking_user())

    # --- one host -----------------------------------------------------------------------------

    def host(self, host: DemoHost | str) -> DemoHost:
        """The host of that name."""
        name = host if isinstance(host, str) else host.name
        for one in self.hosts:
            if one.name == name:
                return one
        raise DemoError(
            f"fleet {self.name}",
            want=f"one of its hosts {', '.join(one.name for one in self.hosts)}",
            have=repr(name),
            fix="give one of these names",
        )

    def state(self, host: DemoHost | str) -> str:
        """'running', 'booting', or why it is off: 'powered off', 'killed by SIGKILL', …"""
        host = self.host(host)
        supervisor = ProcessRecord.read(self._run_dir / f"{host.name}.supervisor")
        init = ProcessRecord.read(self._run_dir / f"{host.name}.init")
        if supervisor is not None and supervisor.is_alive():
            return "running" if init is not None and init.is_alive() else "booting"
        try:
            return (self._run_dir / f"{host.name}.ended").read_text().strip()
        except OSError:
            return "off"

    def boot_id(self, host: DemoHost | str) -> str:
        """The host's /proc/sys/kernel/random/boot_id: another one after every boot."""
        return self._spec(self.host(host)).boot_id.read_text().strip()

    def exec(
        self,
        host: DemoHost | str,
        *command: str,
        input: str | None = None,
        check: bool = True,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as root in the host, not through ssh: works with its link cut.

        For injecting faults and for asserting on the host's state. With `check`, a command that
        exits with something else than 0 raises DemoError with its output.
        """
        host = self.host(host)
        try:
            done = subprocess.run(
                self.exec_command(host, command),
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"{host.name}: {shlex.join(command)}",
                want=f"it to end, and all that writes to its output, within {timeout_s:.0f} s",
                have="it running",
                fix="give a longer timeout_s; start services by systemd-run",
            ) from None
        if check and done.returncode != 0:
            raise DemoError(
                f"{host.name}: {shlex.join(command)}",
                want="exit 0",
                have=f"exit {done.returncode}, and it said:\n{done.stdout}{done.stderr}",
                fix=f"look around with: sudo python3 demo/fleet.py console {host.name}",
            )
        return done

    def exec_command(self, host: DemoHost | str, command: Sequence[str]) -> list[str]:
        """What `exec` runs, for subprocess.Popen. Raises DemoError when the host is off."""
        host = self.host(host)
        init = ProcessRecord.read(self._run_dir / f"{host.name}.init")
        if init is None or not init.is_alive():
            raise self._is_off(host)
        # In a cgroup of the host, so that its limits hold and `down` finds it. A leaf: a cgroup
        # that hands controllers to children may hold no process itself.
        enter = 'mkdir -p "$0" && echo $$ > "$0/cgroup.procs" && exec "$@"'
        return [
            *("sh", "-c", enter, f"{self._spec(host).cgroup}/edgellm-exec"),
            *("nsenter", f"--target={init.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"),
            *("--cgroup", "--root", "--"),
            # the folder by env, not by nsenter, which would take the machine's
            *(
                "env",
                "-i",
                "--chdir=/root",
                f"PATH={container.HOST_PATH}",
                "HOME=/root",
                "USER=root",
            ),
            *("LANG=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}", *command),
        ]

    def _is_off(self, host: DemoHost) -> DemoError:
        return DemoError(
            f"{host.name} of fleet {self.name}",
            want="it running",
            have=self.state(host),
            fix=f"sudo python3 demo/fleet.py poweron {host.name}  (all hosts: up)",
        )

    def ssh_command(self, host: DemoHost | str, user: str = "root") -> list[str]:
        """The plain `ssh` with the fleet's key and pinned host keys; append the remote command."""
        host = self.host(host)
        options = (
            "BatchMode=yes",
            "IdentitiesOnly=yes",
            "StrictHostKeyChecking=yes",
            f"UserKnownHostsFile={self.known_hosts}",
            "GlobalKnownHostsFile=/dev/null",
            "ConnectTimeout=10",
            "LogLevel=ERROR",
        )
        command = ["ssh", "-F", "none", "-i", str(self.private_key), "-p", str(host.ssh_port)]
        for option in options:
            command += ["-o", option]
        return [*command, f"{user}@{host.address}"]

    def reboot(self, host: DemoHost | str, deadline_s: float = BOOT_DEADLINE_S) -> None:
        """`systemctl reboot` in the host; returns when it is another boot and sshd answers."""
        host = self.host(host)
        before = self.boot_id(host)
        deadline = time.monotonic() + deadline_s
        # its shutdown may end this very command
        self.exec(host, "systemctl", "reboot", check=False)
        while self.boot_id(host) == before:
            if time.monotonic() > deadline:
                raise self._late(host, "another boot", deadline_s)
            time.sleep(0.05)
        self._wait_booted(host, deadline - time.monotonic())

    def power_off(self, host: DemoHost | str, *, graceful: bool = False) -> None:
        """Pulls the plug, or (`graceful`) lets systemd shut down. Off until `power_on` or `up`.

        What the host wrote stays, as its page cache is the machine's: a power cut that loses
        unsynced data cannot be had here.
        """
        host = self.host(host)
        if graceful:
            self.exec(host, "systemctl", "poweroff", check=False)
            deadline = time.monotonic() + BOOT_DEADLINE_S
            while self.state(host) in ("running", "booting"):
                if time.monotonic() > deadline:
                    raise self._late(host, "off", BOOT_DEADLINE_S)
                time.sleep(0.05)
        else:
            self._kill(host)
            _replace_text(self._run_dir / f"{host.name}.ended", "plug pulled\n")

    def power_on(self, host: DemoHost | str, deadline_s: float = BOOT_DEADLINE_S) -> None:
        """Returns when it has booted and sshd answers; at once when it was on."""
        host = self.host(host)
        self._start(host)
        self._wait_booted(host, deadline_s)

    def cut_link(self, host: DemoHost | str) -> None:
        """Takes the host's cable out: ssh stalls, new connections fail after 3 s. http_port does
        not go over the link."""
        link = f"to-{self.host(host).index}"
        machine.ip("-n", self._control_netns, "link", "set", link, "down")

    def restore_link(self, host: DemoHost | str) -> None:
        link = f"to-{self.host(host).index}"
        machine.ip("-n", self._control_netns, "link", "set", link, "up")

    def fill_disk(self, host: DemoHost | str, path: str, size_bytes: int) -> None:
        """Mounts a tmpfs of `size_bytes` over the folder `path` (made if need be) in the host."""
        self.exec(host, "mkdir", "-p", path)
        options = f"size={size_bytes},mode=755"
        self.exec(host, "mount", "-t", "tmpfs", "-o", options, "edgellm-fault", path)

    def free_disk(self, host: DemoHost | str, path: str) -> None:
        """Takes away what `fill_disk` mounted, with what was written to it."""
        self.exec(host, "umount", "--lazy", path)

    def wait_ssh(self, host: DemoHost | str, deadline_s: float = BOOT_DEADLINE_S) -> None:
        """Until the host's sshd says its 'SSH-2.0-…' through its port."""
        host = self.host(host)
        deadline = time.monotonic() + deadline_s
        while not _sshd_answers(host):
            if time.monotonic() > deadline:
                raise self._late(host, "sshd to answer", deadline_s)
            time.sleep(0.05)

    def _wait_booted(self, host: DemoHost, deadline_s: float) -> None:
        """sshd answers, and systemd is done: until then, it may refuse users who are not root."""
        deadline = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(DemoError):
                left_s = max(1.0, deadline - time.monotonic())
                waiting = ("systemctl", "is-system-running", "--wait")
                said = self.exec(host, *waiting, check=False, timeout_s=left_s).stdout.strip()
                if said in ("running", "degraded"):
                    break
            if self.state(host) not in ("running", "booting") or time.monotonic() > deadline:
                raise self._late(host, "systemd to finish booting", deadline_s)
            time.sleep(0.05)
        self.wait_ssh(host, max(1.0, deadline - time.monotonic()))

    def _late(self, host: DemoHost, what: str, deadline_s: float) -> DemoError:
        console = self.state_dir / "consoles" / f"{host.name}.log"
        said = _tail(console)
        with contextlib.suppress(DemoError):
            journal = ("journalctl", "-b", "--no-pager", "-n", "10", "-p", "warning")
            said += self.exec(host, *journal, timeout_s=5.0).stdout
        return DemoError(
            f"{host.name} of fleet {self.name}",
            want=f"{what} within {deadline_s:.0f} s",
            have=f"state '{self.state(host)}'; it said last:\n{said}\n",
            fix=f"read {console}; 'down' and 'up' start afresh",
        )

    def system_state(self, host: DemoHost | str) -> str:
        """What `systemctl is-system-running` says in the host, or `state` when it is off."""
        host = self.host(host)
        if self.state(host) != "running":
            return self.state(host)
        return self.exec(host, "systemctl", "is-system-running", check=False).stdout.strip()


def _sshd_answers(host: DemoHost) -> bool:
    try:
        with socket.create_connection((host.address, host.ssh_port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _tail(path: Path, line_count: int = 10) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-line_count:])
    except OSError:
        return f"(no {path})"


# --- the command line -------------------------------------------------------------------------


def _print_status(fleet: Fleet) -> int:
    """0 when all hosts are running, 1 when some are not, 3 when the fleet is not up."""
    owner = machine.owner_of(fleet.name)
    if owner is None:
        print(f"fleet {fleet.name} is not up; start it with: sudo python3 demo/fleet.py up")
        return 3
    alive = fleet._forwarder_is_alive()
    print(f"fleet {fleet.name}: {owner['state_dir']}" + ("" if alive else "  (forwarder is gone!)"))
    healthy = alive
    for host in fleet.hosts:
        state = fleet.system_state(host)
        healthy = healthy and state in ("running", "degraded")
        print(
            f"  {host.name:<12} {state:<12} ssh {host.address}:{host.ssh_port}"
            f"  http {host.address}:{host.http_port}"
        )
    return 0 if healthy else 1


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleet.py", description="A real little fleet on this machine. Run as root."
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--name", default="demo", help="several fleets can be up (default: demo)")
    shared.add_argument("--size", type=int, help="number of hosts (default: 3)")
    shared.add_argument("--ssh-base-port", type=int, help=f"default {SSH_BASE_PORT}, + 1, + 2, …")
    shared.add_argument("--http-base-port", type=int, help=f"default {HTTP_BASE_PORT}, + 1, …")
    shared.add_argument("--state-dir", type=Path, help="default: .demo/<name> in the repository")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "start the fleet, or repair it"),
        ("down", "remove it, and all that it made"),
        ("status", "one line a host; exits 1 if one is not running, 3 if the fleet is not up"),
        ("packages", "print the Debian packages that this machine needs for it"),
    ):
        commands.add_parser(name, parents=[shared], help=text)
        if name == "packages":
            packages = commands.choices[name]
            packages.add_argument("--missing", action="store_true", help="only what is not there")
    for name, text in (
        ("reboot", "systemctl reboot in the host, and wait for it"),
        ("poweroff", "pull the plug"),
        ("poweron", "switch it on again"),
        ("console", "a root shell in the host without ssh"),
        ("exec", "run a command as root in the host without ssh"),
    ):
        command = commands.add_parser(name, parents=[shared], help=text)
        command.add_argument("host", help="its name: edge-1")
        if name == "exec":
            command.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND…")
    return parser


def _fleet_of(options: argparse.Namespace) -> Fleet:
    """What the options say; for what they leave open, the fleet that is up."""
    owner = machine.owner_of(options.name) or {}
    hosts = owner.get("hosts")
    first = hosts[0] if isinstance(hosts, list) and hosts else {}

    def choose(given: int | None, is_up: int, default: int) -> int:
        return given if given is not None else is_up if first else default

    return Fleet(
        options.name,
        choose(options.size, int(str(owner.get("size", 0))), 3),
        ssh_base_port=choose(options.ssh_base_port, first.get("ssh_port", 1) - 1, SSH_BASE_PORT),
        http_base_port=choose(
            options.http_base_port, first.get("http_port", 1) - 1, HTTP_BASE_PORT
        ),
        host_prefix=str(first.get("name", "edge-1")).rpartition("-")[0],
        state_dir=options.state_dir,
        say=lambda line: print(line, flush=True),
    )


def main(arguments: Sequence[str]) -> int:
    options = _arguments().parse_args(arguments)
    if options.command == "packages":
        print(" ".join(machine.required_packages(only_missing=options.missing)))
        return 0
    machine.check_machine()
    fleet = _fleet_of(options)
    if options.command == "up":
        started = time.monotonic()
        fleet.up()
        _print_status(fleet)
        print(f"up in {time.monotonic() - started:.1f} s; ssh: {_ssh_example(fleet)}")
    elif options.command == "down":
        if fleet.down():
            print(f"fleet {fleet.name} is down, nothing of it is left")
        else:
            print(f"fleet {fleet.name} was not up")
        if fleet.cache_dir.is_dir():
            print(f"kept for next time: the image in {fleet.cache_dir}")
    elif options.command == "status":
        return _print_status(fleet)
    elif options.command == "reboot":
        fleet.reboot(options.host)
        print(f"{options.host} has rebooted")
    elif options.command == "poweroff":
        fleet.power_off(options.host)
        print(f"{options.host} is off until: sudo python3 demo/fleet.py poweron {options.host}")
    elif options.command == "poweron":
        fleet.power_on(options.host)
        print(f"{options.host} is on")
    else:
        argv = ["bash", "-l"] if options.command == "console" else options.argv
        if argv[:1] == ["--"]:
            argv = argv[1:]
        if not argv:
            raise DemoError("exec", want="a command", have="none", fix="exec edge-1 uname -a")
        command = fleet.exec_command(fleet.host(options.host), argv)
        os.execvp(command[0], command)
    return 0


def _ssh_example(fleet: Fleet) -> str:
    host = fleet.hosts[0]
    return (
        f"ssh -i {fleet.private_key} -o UserKnownHostsFile={fleet.known_hosts} "
        f"-p {host.ssh_port} root@{host.address}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DemoError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; 'down' removes what is there, 'up' carries on")
