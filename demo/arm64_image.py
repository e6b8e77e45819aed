"""Disk, kernel and initrd of the arm64 machine: made on any Debian machine, running no arm64 code.

What an arm64 package's maintainer scripts would have done (users, alternatives, enabled units,
owners, modes) has been done already in the demo hosts' image, which is the same suite in the
machine's own architecture. So: that tree, with each program of it replaced by the arm64 package's.
All packages come from the machine's own apt sources; nothing here names a mirror.
"""

from __future__ import annotations

import dataclasses
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from demo import container, image
from demo.errors import DemoError
from demo.processes import locked_directory

ARCHITECTURE = "arm64"
TRIPLET = "aarch64-linux-gnu"
EM_AARCH64 = 183  # elf.h
KERNEL_META_PACKAGE = "linux-image-arm64"
BUSYBOX_PACKAGE = "busybox-static"
DISK_SIZE = "2G"  # sparse
DISK_INODES = 65536  # few, so that mke2fs writes their tables at once and the guest need not

# The kernel package has 290 MB of modules: these and what they need are 3 MB.
INITRD_MODULES = ("virtio_pci", "virtio_blk", "ext4")
MODULES = (
    *INITRD_MODULES,
    *("virtio_net", "virtio_rng"),
    *("zram", "lz4", "zstd"),  # lzo-rle, zram's default, is built in
    *("autofs4", "configfs"),  # systemd asks for these at boot
)

INIT = """\
#!/bin/busybox sh
# Finds the root disk and hands over to its systemd.
for module in /modules/*; do busybox insmod "$module"; done
busybox mount -t devtmpfs devtmpfs /dev
until [ -b /dev/vda ]; do busybox usleep 50000; done
busybox mount -t ext4 -o rw,noatime /dev/vda /root
busybox mount --move /dev /root/dev
exec busybox switch_root /root /sbin/init
"""
# qemu's user-mode network (its manual, "Using the user mode network stack") always looks like this.
NETWORK = """\
[Match]
Name=e*

[Network]
Address=10.0.2.15/24
LinkLocalAddressing=no
"""
# Masked in the demo's hosts, which have no devices and no network of their own. The others stay so.
UNMASKED = (
    *("systemd-udevd.service", "systemd-modules-load.service"),
    *("systemd-networkd.service", "systemd-networkd.socket"),
)
ALSO_MASKED = (
    *("systemd-networkd-wait-online.service", "e2scrub_reap.service"),
    "systemd-binfmt.service",
)
HOST_NAME = "edge-arm64"
# Change when a change of the build is not visible in the constants above.
RECIPE_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Arm64Image:
    """What a machine boots from. Never written to after the build."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd"

    @property
    def disk(self) -> Path:
        """An ext4 file system in a raw file."""
        return self.folder / "disk.ext4"

    @property
    def private_key(self) -> Path:
        """root's, for ssh."""
        return self.folder / "id_ed25519"

    @property
    def host_key(self) -> str:
        """'ssh-ed25519 AAAA…', as a line of known_hosts has it after the host's name."""
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        return f"{kind} {key}"


def ensure_arm64_image(cache_dir: Path, say: Callable[[str], None]) -> Arm64Image:
    """The image under `cache_dir`/<key>, built first when it is not there. Raises DemoError.

    About 60 s, 110 MB from the package mirror and 500 MB of disk, beside the demo hosts' image.
    An interrupted build never counts: it is made under another name and renamed when whole.
    """
    suite = image.machine_suite()
    if suite.distribution != "debian":
        raise DemoError(
            "arm64 image",
            want="Debian: its mirrors carry every architecture",
            have=suite.distribution,
            fix="run this on Debian 12 or 13",
        )
    native = image.ensure_image(cache_dir, say)
    what = (RECIPE_VERSION, native.name, KERNEL_META_PACKAGE, INITRD_MODULES, MODULES, INIT)
    where = (DISK_SIZE, DISK_INODES, NETWORK, UNMASKED, ALSO_MASKED, HOST_NAME)
    recipe = repr((what, where))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    found = Arm64Image(cache_dir / f"{suite.codename}-{ARCHITECTURE}-machine-{digest}")
    if found.folder.is_dir():
        return found
    with locked_directory(cache_dir):
        if found.folder.is_dir():
            return found
        build = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
        try:
            say(f"building the arm64 machine's image {found.folder.name}, once: about 60 s")
            started = time.monotonic()
            _build(build, suite, native, say)
            (build / "image").rename(found.folder)
            say(f"image built in {time.monotonic() - started:.0f} s: {found.folder}")
        finally:
            image.remove_tree(build)
    return found


