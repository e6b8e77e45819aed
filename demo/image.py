"""The root file system that every host of every fleet shares: mmdebstrap, once per content key.

It is the machine's own distribution and suite, from the machine's own apt sources, so nothing
here names a mirror, and what can be installed on the machine can be put into the image.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from demo.errors import DemoError
from demo.processes import locked_directory, run_tool

PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "udev",
    "openssh-server",
    "openssh-sftp-server",
    "sudo",
    "python3",
    "util-linux",
    "kmod",
    "procps",
    "iproute2",
    "ca-certificates",
    "libgomp1",
    "libstdc++6",
    "numactl",
)
# Split out of util-linux in Debian 12 and Ubuntu 24.04; Ubuntu 22.04 does not have it.
PACKAGES_IF_THE_SUITE_HAS_THEM = ("util-linux-extra",)
# The .debs of the image's own apt source: what a test removes and wants to see come back.
# Dependencies outside this list (libc6, gcc-*-base) are installed and never removed.
OFFLINE_PACKAGES = ("numactl", "libnuma1", "libgomp1", "libstdc++6")
# A build that lacks one of these is not an image, however happy the tools were.
COMMANDS = (
    *("systemctl", "sshd", "sudo", "python3", "chrt", "taskset", "setpriv", "modprobe"),
    *("sysctl", "ip", "udevadm", "numactl", "apt-get"),
)

# Units that can only fail or disturb in a host that shares its kernel with the machine.
MASKED_UNITS = (
    # the kernel's own file systems belong to the machine
    *("sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount"),
    *("dev-hugepages.mount", "sys-fs-fuse-connections.mount", "proc-sys-fs-binfmt_misc.automount"),
    # devices, clock and modules too
    *("systemd-udevd.service", "systemd-timesyncd.service", "systemd-modules-load.service"),
    # no consoles
    *("getty.target", "console-getty.service"),
    # no way out: the network is set from outside, there is no name server
    *("systemd-networkd.service", "systemd-networkd.socket", "systemd-resolved.service"),
    # background jobs that would take the apt lock or the disk in the middle of a test
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "motd-news.timer"),
    *("e2scrub_all.timer", "fstrim.timer"),
    # one way to reach sshd: the service (Ubuntu would start it by socket)
    "ssh.socket",
)

SSHD_CONFIG = """\
# The demo fleet's sshd: keys only; many sessions at once, because deploys open many.
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
HostKey /etc/ssh/ssh_host_ed25519_key
UseDNS no
GSSAPIAuthentication no
PrintMotd no
MaxSessions 200
MaxStartups 200:30:400
LoginGraceTime 30
"""

OPS_UID, OPSPW_UID = 1000, 1001
# Change when a change of the build is not visible in the constants above.
RECIPE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Suite:
    """The machine's distribution: 'debian', 'bookworm', 'amd64'."""

    distribution: str
    codename: str
    architecture: str


def machine_suite() -> Suite:
    """Reads /etc/os-release and dpkg. Raises DemoError on anything but Debian and Ubuntu."""
    release: dict[str, str] = {}
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        release[name] = value.strip("\"'")
    distribution, codename = release.get("ID", ""), release.get("VERSION_CODENAME", "")
    if distribution not in ("debian", "ubuntu") or not codename:
        raise DemoError(
            "demo image",
            want="a Debian or Ubuntu machine (/etc/os-release)",
            have=f"ID={distribution or '(none)'} VERSION_CODENAME={codename or '(none)'}",
            fix="run the demo fleet on Debian 12/13 or Ubuntu 22.04/24.04",
        )
    return Suite(distribution, codename, run_tool("dpkg", "--print-architecture").strip())


# --- the machine's apt sources ---------------------------------------------------------------


