"""What `make demo` shows: a roll-out, the same again without a change, and how to go on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = ("pyinfra", "-y", "inventories/demo.py", "deploys/qwen.py")


def main() -> int:
    """0 when both roll-outs succeed and the second changes nothing."""
    fleet = json.loads((REPOSITORY / ".demo" / "demo" / "fleet.json").read_text())
    if roll_out("First: roll out") != 0:
        return 1
    if roll_out("Again: nothing may change") != 0:
        return 1
    report = json.loads((REPOSITORY / "reports" / "latest" / "fleet.json").read_text())
    changed = {host["name"]: host["changed"] for host in report["hosts"] if host["changed"]}
    if changed:
        print(f"demo: the second run should change nothing, but changed {changed}", file=sys.stderr)
        return 1
    show_how_to_go_on(fleet, report)
    return 0


def roll_out(title: str) -> int:
    """Runs pyinfra as a person would. Returns its exit code."""
    print(f"\n### {title}\n$ {' '.join(COMMAND)}", flush=True)
    started_at = time.monotonic()
    program = str(Path(sys.executable).parent / COMMAND[0])
    code = subprocess.run([program, *COMMAND[1:]], cwd=REPOSITORY, check=False).returncode
    print(f"(exit code {code}, {time.monotonic() - started_at:.0f} s)", flush=True)
    return code


def show_how_to_go_on(fleet: dict[str, Any], report: dict[str, Any]) -> None:
    """The lines a person copies next."""
    request = {
        "model": report["model"]["name"],
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 48,
    }
    print(
        "\nThe second run changed nothing on any host, and the fleet stays up.\n\nChat with a host:"
    )
    for host in fleet["hosts"]:
        address = f"http://127.0.0.1:{host['http_port']}/v1/chat/completions"
        print(f"  # {host['name']}")
        print(
            f"  curl -sN {address} -H 'content-type: application/json' "
            f"-d {shlex.quote(json.dumps(request | {'stream': True}))}"
        )
    print("Report:    reports/latest/fleet.json")
    print("End it:    make demo-down")


if __name__ == "__main__":
    sys.exit(main())