def _build(build: Path, suite: image.Suite, native: Path, say: Callable[[str], None]) -> None:
    made = Arm64Image(build / "image")
    made.folder.mkdir(mode=0o700)
    packages = Packages(build / "packages", suite, native)
    say("  packages")
    kernel_deb, busybox_deb, debs = packages.download()
    say(f"  root file system from {len(debs)} packages")
    root = build / "root"
    _make_root(root, native, suite, debs)
    say("  kernel, initrd and disk")
    kernel_tree = build / "kernel"
    _unpack(kernel_deb, kernel_tree)
    modules = KernelModules(kernel_tree)
    modules.install(root, MODULES)
    shutil.copy(kernel_tree / f"boot/vmlinuz-{modules.version}", made.kernel)
    _unpack(busybox_deb, build / "busybox")
    _make_initrd(build / "initrd", build / "busybox/bin/busybox", modules, made.initrd)
    _give_identity(root, made)
    _tool(
        *("mke2fs", "-q", "-t", "ext4", "-N", str(DISK_INODES), "-d", root),
        *("-E", "lazy_itable_init=0,lazy_journal_init=0", made.disk, DISK_SIZE),
    )


# --- packages -------------------------------------------------------------------------------------


class Packages:
    """The arm64 packages that correspond to those of `native`, by apt in a folder of its own."""

    def __init__(self, folder: Path, suite: image.Suite, native: Path) -> None:
        self._folder = folder
        self._native = native
        for name in ("lists/partial", "cache/archives/partial", "sources", "debs"):
            (folder / name).mkdir(parents=True)
        # A source may be limited to the machine's own architecture
        sources = re.sub(r"(?m)^Architectures:.*\n", "", image.machine_sources(suite))
        (folder / "sources/machine.sources").write_text(sources)
        settings = {
            "APT::Architecture": ARCHITECTURE,
            "APT::Architectures": ARCHITECTURE,
            "APT::Sandbox::User": "root",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": "/dev/null",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": folder / "sources",
        }
        self._options = [f"--option={name}={value}" for name, value in settings.items()]

    def download(self) -> tuple[Path, Path, list[Path]]:
        """(kernel, busybox, those of the root file system)"""
        _tool("apt-get", "-qq", *self._options, "update")
        kernel = self._kernel_package()
        admindir = f"--admindir={self._native}/var/lib/dpkg"
        names = set(_tool("dpkg-query", admindir, "-W", "-f=${Package}\n").split())
        shared = sorted(names & set(_tool("apt-cache", *self._options, "pkgnames").split()))
        folder = self._folder / "debs"
        wanted = [kernel, BUSYBOX_PACKAGE, *shared]
        _tool("apt-get", "-qq", *self._options, "download", *wanted, cwd=folder)
        by_name = {path.name.partition("_")[0]: path for path in sorted(folder.glob("*.deb"))}
        missing = [name for name in wanted if name not in by_name]
        if missing:
            raise _failed(f"the packages {', '.join(missing)}", "apt did not bring them")
        return by_name[kernel], by_name[BUSYBOX_PACKAGE], [by_name[name] for name in shared]

    def _kernel_package(self) -> str:
        """'linux-image-6.1.0-57-arm64': what the meta package stands for now."""
        show = ("apt-cache", *self._options, "show", "--no-all-versions", KERNEL_META_PACKAGE)
        found = re.search(r"(?m)^Depends: (linux-image-\S+)", _tool(*show))
        if found is None:
            raise _failed(f"{KERNEL_META_PACKAGE} to depend on a kernel", "it does not")
        return found[1]