def own_sources(files: Mapping[str, str], suite: Suite) -> str:
    """{file name: text} of /etc/apt's source files -> the distribution's own entries.

    The result is one text of deb822 stanzas (sources.list(5)), binary packages only. An entry is
    the distribution's own when its suite is the codename itself, its -updates or its -security,
    it has the component 'main', and it is signed by the distribution's keyring or by an unnamed
    one. So third-party sources never reach the image. Empty when there is none.
    """
    stanzas: list[dict[str, str]] = []
    for name in sorted(files):
        parse = _parse_deb822 if name.endswith(".sources") else _parse_one_line
        stanzas.extend(parse(files[name]))
    wanted_suites = {suite.codename, f"{suite.codename}-updates", f"{suite.codename}-security"}
    kept: list[str] = []
    for stanza in stanzas:
        signed_by = stanza.get("Signed-By", "")
        suites = [one for one in stanza.get("Suites", "").split() if one in wanted_suites]
        if (
            "deb" in stanza.get("Types", "").split()
            and stanza.get("Enabled", "yes").lower() not in ("no", "false", "0")
            and "main" in stanza.get("Components", "").split()
            and (not signed_by or f"{suite.distribution}-archive-" in signed_by)
            and suites
        ):
            own = {**stanza, "Types": "deb", "Suites": " ".join(suites)}
            kept.append("".join(f"{field}: {value}\n" for field, value in own.items()))
    return "\n".join(kept)


def _parse_deb822(text: str) -> Iterable[dict[str, str]]:
    uncommented = re.sub(r"(?m)^#.*\n?", "", text)
    for paragraph in re.split(r"\n\s*\n", uncommented):
        stanza: dict[str, str] = {}
        field = ""
        for line in paragraph.splitlines():
            if line[:1] in (" ", "\t") and field:
                stanza[field] += "\n" + line
            elif ":" in line:
                field, _, value = line.partition(":")
                field = field.strip().title()
                field = {"Uris": "URIs"}.get(field, field)
                stanza[field] = value.strip()
        if stanza:
            yield stanza


def _parse_one_line(text: str) -> Iterable[dict[str, str]]:
    # deb [signed-by=/usr/share/keyrings/x.gpg arch=amd64] URI suite component…
    pattern = re.compile(r"^\s*deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<rest>[^#\n]+)", re.M)
    fields = {"signed-by": "Signed-By", "arch": "Architectures", "trusted": "Trusted"}
    for match in pattern.finditer(text):
        uri, suite, *components = match["rest"].split()
        stanza = {
            "Types": "deb",
            "URIs": uri,
            "Suites": suite,
            "Components": " ".join(components),
        }
        for option in (match["options"] or "").split():
            name, _, value = option.partition("=")
            if name.lower() in fields:
                stanza[fields[name.lower()]] = value.replace(",", " ")
        yield stanza


def machine_sources(suite: Suite) -> str:
    folder = Path("/etc/apt")
    paths = [folder / "sources.list", *folder.glob("sources.list.d/*")]
    files = {
        str(path): path.read_text()
        for path in paths
        if path.is_file() and path.suffix in (".list", ".sources")
    }
    sources = own_sources(files, suite)
    if not sources:
        raise DemoError(
            "demo image",
            want=f"an apt source of {suite.distribution} {suite.codename} with component main",
            have="none in " + (", ".join(sorted(files)) or "/etc/apt"),
            fix="enable the distribution's own source in /etc/apt/sources.list.d",
        )
    return sources


def _machine_apt_options() -> list[str]:
    """How this machine's apt reaches its sources (proxies, checks): 'Acquire::http::Proxy "…"'."""
    names = r"(https?::[^ ]+|Check-Valid-Until|Check-Date|Retries)"
    wanted = re.compile(rf'^Acquire::{names} "[^"]+";$')
    return [line for line in run_tool("apt-config", "dump").splitlines() if wanted.match(line)]


def _suite_has(package: str) -> bool:
    return bool(run_tool("apt-cache", "madison", package).strip())


# --- building ---------------------------------------------------------------------------------


