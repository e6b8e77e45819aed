"""One host: its disk, its namespaces, and the loop that boots it again when it reboots.

`supervise` runs outside as a daemon, one per host. `boot` runs as PID 1 of the new namespaces,
lays out /proc, /sys, /dev and /run, and becomes systemd.

This separates hosts from each other well enough to test deploys on them. It is NOT a security
boundary: root in a host is root on the machine (same user namespace, same kernel).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from demo import syscalls
from demo.errors import DemoError
from demo.image import OPS_UID, OPSPW_UID
from demo.processes import ProcessRecord, daemonise, replace_text, run_tool

HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Each of these acts on the whole machine: modules, raw devices, the clock, the kernel's log, LSMs.
DROPPED_CAPABILITIES = (
    *("sys_module", "sys_rawio", "sys_time", "wake_alarm", "syslog"),
    *("mac_admin", "mac_override"),
)
# Files and folders of /proc through which a host could change the machine (as systemd-nspawn does).
READ_ONLY_PROC = ("sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "asound")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@dataclasses.dataclass(frozen=True)
class BootSpec:
    """What supervisor and PID 1 need to know. Paths, all absolute; written as JSON.

    `disk_dir` has upper/ and work/ (the host's own files, an overlay on `image`), and image/ and
    root/ to mount on.
    `cgroup` is the host's; `supervisor_cgroup` its supervisor's, beside it: a cgroup that hands
    controllers to its children may hold no process itself, and systemd wants the host's for that.
    """

    name: str
    image: str
    disk_dir: str
    network_namespace: str
    cgroup: str
    supervisor_cgroup: str
    run_dir: str
    console: str

    @classmethod
    def read(cls, path: Path) -> BootSpec:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(dataclasses.asdict(self), indent=1))

    @property
    def spec_path(self) -> Path:
        return Path(self.run_dir, f"{self.name}.json")

    @property
    def supervisor_record(self) -> Path:
        """ProcessRecord of the supervisor: alive while the host is on, also during a reboot."""
        return Path(self.run_dir, f"{self.name}.supervisor")

    @property
    def init_record(self) -> Path:
        """ProcessRecord of the host's PID 1, with its pid as the machine sees it."""
        return Path(self.run_dir, f"{self.name}.init")

    @property
    def boot_id(self) -> Path:
        return Path(self.run_dir, f"{self.name}.boot_id")

    @property
    def ended(self) -> Path:
        """One line on why the host is off: 'powered off', 'killed by SIGKILL', 'exit 1'."""
        return Path(self.run_dir, f"{self.name}.ended")


# --- the disk ----------------------------------------------------------------------------------


def make_disk(spec: BootSpec, client_public_key: str, opspw_password: str) -> None:
    """The host's identity: name, machine id, ssh host key, authorised keys, opspw's password.

    Nothing happens when the disk is there. It appears under its name only when it is whole.
    """
    disk = Path(spec.disk_dir)
    if disk.is_dir():
        return
    making = disk.with_name(f".{disk.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    for folder in ("image", "upper", "work", "root"):
        (making / folder).mkdir(parents=True)
    image, upper = Path(spec.image), making / "upper"
    # the overlay's top folder is the host's /, which every user of the host must get through
    upper.chmod(0o755)

    etc = _overlay_folder(image, upper, "etc")
    (etc / "hostname").write_text(f"{spec.name}\n")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {spec.name}\n::1 localhost\n")
    (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
    hashed = syscalls.hash_password(opspw_password, uuid.uuid4().hex[:12])
    shadow = re.sub(r"(?m)^opspw:[^:]*:", f"opspw:{hashed}:", (image / "etc/shadow").read_text())
    _write_like(image / "etc/shadow", etc / "shadow", shadow)
    ssh = _overlay_folder(image, upper, "etc/ssh")
    make_key(ssh / "ssh_host_ed25519_key", spec.name)
    for home, uid in (("root", 0), ("home/ops", OPS_UID), ("home/opspw", OPSPW_UID)):
        dot_ssh = _overlay_folder(image, upper, home) / ".ssh"
        dot_ssh.mkdir(mode=0o700)
        keys = dot_ssh / "authorized_keys"
        keys.write_text(client_public_key)
        keys.chmod(0o600)
        for path in (dot_ssh, keys):
            os.chown(path, uid, uid)
    making.rename(disk)


def make_key(path: Path, comment: str) -> None:
    """An ed25519 key without a passphrase at `path`, and `path`.pub."""
    run_tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)


def _overlay_folder(image: Path, upper: Path, folder: str) -> Path:
    """The folder in the upper layer. Overlayfs shows *its* owner and mode, so take the image's."""
    path = upper
    for part in Path(folder).parts:
        path = path / part
        if not path.exists():
            path.mkdir()
            original = (image / path.relative_to(upper)).stat()
            path.chmod(original.st_mode & 0o7777)
            os.chown(path, original.st_uid, original.st_gid)
    return path


def _write_like(original: Path, path: Path, text: str) -> None:
    status = original.stat()
    path.write_text(text)
    path.chmod(status.st_mode & 0o7777)
    os.chown(path, status.st_uid, status.st_gid)


def host_public_key(spec: BootSpec) -> str:
    """'ssh-ed25519 AAAA…' without the comment, as known_hosts wants it."""
    path = Path(spec.disk_dir, "upper/etc/ssh/ssh_host_ed25519_key.pub")
    return " ".join(path.read_text().split()[:2])


# --- cgroups -----------------------------------------------------------------------------------


def join_cgroup(cgroup: str | Path) -> None:
    """Moves the calling process; what it starts later is born there."""
    Path(cgroup, "cgroup.procs").write_text("0")


def remove_cgroup(cgroup: str | Path, wait_s: float = 10.0) -> None:
    """Kills all that is in it or below it, and removes it. Nothing happens when it is not there."""
    top = Path(cgroup)
    deadline = time.monotonic() + wait_s
    while top.is_dir():
        with contextlib.suppress(OSError):
            (top / "cgroup.kill").write_text("1")
        for folder, _, _ in os.walk(top, topdown=False):
            # busy while a killed process is still on its way out
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if top.is_dir():
            if time.monotonic() > deadline:
                pids = (top / "cgroup.procs").read_text().split()
                raise DemoError(
                    f"cannot remove the cgroup {top}",
                    want="no process in it after SIGKILL",
                    have=f"processes {' '.join(pids) or '(none; a child cgroup is busy)'}",
                    fix="see what holds them (state D in 'ps'), then run 'down' again",
                )
            time.sleep(0.02)


# --- the supervisor ----------------------------------------------------------------------------


def supervise(spec: BootSpec) -> None:
    """Boots the host, again and again while it ends by rebooting itself; returns when it is off."""
    join_cgroup(spec.supervisor_cgroup)
    daemonise(spec.supervisor_record)
    spec.ended.unlink(missing_ok=True)
    command = [
        *("nsenter", f"--net={spec.network_namespace}", "--"),
        # if the supervisor dies, the host must not live on unwatched
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--"),
        *(sys.executable, "-m", "demo.container", "boot", str(spec.spec_path)),
    ]
    while True:
        # What an earlier boot left: systemd's tree of cgroups.
        remove_cgroup(spec.cgroup)
        Path(spec.cgroup).mkdir()
        with open(spec.console, "ab") as console:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, check=False
            ).returncode
        spec.init_record.unlink(missing_ok=True)
        # reboot(2) in a PID namespace ends its init by SIGHUP for a restart, SIGINT for power-off
        if status != -signal.SIGHUP:
            break
    if status == -signal.SIGINT:
        why = "powered off"
    elif status < 0:
        why = f"killed by {signal.Signals(-status).name}"
    else:
        why = f"exit {status}"
    replace_text(spec.ended, f"{why}\n")


# --- PID 1 -------------------------------------------------------------------------------------


def boot(spec: BootSpec) -> None:
    """Lays the host out and becomes its systemd. Runs in new mount, UTS, IPC and PID namespaces."""
    # /proc is still the machine's, so this is the pid as the machine sees it
    record = ProcessRecord.of(int(os.readlink("/proc/self")))
    join_cgroup(spec.cgroup)
    # only now, so that the namespace's root is the host's cgroup
    syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    os.umask(0o022)
    root = Path(spec.disk_dir, "root")
    # Relative names: the options are split at ',' and ':', and a clone's path may have these.
    os.chdir(spec.disk_dir)
    _bind(Path(spec.image), Path("image"))
    layers = "lowerdir=image,upperdir=upper,workdir=work"
    syscalls.mount("overlay", root, "overlay", options=layers)
    _mount_proc(root / "proc", Path(spec.boot_id))
    _mount_sys(root / "sys")
    _mount_dev(root / "dev")
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmpfs", root / "run", "tmpfs", flags, "mode=755,size=64m")
    Path("/proc/sys/kernel/hostname").write_text(spec.name)

    run_dir = os.open(spec.run_dir, os.O_RDONLY | os.O_DIRECTORY)
    os.chdir(root)
    run_tool("pivot_root", ".", "mnt")
    os.chdir("/")
    syscalls.umount("/mnt", syscalls.MNT_DETACH)
    # as on a real machine: what is mounted later is seen inside services with their own mounts
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_SHARED)
    # Not a moment earlier: whoever enters the namespaces before pivot_root finds the machine's own
    # root there, and its 'systemctl reboot' would be the machine's.
    record.write(Path("/proc/self/fd", str(run_dir), spec.init_record.name))
    os.close(run_dir)
    bounding_set = ",".join(f"-{name}" for name in DROPPED_CAPABILITIES)
    os.execve(
        "/usr/bin/setpriv",
        ["setpriv", "--bounding-set", bounding_set, "--", "/sbin/init"],
        {"container": "edgellm-demo", "PATH": HOST_PATH, "TERM": "dumb"},
    )


