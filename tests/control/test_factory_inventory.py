"""inventories/factory.py, read by pyinfra itself."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from edgellm.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
ONE_HOST = """\
hosts:
  - name: pi5-01
    address: 192.0.2.11
    arch: arm64
    site: hall_a
"""


def pyinfra(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("EDGELLM_")}
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", *arguments],
        cwd=REPOSITORY,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_pyinfra_gives_each_host_its_groups_and_the_most_particular_data() -> None:
    done = pyinfra("--json", "inventories/factory.py", "debug-inventory")
    assert done.returncode == 0, done.stderr
    hosts = {host["name"]: host for host in json.loads(done.stdout)}
    assert hosts["pi5-01"]["groups"] == ["factory", "arm64", "site_hall_a", "canary"]
    assert hosts["pi5-02"]["groups"] == ["factory", "arm64", "site_hall_a", "wave_1"]
    assert hosts["pi5-01"]["data"]["smoke_requests"] == 20  # canary beats all
    assert hosts["pi5-02"]["data"]["ttft_budget_ms"] == 4000  # arm64 beats all
    assert hosts["pi4-01"]["data"]["ttft_budget_ms"] == 8000  # the host beats arm64
    for name, host in hosts.items():
        assert Settings.from_host_data(host["data"], host=name).port == 8000


def test_the_fleets_own_settings_beat_all_and_are_beaten_by_the_architecture(
    tmp_path: Path,
) -> None:
    (tmp_path / "known_hosts").write_text("")
    (tmp_path / "fleet.yaml").write_text(
        "defaults: {settings: {max_tokens: 64, ttft_budget_ms: 1}}\n" + ONE_HOST
    )
    done = pyinfra(
        "--json", "inventories/factory.py", "debug-inventory",
        EDGELLM_FLEET=str(tmp_path / "fleet.yaml"),
    )  # fmt: skip
    (host,) = json.loads(done.stdout)
    assert (host["data"]["max_tokens"], host["data"]["ttft_budget_ms"]) == (64, 4000)


def test_a_bad_fleet_file_ends_pyinfra_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(ONE_HOST + "    wave: canary\n    adress: x\n")
    done = pyinfra(
        "-y", "inventories/factory.py", "exec", "--", "true",
        EDGELLM_FLEET=str(tmp_path / "fleet.yaml"),
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.splitlines()[-3:] == [
        f"{tmp_path}/fleet.yaml: 2 faults, no host was contacted",
        f"{tmp_path}/fleet.yaml:6: pi5-01: wave must be a whole number from 0 to 999, not 'canary'",
        f"{tmp_path}/fleet.yaml:7: pi5-01: adress is not a key (did you mean address?)",
    ]
    assert "Traceback" not in done.stderr + done.stdout
    assert "Connecting" not in done.stderr + done.stdout


def test_a_sudo_password_never_shows_in_the_inventory() -> None:
    done = pyinfra("inventories/factory.py", "debug-inventory", EDGELLM_SUDO_PASSWORD="s3cret-pw")
    assert done.returncode == 0
    assert "s3cret-pw" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("limit", "hosts"),
    [
        ("arm64", {"b1", "b2"}),
        ("x86_64", {"b3"}),
        ("site_hall_a", {"b1"}),
        ("canary", {"b1"}),
        ("wave_1", {"b2", "b3"}),
        ("b3", {"b3"}),
    ],
)
def test_limit_takes_every_group(tmp_path: Path, limit: str, hosts: set[str]) -> None:
    with socket.socket() as taken:  # bound and not listening: every connection is refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        (tmp_path / "known_hosts").write_text("")
        (tmp_path / "fleet.yaml").write_text(
            dedent(f"""\
                defaults: {{ssh_port: {port}}}
                hosts:
                  - {{name: b1, address: 127.0.0.1, arch: arm64, site: hall_a, wave: 0}}
                  - {{name: b2, address: 127.0.0.2, arch: arm64, site: hall_b}}
                  - {{name: b3, address: 127.0.0.3, arch: x86_64, site: hall_b}}
                """)
        )
        done = pyinfra(
            "-y", "--limit", limit, "inventories/factory.py", "exec", "--", "true",
            EDGELLM_FLEET=str(tmp_path / "fleet.yaml"),
        )  # fmt: skip
    assert set(re.findall(r"\[(b\d)\]", done.stdout + done.stderr)) == hosts
    assert done.returncode != 0