def ensure_image(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Returns the image's folder under `cache_dir`/<key>, building it first when it is not there.

    `say` gets progress lines. A build happens under another name and is renamed when whole, so an
    interrupted one never counts. About 100 s and 300 MB. Raises DemoError.
    """
    suite = machine_suite()
    packages = [*PACKAGES, *filter(_suite_has, PACKAGES_IF_THE_SUITE_HAS_THEM)]
    recipe = repr(
        (RECIPE_VERSION, suite, packages, OFFLINE_PACKAGES, COMMANDS, MASKED_UNITS, SSHD_CONFIG)
    )
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    key = f"{suite.codename}-{suite.architecture}-{digest}"
    image = cache_dir / key
    if image.is_dir():
        return image
    cache_dir.mkdir(parents=True, exist_ok=True)
    # It holds set-uid programs of another root file system: nobody but root has business there.
    cache_dir.chmod(0o700)
    with locked_directory(cache_dir):
        if image.is_dir():
            return image
        for leftover in cache_dir.glob(".building-*"):
            remove_tree(leftover)
        build = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
        try:
            say(f"building the hosts' image {key}, once: about 100 s")
            started = time.monotonic()
            _run_mmdebstrap(build, suite, packages, say)
            _finish(build / "root", suite)
            (build / "root").rename(image)
            say(f"image built in {time.monotonic() - started:.0f} s: {image}")
        finally:
            remove_tree(build)
    return image


def _run_mmdebstrap(
    build: Path, suite: Suite, packages: Sequence[str], say: Callable[[str], None]
) -> None:
    sources = build / "machine.sources"
    sources.write_text(machine_sources(suite))
    root, log = build / "root", build / "log"
    # In a hook, because that is where mmdebstrap's apt configuration (sources, keys, suite) exists.
    download = (
        'mkdir -p "$1/srv/apt" && cd "$1/srv/apt" && '
        'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get -o APT::Sandbox::User=root download '
        + shlex.join(OFFLINE_PACKAGES)
    )
    excluded = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
    command = [
        # If this process dies, so does the build with everything that it started and mounted.
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
        *("mmdebstrap", "--verbose", "--variant=minbase", "--mode=root"),
        *(f"--aptopt={option}" for option in _machine_apt_options()),
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in excluded),
        "--dpkgopt=force-unsafe-io",
        f"--include={','.join(packages)}",
        f"--customize-hook={download}",
        *(suite.codename, str(root), str(sources)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "LC_ALL": "C.UTF-8",
                "TMPDIR": str(build),  # what it leaves when it is killed goes with the build
            },
            # Ctrl-C must reach this process alone, which then ends the whole build at once.
            start_new_session=True,
        )
        try:
            _watch(process, log, say)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise DemoError(
            "demo image",
            want=f"mmdebstrap to build {suite.distribution} {suite.codename}",
            have=f"exit {process.returncode}, and it said:\n{tail}\n",
            fix="run 'apt-get update' on this machine; if that works, run this again",
        )


def _watch(process: subprocess.Popen[bytes], log: Path, say: Callable[[str], None]) -> None:
    started = time.monotonic()
    next_line_s = 10.0
    while process.poll() is None:
        time.sleep(0.2)
        elapsed_s = time.monotonic() - started
        if elapsed_s >= next_line_s:
            next_line_s += 10.0
            text = log.read_text(errors="replace")
            step = ([line for line in text.splitlines() if line.startswith("I: ")] or ["I: …"])[-1]
            unpacked = text.count("\nUnpacking ")
            say(f"  {elapsed_s:3.0f} s: {unpacked} packages unpacked; {step[3:]}")


def _finish(root: Path, suite: Suite) -> None:
    """Turns the plain bootstrap into an edge host without an identity of its own."""
    missing = [name for name in COMMANDS if not has_command(root, name)]
    if missing:
        raise DemoError(
            "demo image",
            want=f"the commands {', '.join(missing)} in the image",
            have=f"none of them in {suite.distribution} {suite.codename}'s packages",
            fix="run 'apt-get update' on this machine and run this again",
        )
    etc = root / "etc"
    _write_offline_repository(root)
    for path in [*etc.glob("apt/sources.list.d/*"), *etc.glob("apt/apt.conf.d/*mmdebstrap*")]:
        path.unlink()
    (etc / "apt/sources.list").write_text("deb [trusted=yes] file:/srv/apt ./\n")
    (etc / "apt/apt.conf.d/90edgellm-demo").write_text('Acquire::Languages "none";\n')
    shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
    (root / "var/lib/apt/lists/partial").mkdir(parents=True)

    for unit in MASKED_UNITS:
        link = etc / "systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    _chroot(root, "systemctl", "--quiet", "enable", "ssh.service")
    for host_key in etc.glob("ssh/ssh_host_*"):
        host_key.unlink()
    config = SSHD_CONFIG
    # OpenSSH 9.8 punishes an address for failed logins, and all ours come from one address.
    # Older ones refuse to start with an option they do not know.
    if "persourcepenalties" in (root / "usr/sbin/sshd").read_bytes().lower().decode("latin-1"):
        config += "PerSourcePenalties no\n"
    (etc / "ssh/sshd_config.d").mkdir(exist_ok=True)
    (etc / "ssh/sshd_config.d/10-edgellm-demo.conf").write_text(config)

    for user, uid in (("ops", OPS_UID), ("opspw", OPSPW_UID)):
        _chroot(root, "useradd", "-m", "-U", "-u", str(uid), "-s", "/bin/bash", user)
    sudoers = etc / "sudoers.d/90-edgellm-demo"
    sudoers.write_text("ops ALL=(ALL:ALL) NOPASSWD: ALL\nopspw ALL=(ALL:ALL) ALL\n")
    sudoers.chmod(0o440)
    (etc / "machine-id").write_text("")
    # No name server: lookups fail at once instead of waiting for one.
    for path, text in ((etc / "resolv.conf", ""), (etc / "hostname", "edge\n")):
        path.unlink(missing_ok=True)
        path.write_text(text)


def has_command(root: Path, name: str) -> bool:
    # lexists: an absolute symlink points into the image, not into this machine
    folders = ("usr/bin", "usr/sbin", "bin", "sbin")
    return any(os.path.lexists(root / folder / name) for folder in folders)


def _chroot(root: Path, *command: str) -> None:
    run_tool("chroot", root, *command)


def _write_offline_repository(root: Path) -> None:
    """A flat apt repository at /srv/apt (Packages and Release; apt's own tools are not needed)."""
    folder = root / "srv/apt"
    entries: list[str] = []
    for deb in sorted(folder.glob("*.deb")):
        # An epoch's colon comes as %3a in the file name, which apt would decode again.
        deb = deb.rename(deb.with_name(deb.name.replace("%3a", ".")))
        control = run_tool("dpkg-deb", "--field", deb).strip()
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        size_bytes = deb.stat().st_size
        entries.append(f"{control}\nFilename: ./{deb.name}\nSize: {size_bytes}\nSHA256: {digest}\n")
    packages = "\n".join(entries).encode()
    (folder / "Packages").write_bytes(packages)
    (folder / "Release").write_text(
        f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S UTC', time.gmtime())}\n"
        f"SHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages\n"
    )
    for path in (folder, *folder.iterdir()):
        # apt reads them as its user _apt
        path.chmod(0o755 if path.is_dir() else 0o644)


def remove_tree(path: Path) -> None:
    """rm -r, but never through a mount: raises DemoError when something is mounted under `path`."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [mount for mount in mounts if f"{mount}/".startswith(f"{path}/")]
    if inside:
        raise DemoError(
            f"cannot remove {path}",
            want="nothing mounted under it",
            have=", ".join(inside),
            fix=f"umount {inside[-1]}, then run this again",
        )
    if path.exists():
        shutil.rmtree(path)


if __name__ == "__main__":
    sys.exit("this is a part of demo/fleet.py; run: sudo python3 demo/fleet.py up")