def _unpack(deb: Path, into: Path, exclude: Iterable[str] = ()) -> None:
    into.mkdir(exist_ok=True)
    excluded = [f"--exclude={pattern}" for pattern in exclude]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as reader:
        writer = subprocess.run(
            ["tar", "-x", "-C", into, "--keep-directory-symlink", *excluded],
            stdin=reader.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if reader.returncode != 0 or writer.returncode != 0:
        raise _failed(f"{deb.name} to unpack", writer.stderr.strip() or "dpkg-deb failed")


# --- the root file system -------------------------------------------------------------------------

# The native tree's are kept: they have been configured.
CONFIGURED = ("./etc", "./var")
LEFT_OUT = tuple(f"./usr/share/{name}/*" for name in ("man", "doc", "locale", "info"))


def _make_root(root: Path, native: Path, suite: image.Suite, debs: Sequence[Path]) -> None:
    _tool("cp", "-a", "--reflink=auto", native, root)
    native_triplet = _triplet(native)
    if native_triplet != TRIPLET:
        for folder in root.glob(f"usr/*/{native_triplet}"):
            shutil.rmtree(folder)
    for deb in debs:
        _unpack(deb, root, (*CONFIGURED, *LEFT_OUT))
    _restore_owners_and_modes(root, native)
    _remove_foreign_programs(root)
    missing = [name for name in image.COMMANDS if not image.has_command(root, name)]
    if missing:
        raise _failed(f"the commands {', '.join(missing)} for arm64", "no package has them")
    _rewrite_package_database(root / "var/lib/dpkg", suite.architecture, native_triplet)

    etc = root / "etc"
    (etc / "ld.so.cache").unlink(missing_ok=True)  # the loader knows its own folders without
    (etc / f"ld.so.conf.d/{native_triplet}.conf").unlink(missing_ok=True)
    shutil.rmtree(root / "srv/apt")
    (etc / "apt/sources.list").write_text("")
    (etc / "hostname").write_text(f"{HOST_NAME}\n")
    (etc / "fstab").write_text("/dev/vda / ext4 defaults,noatime 0 0\n")
    units = etc / "systemd/system"
    for unit in UNMASKED:
        (units / unit).unlink()
    for unit in ALSO_MASKED:
        (units / unit).symlink_to("/dev/null")
    (etc / "systemd/network").mkdir(exist_ok=True)
    (etc / "systemd/network/10-qemu.network").write_text(NETWORK)
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "systemd-networkd.service").symlink_to("/lib/systemd/system/systemd-networkd.service")


def _triplet(root: Path) -> str:
    """'x86_64-linux-gnu': where the root file system has its libraries."""
    for library in root.glob("usr/lib/*/libc.so.6"):
        return library.parent.name
    raise _failed("libc.so.6 in the demo hosts' image", f"none under {root}/usr/lib")


def _walk(root: Path) -> Iterator[Path]:
    """All files and folders, symlinks unfollowed."""
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in (*folders, *files))


def _restore_owners_and_modes(root: Path, native: Path) -> None:
    """Unpacking took back what maintainer scripts had set: dpkg-statoverride, groups, set-gid."""
    for source in _walk(native):
        target = root / source.relative_to(native)
        if not os.path.lexists(target):
            continue
        want, have = source.lstat(), target.lstat()
        if (want.st_uid, want.st_gid) != (have.st_uid, have.st_gid):
            os.chown(target, want.st_uid, want.st_gid, follow_symlinks=False)
        if not target.is_symlink() and not source.is_symlink():
            target.chmod(stat.S_IMODE(want.st_mode))  # after chown, which clears set-uid