def _bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    syscalls.mount(source, target, flags=syscalls.MS_BIND)
    if read_only:
        flags = syscalls.MS_BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY
        syscalls.mount("none", target, flags=flags)


def _mount_proc(proc: Path, boot_id: Path) -> None:
    nothing_special = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", proc, "proc", nothing_special)
    for name in READ_ONLY_PROC:
        if (proc / name).exists():
            _bind(proc / name, proc / name, read_only=True)
    # kernel.*, fs.* and the rest are the machine's: read-only
    _bind(proc / "sys", proc / "sys", read_only=True)
    replace_text(boot_id, f"{uuid.uuid4()}\n", mode=0o444)
    _bind(boot_id, proc / "sys/kernel/random/boot_id", read_only=True)
    # net.* belongs to the network namespace, which is the host's own: writable. The new bind
    # inherits read-only from the mount it is taken from, so say so again.
    _bind(proc / "sys/net", proc / "sys/net")
    syscalls.mount("none", proc / "sys/net", flags=syscalls.MS_BIND | syscalls.MS_REMOUNT)
    # vm.* is the machine's memory. The host gets plain files with the machine's values: a write
    # is seen by whoever reads it back, until the next boot, and has no effect.
    values = list(_vm_values(proc / "sys/vm"))
    syscalls.mount("tmpfs", proc / "sys/vm", "tmpfs", nothing_special, "size=1m,mode=555")
    for name, mode, text in values:
        path = proc / "sys/vm" / name
        path.write_text(text)
        path.chmod(mode)


