"""The fleet file: what it says, and every fault of it with its line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InventoryError
from edgellm.hardware import Arch
from edgellm.inventory import FleetFaults, load_fleet, parse_fleet
from edgellm.settings import INVENTORY_KEYS, Settings

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "inventories" / "factory.yaml"
FILE = Path("/srv/fleet/plant.yaml")

ONE_HOST = """\
hosts:
  - name: pi5-01
    address: 192.0.2.11
    arch: arm64
    site: hall_a
"""


# What a right file says


def test_a_host_of_four_lines_has_safe_defaults() -> None:
    (host,) = parse_fleet(ONE_HOST, FILE).hosts
    assert (host.name, host.address, host.arch) == ("pi5-01", "192.0.2.11", Arch.ARM64)
    assert host.groups == ("arm64", "site_hall_a", "wave_1")
    assert host.data() == {
        "ssh_hostname": "192.0.2.11",
        "ssh_user": "root",
        "ssh_port": 22,
        "ssh_known_hosts_file": "/srv/fleet/known_hosts",
        "ssh_strict_host_key_checking": "yes",
        "ssh_connect_retries": 2,
        "arch": "arm64",
        "site": "hall_a",
        "wave": 1,
    }


def test_a_login_that_is_not_root_uses_sudo_unless_told_otherwise() -> None:
    assert parse_fleet(ONE_HOST + "    ssh_user: ops\n", FILE).hosts[0].data()["_sudo"] is True
    without = parse_fleet(ONE_HOST + "    ssh_user: ops\n    sudo: false\n", FILE)
    assert "_sudo" not in without.hosts[0].data()


def test_defaults_fill_what_a_host_does_not_say() -> None:
    defaults = """\
        defaults:
          ssh_user: ops
          ssh_port: 2222
          ssh_key: keys/fleet
          known_hosts: pins
        """
    host, other = parse_fleet(
        dedent(defaults)
        + ONE_HOST
        + "  - {name: n100-01, address: n100.example, arch: x86_64, site: b, ssh_port: 22}\n",
        FILE,
    ).hosts
    assert (host.ssh_user, host.ssh_port, host.sudo) == ("ops", 2222, True)
    assert host.ssh_key == Path("/srv/fleet/keys/fleet")
    assert host.known_hosts == Path("/srv/fleet/pins")
    assert (other.ssh_port, other.arch) == (22, Arch.X86_64)


def test_the_fleets_settings_stay_apart_from_a_hosts_own() -> None:
    # As host data they would beat group_data/canary.py and every other group.
    fleet = parse_fleet(
        "defaults: {settings: {max_tokens: 256}}\n" + ONE_HOST + "    settings: {threads: 3}\n",
        FILE,
    )
    assert fleet.settings == {"max_tokens": 256}
    assert fleet.hosts[0].settings == {"threads": 3}
    assert fleet.hosts[0].data()["threads"] == 3


def test_groups_come_from_the_general_to_the_particular() -> None:
    hosts = "".join(
        f"  - {{name: h{i}, address: 192.0.2.{i}, arch: {arch}, site: {site}, wave: {wave}}}\n"
        for i, (arch, site, wave) in enumerate(
            [("arm64", "a", 10), ("x86_64", "b", 2), ("arm64", "b", 0)], 1
        )
    )
    groups = parse_fleet("hosts:\n" + hosts, FILE).groups()
    assert {name: [host for host, _ in members] for name, members in groups.items()} == {
        "arm64": ["h3", "h1"],
        "x86_64": ["h2"],
        "site_b": ["h3", "h2"],
        "site_a": ["h1"],
        "canary": ["h3"],
        "wave_2": ["h2"],
        "wave_10": ["h1"],
    }
    assert list(groups)[-3:] == ["canary", "wave_2", "wave_10"]


def test_host_data_holds_nothing_that_settings_would_not_know() -> None:
    for host in load_fleet(EXAMPLE).hosts:
        for key in host.data():
            assert key in {*Settings.names(), *INVENTORY_KEYS} or key.startswith(("ssh_", "_sudo"))


def test_the_example_fleet_uses_documentation_addresses_alone() -> None:
    fleet = load_fleet(EXAMPLE)
    assert len(fleet.hosts) == 9
    assert all(host.address.startswith(("192.0.2.", "198.51.100.")) for host in fleet.hosts)


# Faults


HEAD = "hosts:\n  - name: pi5-01\n    address: 192.0.2.11\n    arch: arm64\n    site: hall_a\n"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["1: the file is empty: it needs hosts:"]),
        ("# nothing but a comment\n", ["1: the file is empty: it needs hosts:"]),
        ("[]\n", ["1: the file must be a mapping (key: value) with defaults, hosts"]),
        ("defaults: {}\n", ["1: hosts: is missing"]),
        ("hosts: []\n", ["1: hosts: is an empty list"]),
        (
            "hosts:\n  pi5-01: {}\n",
            ["2: hosts: must be a list of hosts, each beginning with '- name: ...'"],
        ),
        (
            "host:\n  - name: a\n",
            ["1: hosts: is missing", "1: the file: host is not a key (did you mean hosts?)"],
        ),
        (
            "hosts:\n  - name: a\n   b: [",
            ["3:4: no YAML: expected <block end>, but found '<block mapping start>'"],
        ),
        (
            "hosts:\n\t- name: a\n",
            ["2:1: no YAML: found character '\\t' that cannot start any token"],
        ),
        ("a: 1\n---\nb: 2\n", ["2:1: no YAML: but found another document"]),
        ("hosts:\n  - name: \x00\n", ["2: no YAML: character U+0000 is not allowed"]),
        ("hosts: *nowhere\n", ["1:8: no YAML: found undefined alias 'nowhere'"]),
        ("[" * 3_000, [" no YAML: nested too deeply"]),
        (
            "hosts:\n  - address: 192.0.2.11\n",
            [
                "2: host 1: arch is missing",
                "2: host 1: name is missing",
                "2: host 1: site is missing",
            ],
        ),
        (HEAD + "    adress: x\n", ["6: pi5-01: adress is not a key (did you mean address?)"]),
        (HEAD + "    wave: 1\n    wave: 2\n", ["7: pi5-01: wave is already on line 6"]),
        (
            HEAD + "    wave: canary\n",
            ["6: pi5-01: wave must be a whole number from 0 to 999, not 'canary'"],
        ),
        (
            HEAD + "    wave: true\n",
            ["6: pi5-01: wave must be a whole number from 0 to 999, not True"],
        ),
        (
            HEAD + "    ssh_port: 70000\n",
            ["6: pi5-01: ssh_port must be a whole number from 1 to 65535, not 70000"],
        ),
        (HEAD + "    sudo: 'yes'\n", ["6: pi5-01: sudo must be true or false, not 'yes'"]),
        (
            HEAD + "    ssh_user: 1000\n",
            ["6: pi5-01: ssh_user must be text, not 1000: put it in quotes"],
        ),
        (
            HEAD + "    ssh_user: ops; id\n",
            ["6: pi5-01: ssh_user must be a login name, not 'ops; id'"],
        ),
        (
            HEAD + "    ssh_key: [a]\n",
            ["6: pi5-01: ssh_key must be text, not a list: put it in quotes"],
        ),
        (
            HEAD + "    ssh_key: !vault x\n",
            ["6: pi5-01: ssh_key must be text, not 'x' as !vault: put it in quotes"],
        ),
        (
            HEAD + "    known_hosts: x\n",
            [
                "6: pi5-01: known_hosts is not a key (known: name, address, arch, site, wave, "
                "ssh_user, ssh_port, ssh_key, sudo, settings)"
            ],
        ),
        (
            HEAD.replace("arm64", "aarch64"),
            ["4: pi5-01: arch must be arm64 or x86_64, not 'aarch64' (here called arm64)"],
        ),
        (
            HEAD.replace("arm64", "riscv64"),
            ["4: pi5-01: arch must be arm64 or x86_64, not 'riscv64'"],
        ),
        (
            HEAD.replace("hall_a", "no"),
            ["5: pi5-01: site must be text, not False: put it in quotes"],
        ),
        (
            HEAD.replace("pi5-01", "hall a/1"),
            [
                "2: host 1: name must be letters, digits, . _ - and start with a letter or digit, "
                "not 'hall a/1'"
            ],
        ),
        (
            HEAD.replace("pi5-01", "site_hall_a"),
            [
                "2: site_hall_a: name 'site_hall_a' is the name of a group: "
                "--limit could not tell them apart"
            ],
        ),
        (
            HEAD.replace("pi5-01", "plant"),
            ["2: plant: name 'plant' is the name of a group: --limit could not tell them apart"],
        ),
        (
            HEAD.replace("192.0.2.11", "-oProxyCommand=id"),
            ["3: pi5-01: address must be a host name or an IP address, not '-oProxyCommand=id'"],
        ),
        (
            HEAD + HEAD.removeprefix("hosts:\n"),
            [
                "6: pi5-01: 192.0.2.11 port 22 is already pi5-01, on line 2",
                "6: pi5-01: already a host on line 2",
            ],
        ),
        (
            HEAD + "  - just text\n",
            [
                "6: host 2 must be a mapping (key: value) with name, address, arch, site, wave, "
                "ssh_user, ssh_port, ssh_key, sudo, settings"
            ],
        ),
        (
            HEAD + "    settings:\n      thread: 4\n      port: 80\n      zram: on\n",
            [
                "7: pi5-01: thread is not a setting (did you mean threads?)",
                "8: pi5-01: port must be at least 1024, not 80",
                "9: pi5-01: zram must be text, not True (compressed swap in memory)",
            ],
        ),
        (
            HEAD + "    settings: [threads]\n",
            ["6: pi5-01: settings must be a mapping (key: value)"],
        ),
        (
            HEAD + "    settings:\n      cpus: 0-3\n      cpus: 0-1\n",
            ["8: pi5-01: settings: cpus is already on line 7"],
        ),
        (
            "defaults:\n  ssh_usr: ops\n  settings: {n_ctx: 1}\n" + HEAD,
            [
                "2: defaults: ssh_usr is not a key (did you mean ssh_user?)",
                "3: defaults: n_ctx must be at least 256, not 1",
            ],
        ),
    ],
)
def test_every_fault_is_told_with_its_line(text: str, faults: list[str]) -> None:
    with pytest.raises(FleetFaults) as caught:
        parse_fleet(text, FILE)
    assert list(caught.value.faults) == [f"{FILE}:{fault}" for fault in faults]


def test_the_error_lists_all_faults_one_a_line() -> None:
    with pytest.raises(InventoryError) as caught:
        parse_fleet(HEAD + "    wave: -1\n    sudo: 1\n", FILE)
    assert str(caught.value).splitlines() == [
        "/srv/fleet/plant.yaml: 2 faults, no host was contacted",
        "/srv/fleet/plant.yaml:6: pi5-01: wave must be a whole number from 0 to 999, not -1",
        "/srv/fleet/plant.yaml:7: pi5-01: sudo must be true or false, not 1",
    ]


def test_one_address_with_two_ports_is_two_hosts() -> None:
    text = HEAD + HEAD.removeprefix("hosts:\n").replace("pi5-01", "pi5-02") + "    ssh_port: 2222\n"
    assert len(parse_fleet(text, FILE).hosts) == 2


def test_a_file_that_is_not_there_is_one_fault(tmp_path: Path) -> None:
    with pytest.raises(FleetFaults, match="No such file or directory"):
        load_fleet(tmp_path / "fleet.yaml")


def test_a_file_that_is_no_text_is_one_fault(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_bytes(b"hosts: \xff\n")
    with pytest.raises(FleetFaults, match="not UTF-8 text, at byte 7"):
        load_fleet(tmp_path / "fleet.yaml")


def test_pinned_host_keys_that_are_not_there_are_one_fault(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(ONE_HOST)
    with pytest.raises(FleetFaults, match=r"known_hosts .*/known_hosts is not there"):
        load_fleet(tmp_path / "fleet.yaml")


@given(st.text(alphabet="hostnameadr: -[]{}'\"\n&*!|>%@#,019", max_size=120))
def test_garbage_raises_nothing_but_faults(text: str) -> None:
    with contextlib.suppress(FleetFaults):
        parse_fleet(text, FILE)


@given(st.text(alphabet="aB0_.- :,'\"{}[]#&*!|>%@\t\n\x00\x85é", max_size=40))
def test_a_garbage_value_raises_nothing_but_faults(value: str) -> None:
    with contextlib.suppress(FleetFaults):
        parse_fleet(ONE_HOST.replace("pi5-01", value), FILE)
