"""One real arm64 Linux on this machine: `sudo python3 -m demo.arm64_machine up`, and `down`.

qemu without KVM: a kernel, a memory, a disk and cgroups of its own, so everything is real that the
demo's hosts share with the machine. 4 cores, 2 of them LITTLE by the device tree, on 2 NUMA nodes.
It is reached by ssh on a port of 127.0.0.1, and it reaches nothing.

Tests use `Arm64Machine`. A minute to boot; some thirty times slower than the machine it runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo import arm64_image, machine
from demo.arm64_image import Arm64Image
from demo.errors import DemoError
from demo.processes import ProcessRecord, locked_directory, replace_text

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE_OF_TOOL = {
    # the image
    "mmdebstrap": "mmdebstrap",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mke2fs": "e2fsprogs",
    "depmod": "kmod",
    "modprobe": "kmod",
    "cpio": "cpio",
    # the machine
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-img": "qemu-utils",
    "fdtget": "device-tree-compiler",
    "fdtput": "device-tree-compiler",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}

MEMORY_MIB = 2048  # touched as the guest touches it
# Capacities of an RK3588's Cortex-A55 and of the big core that it is normalised to.
LITTLE_CAPACITY, BIG_CAPACITY = 446, 1024
CPU_CAPACITIES = (LITTLE_CAPACITY, LITTLE_CAPACITY, BIG_CAPACITY, BIG_CAPACITY)
CLUSTER_SIZE = 2  # CPUs of a cluster, and of a NUMA node
KERNEL_ARGUMENTS = "console=ttyAMA0 quiet mitigations=off"
BOOT_DEADLINE_S = 600.0  # 45 s when the machine has two cores to spare
STATE_MARKER = ".edgellm-arm64-machine"


class Arm64Machine:
    """The machine whose state is in `state_dir`. Making the object changes nothing.

    `state_dir` is '<repository>/.demo/vm' unless given, `cache_dir` (images)
    '<repository>/.cache/images'. All methods raise DemoError.
    """

    def __init__(
        self,
        *,
        state_dir: Path | None = None,
        cache_dir: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.state_dir = (state_dir or REPOSITORY / ".demo" / "vm").resolve()
        self.cache_dir = (cache_dir or REPOSITORY / ".cache" / "images").resolve()
        self.known_hosts = self.state_dir / "known_hosts"
        self.private_key = self.state_dir / "id_ed25519"
        self.console = self.state_dir / "console.log"
        self._disk = self.state_dir / "disk.qcow2"
        self._device_tree = self.state_dir / "board.dtb"
        self._pid_file = self.state_dir / "qemu.pid"
        self._port_file = self.state_dir / "ssh.port"
        self._say = say

    @property
    def ssh_port(self) -> int:
        """On 127.0.0.1; chosen by `up`."""
        try:
            return int(self._port_file.read_text())
        except FileNotFoundError:
            raise self._is_not_up() from None

    # --- on and off -------------------------------------------------------------------------------

    def up(self) -> None:
        """It has booted and sshd answers; its disk is the one that it was switched off with."""
        check_tools()
        arm64 = arm64_image.ensure_arm64_image(self.cache_dir, self._say)
        if self.state_dir.is_dir() and any(self.state_dir.iterdir()) and not self._is_ours():
            raise DemoError(
                "arm64 machine",
                want=f"{self.state_dir} to be new, empty, or a machine's state",
                have="other files in it",
                fix="choose another state_dir",
            )
        machine.make_folder_of_user(self.state_dir)
        with locked_directory(self.state_dir):
            if not self.is_on():
                self._make(arm64)
                self._start(arm64)
            self._wait_booted(BOOT_DEADLINE_S)

    def down(self) -> bool:
        """Removes all of it but the image in the cache. False: nothing of it was there."""
        if not self._is_ours():
            return False
        with locked_directory(self.state_dir):
            self.power_cut()
            shutil.rmtree(self.state_dir, onerror=_raised_unless_gone)
        if self.state_dir.parent == REPOSITORY / ".demo":
            with contextlib.suppress(OSError):  # others are in it
                self.state_dir.parent.rmdir()
        return True

    def power_cut(self) -> None:
        """At once; what the guest had not synced is lost. `up` switches it on again."""
        self._hang_up()
        process = self._process()
        if process is not None:
            process.kill(wait_s=30)
        self._pid_file.unlink(missing_ok=True)

    def reboot(self) -> None:
        """`systemctl reboot`; returns when it is another boot and sshd answers."""
        before = self._boot_id()
        self.ssh("systemctl reboot", check=False)
        self._hang_up()
        deadline = time.monotonic() + BOOT_DEADLINE_S
        while True:
            self._wait_booted(deadline - time.monotonic())
            if self._boot_id() != before:
                return
            self._hang_up()  # it was still going down
            time.sleep(1)

    def is_on(self) -> bool:
        return self._process() is not None

    def _is_ours(self) -> bool:
        return (self.state_dir / STATE_MARKER).exists()

    def _process(self) -> ProcessRecord | None:
        """qemu, by its own pid file and, as that number may have gone to another, its arguments."""
        try:
            pid = int(self._pid_file.read_text())
            record = ProcessRecord.of(pid)
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        is_ours = os.fsencode(self._pid_file) in arguments and record.is_alive()
        return record if is_ours else None

    def _make(self, arm64: Arm64Image) -> None:
        """Disk, keys and device tree, unless they are there."""
        (self.state_dir / STATE_MARKER).touch()
        if not self.private_key.exists():
            shutil.copy(arm64.private_key, self.private_key)
        if not self._device_tree.exists():
            write_device_tree(self._device_tree)
        if not self._disk.exists():
            making = self._disk.with_suffix(".making")
            _tool(
                *("qemu-img", "create", "-q", "-f", "qcow2"),
                *("-b", arm64.disk, "-F", "raw", making),
            )
            making.rename(self._disk)

    def _start(self, arm64: Arm64Image) -> None:
        port = free_port()
        replace_text(self._port_file, f"{port}\n")
        replace_text(self.known_hosts, f"[127.0.0.1]:{port} {arm64.host_key}\n")
        network = f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"
        _tool(
            *board_command(),
            *("-dtb", self._device_tree, "-kernel", arm64.kernel, "-initrd", arm64.initrd),
            *("-append", KERNEL_ARGUMENTS),
            *("-drive", f"if=none,id=disk,file={self._disk}"),
            *("-device", "virtio-blk-pci,drive=disk"),
            *("-netdev", network, "-device", "virtio-net-pci,netdev=net,romfile="),
            *("-device", "virtio-rng-pci"),
            *("-serial", f"file:{self.console}", "-monitor", "none"),
            *("-pidfile", self._pid_file, "-daemonize"),
        )

    # --- ssh --------------------------------------------------------------------------------------

    def ssh(
        self, command: str, *, check: bool = True, timeout_s: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Plain ssh as root. With `check`, an exit code other than 0 raises DemoError.

        All share one connection, as a login takes seconds of the guest's CPU.
        """
        try:
            done = subprocess.run(
                [*self.ssh_command(), command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                cwd=self.state_dir,  # where the connection's socket is
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"arm64 machine: {command}",
                want=f"it to end within {timeout_s:.0f} s",
                have="it running",
                fix=f"give it more time, or read {self.console}",
            ) from None
        if check and done.returncode != 0:
            raise DemoError(
                f"arm64 machine: {command}",
                want="exit 0",
                have=f"exit {done.returncode}, and it said:\n{done.stdout}{done.stderr}",
                fix="look around with: sudo python3 -m demo.arm64_machine ssh",
            )
        return done

    def ssh_command(self) -> list[str]:
        """To be run in `state_dir`: the path of a socket must be short, so it is a relative one."""
        options = (
            *("BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"),
            *(f"UserKnownHostsFile={self.known_hosts}", "GlobalKnownHostsFile=/dev/null"),
            *("ConnectTimeout=60", "ServerAliveInterval=10", "ServerAliveCountMax=6"),
            *("ControlMaster=auto", "ControlPath=ssh.socket", "ControlPersist=yes"),
            "LogLevel=ERROR",
        )
        command = ["ssh", "-F", "none", "-i", str(self.private_key), "-p", str(self.ssh_port)]
        for option in options:
            command += ["-o", option]
        return [*command, "root@127.0.0.1"]

    def _hang_up(self) -> None:
        """Ends the shared connection: it would wait for a machine that is gone."""
        if (self.state_dir / "ssh.socket").exists():
            command = self.ssh_command()
            subprocess.run(
                [*command[:-1], "-O", "exit", command[-1]],
                cwd=self.state_dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )

    def _boot_id(self) -> str:
        return self.ssh("cat /proc/sys/kernel/random/boot_id").stdout.strip()

    def _wait_booted(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        waiting = "systemctl is-system-running --wait"
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self.is_on():
                raise DemoError(
                    "arm64 machine",
                    want=f"it to boot within {deadline_s:.0f} s",
                    have="it switched off" if not self.is_on() else "no answer by ssh",
                    fix=f"read {self.console}; 'down' and 'up' start afresh",
                )
            if self._sshd_answers():
                with contextlib.suppress(DemoError):
                    said = self.ssh(waiting, check=False, timeout_s=left_s).stdout.strip()
                    if said in ("running", "degraded"):
                        return
            time.sleep(0.5)

    def _sshd_answers(self) -> bool:
        # qemu accepts the connection itself, before anybody listens in the guest
        try:
            with socket.create_connection(("127.0.0.1", self.ssh_port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _is_not_up(self) -> DemoError:
        return DemoError(
            "arm64 machine",
            want="it up",
            have=f"no state of it in {self.state_dir}",
            fix="sudo python3 -m demo.arm64_machine up",
        )


# --- the board ------------------------------------------------------------------------------------


def board_command(machine_options: str = "") -> list[str]:
    """CPUs and memory of the board: the same for its device tree and for running it."""
    cpus = len(CPU_CAPACITIES)
    command = [
        *("qemu-system-aarch64", "-machine", f"virt,gic-version=3{machine_options}"),
        *("-cpu", "cortex-a76", "-accel", "tcg,thread=multi", "-smp", str(cpus)),
        *("-m", f"{MEMORY_MIB}M", "-display", "none", "-nodefaults"),
    ]
    nodes = range(cpus // CLUSTER_SIZE)
    for node in nodes:
        memory = f"memory-backend-ram,id=memory{node},size={MEMORY_MIB // len(nodes)}M"
        first = node * CLUSTER_SIZE
        of_node = f"cpus={first}-{first + CLUSTER_SIZE - 1},memdev=memory{node}"
        command += ["-object", memory, "-numa", f"node,nodeid={node},{of_node}"]
    return [*command, "-numa", "dist,src=0,dst=1,val=20"]


def write_device_tree(target: Path) -> None:
    """qemu's own for this board, with the CPUs' capacities and clusters.

    Bindings: Documentation/devicetree/bindings/cpu/cpu-capacity.txt and cpu-topology.txt.
    """
    making = target.with_suffix(".making")
    _tool(*board_command(f",dumpdtb={making}"))
    # absent in some versions of qemu, and not ours in the others
    subprocess.run(["fdtput", "-r", making, "/cpus/cpu-map"], capture_output=True, check=False)
    for cpu, capacity in enumerate(CPU_CAPACITIES):
        node = f"/cpus/cpu@{cpu}"
        _tool("fdtput", "-t", "u", making, node, "capacity-dmips-mhz", str(capacity))
        handle = _tool("fdtget", "-t", "u", making, node, "phandle").strip()
        core = f"/cpus/cpu-map/cluster{cpu // CLUSTER_SIZE}/core{cpu % CLUSTER_SIZE}"
        _tool("fdtput", "-p", "-c", making, core)
        _tool("fdtput", "-t", "u", making, core, "cpu", handle)
    making.rename(target)


# --- this machine ---------------------------------------------------------------------------------


def required_packages(*, only_missing: bool = False) -> list[str]:
    """The Debian packages of all tools that this needs."""
    tools = missing_tools() if only_missing else list(PACKAGE_OF_TOOL)
    return sorted({PACKAGE_OF_TOOL[tool] for tool in tools})


def missing_tools() -> list[str]:
    return [tool for tool in PACKAGE_OF_TOOL if shutil.which(tool, path=machine.TOOL_PATH) is None]


def check_tools() -> None:
    """Raises DemoError unless this is root with all tools."""
    if os.geteuid() != 0:
        raise DemoError(
            "arm64 machine",
            want="root: its image has files of many owners",
            have=f"user id {os.geteuid()}",
            fix="run it with sudo",
        )
    if missing := missing_tools():
        packages = required_packages(only_missing=True)
        raise DemoError(
            "arm64 machine",
            want=f"the commands {', '.join(missing)}",
            have="none of these on this machine",
            fix=f"apt-get install --no-install-recommends {' '.join(packages)}",
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tool(*command: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise DemoError(
            f"arm64 machine: {words[0]}",
            want="exit 0",
            have=f"exit {done.returncode}: {done.stderr.strip()[-800:]}",
            fix="run 'down', then 'up'",
        )
    return done.stdout


def _raised_unless_gone(function: object, path: str, exc_info: tuple[Any, Any, Any]) -> None:
    """ssh removes its own socket, some moments after its machine is gone."""
    if not isinstance(exc_info[1], FileNotFoundError):
        raise exc_info[1]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m demo.arm64_machine", description="One real arm64 Linux. Run as root."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("up", "boot it, or boot it again after a power cut"),
        ("down", "remove it; the image in .cache/images stays"),
        ("reboot", "systemctl reboot, and wait for it"),
        ("power-cut", "end it at once, as if its plug had been pulled"),
        ("ssh", "a root shell, or run a command"),
        ("packages", "print the Debian packages that this machine needs for it"),
    ):
        command = commands.add_parser(name, help=text)
        if name == "ssh":
            command.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND…")
    options = parser.parse_args(arguments)
    arm64 = Arm64Machine(say=lambda line: print(line, flush=True))
    if options.command == "packages":
        print(" ".join(required_packages()))
    elif options.command == "up":
        started = time.monotonic()
        arm64.up()
        print(f"up in {time.monotonic() - started:.0f} s; sudo python3 -m demo.arm64_machine ssh")
    elif options.command == "down":
        print("removed" if arm64.down() else "it was not up")
    elif options.command == "reboot":
        arm64.reboot()
    elif options.command == "power-cut":
        arm64.power_cut()
    else:
        command_line = [*arm64.ssh_command(), *options.argv]
        os.chdir(arm64.state_dir)
        os.execvp(command_line[0], command_line)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DemoError as error:
        sys.exit(f"error: {error}")
