"""`python3 -m edgellm_server.selfcheck`: does this runtime run on this host? One JSON line.

{"ok": true, "xllamacpp": "...", "python": "3.11.2", "machine": "x86_64", "system_info": "..."}
{"ok": false, "error": "ImportError: libgomp.so.1: cannot open shared object file: ..."}   exit 1

Run once before a release goes live: what the wheel cannot do here dies here (a SIGILL ends this
process without a line, which is an answer too).
"""

from __future__ import annotations

import json
import platform
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final

# What the x86-64 wheel of xllamacpp is compiled for, without a fallback.
REQUIRED_X86_FLAGS: Final = frozenset({"avx2", "fma", "f16c", "bmi2"})


def missing_cpu_flags(machine: str, cpuinfo: str) -> tuple[str, ...]:
    """Flags the wheel needs and /proc/cpuinfo does not list. () off x86-64 or when unlisted."""
    if machine not in ("x86_64", "AMD64"):
        return ()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return tuple(sorted(REQUIRED_X86_FLAGS - set(value.split())))
    return ()


def check() -> dict[str, Any]:
    machine = platform.machine()
    about = {"python": platform.python_version(), "machine": machine}
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    if missing := missing_cpu_flags(machine, cpuinfo):
        # Asked before the import, which may end in SIGILL and then say nothing.
        return {"ok": False, "error": f"the CPU lacks {', '.join(missing)}", **about}
    try:
        xllamacpp = import_module("xllamacpp")
        # What is imported late, too: it would otherwise be missed first by a client.
        for name in (
            "edgellm_server.__main__",
            "edgellm_server.app",
            "edgellm_server.forward",
            "edgellm_server.websocket_protocol",
            "httpx",
            "prometheus_client",
        ):
            import_module(name)
        return {
            "ok": True,
            "xllamacpp": metadata.version("xllamacpp"),
            **about,
            "system_info": str(xllamacpp.get_system_info()).strip(),
        }
    except Exception as error:
        # ImportError names the library that is missing: libgomp.so.1, libstdc++.so.6.
        return {"ok": False, "error": f"{type(error).__name__}: {error}", **about}


def main() -> int:
    result = check()
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
