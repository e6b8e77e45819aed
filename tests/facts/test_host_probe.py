"""The host probe run for real on this machine, where its own shell decides."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edgellm.facts.host_profile import probe_command


def swappiness_section(root: Path) -> list[str]:
    """What the probe finds in the sysctl.d directories under `root`."""
    text = probe_command()
    for directory in ("/etc", "/run", "/usr/local/lib", "/usr/lib"):
        assert f" {directory}/sysctl.d/*.conf" in text
        text = text.replace(f" {directory}/sysctl.d/*.conf", f" {root}{directory}/*.conf")
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    start = lines.index("@@ sysctl_swappiness") + 1
    end = next(at for at in range(start, len(lines)) if lines[at].startswith("@@ "))
    return [line.removeprefix(str(root)) for line in lines[start:end]]


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_sysctl_files_that_another_of_their_name_hides_do_not_count(tmp_path: Path) -> None:
    put(tmp_path / "usr/lib/50-own.conf", "vm.swappiness = 10\n")
    put(tmp_path / "usr/lib/60-masked.conf", "vm.swappiness = 20\n")
    put(tmp_path / "usr/lib/70-other.conf", "vm.swappiness = 30\n")
    put(tmp_path / "usr/lib/80-dangling.conf", "vm.swappiness = 40\n")
    put(tmp_path / "run/70-other.conf", "kernel.sysrq = 1\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/60-masked.conf").symlink_to("/dev/null")
    (tmp_path / "etc/80-dangling.conf").symlink_to("/nowhere")  # systemd-sysctl passes it by
    assert swappiness_section(tmp_path) == [
        "/usr/lib/50-own.conf:vm.swappiness = 10",
        "/usr/lib/80-dangling.conf:vm.swappiness = 40",
    ]


def test_without_sysctl_files_nothing_is_found(tmp_path: Path) -> None:
    assert swappiness_section(tmp_path) == []