def _remove_foreign_programs(root: Path) -> None:
    """What no arm64 package has replaced: the native loader, extension modules of Python."""
    for path in _walk(root):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            head = file.read(20)
        if head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") != EM_AARCH64:
            path.unlink()


def _rewrite_package_database(dpkg: Path, architecture: str, triplet: str) -> None:
    """dpkg-query in the machine tells of arm64 packages. Files: dpkg(1)."""
    if architecture == ARCHITECTURE:
        return
    status = dpkg / "status"
    old = f"\nArchitecture: {architecture}\n"
    status.write_text(status.read_text().replace(old, f"\nArchitecture: {ARCHITECTURE}\n"))
    for path in (dpkg / "info").iterdir():
        if path.suffix == ".list":
            path.write_text(path.read_text().replace(triplet, TRIPLET))
        path.rename(path.with_name(path.name.replace(f":{architecture}.", f":{ARCHITECTURE}.")))


def _give_identity(root: Path, made: Arm64Image) -> None:
    """Keys that are made here and lie in the image: its folder is root's alone, its port local."""
    container.make_key(made.private_key, "edgellm arm64 machine")
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    container.make_key(host_key, HOST_NAME)
    shutil.copy(host_key.with_suffix(".pub"), made.folder / "host_key.pub")
    ssh = root / "root/.ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(made.private_key.with_suffix(".pub"), ssh / "authorized_keys")


# --- kernel and initrd ----------------------------------------------------------------------------


class KernelModules:
    """The modules of an unpacked kernel package, found by what they need (modprobe(8))."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        (folder,) = (tree / "lib/modules").iterdir()
        self.version = folder.name
        _tool("depmod", "-b", tree, self.version)

    def files(self, names: Iterable[str]) -> list[Path]:
        """In the order of loading, each after those that it needs; () for what is built in."""
        show = ("modprobe", "-d", self._tree, "-S", self.version, "--show-depends")
        lines = [line for name in names for line in _tool(*show, name).splitlines()]
        paths = [Path(line.split()[1]) for line in lines if line.startswith("insmod ")]
        return list(dict.fromkeys(paths))

    def install(self, root: Path, names: Iterable[str]) -> None:
        """These and what they need, with the lists of what is built in."""
        folder = Path("lib/modules") / self.version
        (root / folder).mkdir(parents=True)
        for listing in (self._tree / folder).glob("modules.builtin*"):
            if not listing.name.endswith(".bin"):
                shutil.copy(listing, root / folder)
        shutil.copy(self._tree / folder / "modules.order", root / folder)
        for path in self.files(names):
            target = root / path.relative_to(self._tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        _tool("depmod", "-b", root, self.version)


def _make_initrd(tree: Path, busybox: Path, modules: KernelModules, target: Path) -> None:
    for name in ("bin", "dev", "root", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox, tree / "bin/busybox")
    for number, path in enumerate(modules.files(INITRD_MODULES)):
        content = path.read_bytes()
        if path.suffix == ".xz":  # Debian 13; busybox loads plain ones only
            content = lzma.decompress(content)
        (tree / f"modules/{number:02}-{path.name.removesuffix('.xz')}").write_bytes(content)
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    names = "".join(f"{path.relative_to(tree)}\n" for path in sorted(_walk(tree)))
    archive = ("cpio", "--quiet", "--create", "--format=newc", f"--file={target}")
    _tool(*archive, cwd=tree, stdin=names)


# --- tools ----------------------------------------------------------------------------------------


def _tool(*command: str | Path, cwd: Path | None = None, stdin: str = "") -> str:
    """What it printed. Raises DemoError with its complaint."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise _failed(f"'{' '.join(words[:6])}…' to work", f"exit {done.returncode}: {said}")
    return done.stdout


def _failed(want: str, have: str) -> DemoError:
    fix = "run 'apt-get update' on this machine; if that works, run this again"
    return DemoError("arm64 image", want=want, have=have, fix=fix)
