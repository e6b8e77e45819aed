"""Linux calls missing from Python 3.10's `os`: mount, umount2, unshare, setns, and crypt(3).

Each raises OSError with the kernel's errno and the path or namespace that it was about.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# <sys/mount.h>
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SHARED = 1 << 20
MNT_DETACH = 0x2
# <linux/sched.h>
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, about: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), about)


def mount(
    source: str | Path, target: str | Path, fstype: str = "", flags: int = 0, options: str = ""
) -> None:
    """mount(2). `options` is the data string of the file system, as in 'size=64m,mode=755'."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        fstype.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, str(target))


def umount(target: str | Path, flags: int = 0) -> None:
    """umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), flags), str(target))


def unshare(flags: int) -> None:
    """unshare(2) for the calling thread (the calling process, when it has one thread)."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def enter_network_namespace(path: str | Path) -> None:
    """setns(2): moves the calling *thread*, and no other, into the network namespace at `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, CLONE_NEWNET), str(path))
    finally:
        os.close(descriptor)


def hash_password(password: str, salt: str) -> str:
    """'secret', 'abc' -> '$6$abc$…' as in /etc/shadow (crypt(3), SHA-512).

    Python's own crypt module is gone since 3.13; libcrypt1 is on every Debian and Ubuntu.
    """
    crypt = ctypes.CDLL("libcrypt.so.1", use_errno=True).crypt
    crypt.restype = ctypes.c_char_p
    hashed: bytes | None = crypt(password.encode(), f"$6${salt}$".encode())
    if hashed is None or hashed.startswith(b"*"):
        raise OSError(ctypes.get_errno(), "crypt(3) refused the salt", salt)
    return hashed.decode()