def _vm_values(folder: Path) -> Iterator[tuple[str, int, str]]:
    for path in sorted(folder.iterdir()):
        text = ""
        # drop_caches and compact_memory only take writes; stat_refresh acts on being read
        if path.stat().st_mode & 0o400 and path.name != "stat_refresh":
            with contextlib.suppress(OSError):
                text = path.read_text()
        yield path.name, path.stat().st_mode & 0o777, text


def _mount_sys(sys_folder: Path) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("sysfs", sys_folder, "sysfs", flags | syscalls.MS_RDONLY)
    syscalls.mount("cgroup2", sys_folder / "fs/cgroup", "cgroup2", flags)


def _mount_dev(dev: Path) -> None:
    nothing_special = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("tmpfs", dev, "tmpfs", syscalls.MS_NOSUID, "mode=755,size=1m")
    for folder in ("pts", "shm", "mqueue"):
        (dev / folder).mkdir()
    terminals = "newinstance,ptmxmode=666,mode=620,gid=5"
    syscalls.mount("devpts", dev / "pts", "devpts", nothing_special, terminals)
    shared_memory = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmpfs", dev / "shm", "tmpfs", shared_memory, "mode=1777")
    syscalls.mount("mqueue", dev / "mqueue", "mqueue", nothing_special | syscalls.MS_NODEV)
    for name in DEVICES:
        (dev / name).touch()
        _bind(Path("/dev", name), dev / name)
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        (dev / name).symlink_to(target)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("supervise", "boot"):
        sys.exit("this is a part of demo/fleet.py; run: sudo python3 demo/fleet.py up")
    {"supervise": supervise, "boot": boot}[sys.argv[1]](BootSpec.read(Path(sys.argv[2])))
