"""The fleet's YAML file -> Fleet: typed hosts, or every fault of the file at once with its line.

    defaults:            # optional; for every host that does not say otherwise
      ssh_user: ops
    hosts:
      - name: pi5-01     # letters, digits, . _ -
        address: 192.0.2.11
        arch: arm64      # arm64 | x86_64; checked against the host itself later
        site: hall_a     # group site_hall_a
        wave: 0          # 0: group canary; 1, 2, ...: groups wave_1, wave_2, ...; default 1

No pyinfra here. inventories/factory.py turns a Fleet into pyinfra's groups.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from edgellm.errors import InventoryError
from edgellm.hardware import Arch
from edgellm.settings import check_value

CANARY_WAVE = 0  # rolled out first, and alone; its group is `canary`
DEFAULT_WAVE = 1
DEFAULT_KNOWN_HOSTS = "known_hosts"  # beside the YAML file
SSH_CONNECT_RETRIES = 2  # a board on a busy switch or just out of its boot

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%_-]*")
_LOGIN = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*\$?")
# Names that --limit would take for a group.
_GROUP_NAME = re.compile(r"all|factory|canary|wave_\d+|site_.*|" + "|".join(a.value for a in Arch))


class FleetFaults(InventoryError):
    """Every fault of a fleet file, one a line, each with file:line."""

    def __init__(self, path: Path, faults: Iterable[str]):
        self.path = path
        self.faults = tuple(faults)
        super().__init__(
            what=str(path),
            want="a fleet file without faults",
            have="; ".join(self.faults),
            fix="correct these lines",
        )

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"{self.path}: {count} fault{'' if count == 1 else 's'}, no host was contacted"
        return "\n".join((head, *self.faults))

    def for_host(self, host: str) -> FleetFaults:
        """The same: a file's faults are no one host's."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One entry of `hosts:`, with the file's defaults filled in."""

    name: str
    address: str
    arch: Arch
    site: str
    wave: int
    ssh_user: str
    ssh_port: int
    ssh_key: Path | None  # None: the ssh agent's keys, or the user's own
    known_hosts: Path
    sudo: bool
    settings: Mapping[str, Any]  # of this host alone

    @property
    def groups(self) -> tuple[str, ...]:
        """From the general to the particular: pyinfra lets the last group win."""
        wave = "canary" if self.wave == CANARY_WAVE else f"wave_{self.wave}"
        return (self.arch.value, f"site_{self.site}", wave)

    def data(self) -> dict[str, Any]:
        """pyinfra's host data: its own settings, the ssh connector's keys, _sudo, and where it is.

        No password is ever in it: `pyinfra ... debug-inventory` prints host data.
        """
        data: dict[str, Any] = {
            **self.settings,
            "ssh_hostname": self.address,
            "ssh_user": self.ssh_user,
            "ssh_port": self.ssh_port,
            "ssh_known_hosts_file": str(self.known_hosts),
            # pyinfra's default, accept-new, trusts whoever answers first.
            "ssh_strict_host_key_checking": "yes",
            "ssh_connect_retries": SSH_CONNECT_RETRIES,
            "arch": self.arch.value,
            "site": self.site,
            "wave": self.wave,
        }
        if self.ssh_key is not None:
            data["ssh_key"] = str(self.ssh_key)
        if self.sudo:
            data["_sudo"] = True
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet file without faults."""

    path: Path
    hosts: tuple[Host, ...]
    settings: Mapping[str, Any]  # defaults.settings: of the whole fleet

    def groups(self) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """pyinfra's groups: architectures, then sites, then waves (canary, wave_1, wave_2, ...).

        Their order is their precedence: data of `canary` beats data of `arm64`.
        """
        by_rank: list[dict[str, list[tuple[str, dict[str, Any]]]]] = [{}, {}, {}]
        for host in sorted(self.hosts, key=lambda host: host.wave):
            for rank, group in zip(by_rank, host.groups, strict=True):
                rank.setdefault(group, []).append((host.name, host.data()))
        return {group: hosts for rank in by_rank for group, hosts in rank.items()}

    def names(self) -> list[str]:
        return [host.name for host in self.hosts]


def load_fleet(path: Path) -> Fleet:
    """The fleet file -> Fleet. Raises FleetFaults with every fault in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FleetFaults(path, [f"{path}: not UTF-8 text, at byte {error.start}"]) from None
    except OSError as error:
        raise FleetFaults(path, [f"{path}: {error.strerror}"]) from None
    fleet = parse_fleet(text, path)
    missing = sorted({host.known_hosts for host in fleet.hosts if not host.known_hosts.is_file()})
    if missing:
        fix = "host keys are pinned there; make it by ssh-keyscan, and compare on the console"
        raise FleetFaults(
            path, [f"{path}: known_hosts {file} is not there ({fix})" for file in missing]
        )
    return fleet


def parse_fleet(text: str, path: Path) -> Fleet:
    """The text of a fleet file; `path` names it in faults, and relative paths count from there."""
    return _Parser(path).parse(text)


def _text_of(pattern: re.Pattern[str], looks: str) -> Callable[[Any], str | None]:
    """A check for text; YAML takes unquoted no, 1.10 and 22:22 for something else."""

    def check(value: Any) -> str | None:
        if not isinstance(value, str):
            return f"must be text, not {value!r}: put it in quotes"
        return None if pattern.fullmatch(value) else f"must be {looks}, not {value!r}"

    return check


def _whole(low: int, high: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and low <= value <= high:
            return None
        return f"must be a whole number from {low} to {high}, not {value!r}"

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {value!r}"


def _arch(value: Any) -> str | None:
    known = [arch.value for arch in Arch]
    if isinstance(value, str) and value in known:
        return None
    other_names = {"aarch64": "arm64", "armv8": "arm64", "amd64": "x86_64", "x86-64": "x86_64"}
    same = other_names.get(str(value).lower())
    hint = f" (here called {same})" if same else ""
    return f"must be {' or '.join(known)}, not {value!r}{hint}"


_PATH = _text_of(re.compile(r"[^\0\n]+"), "a path")
_LOGIN_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "ssh_user": _text_of(_LOGIN, "a login name"),
    "ssh_port": _whole(1, 65535),
    "ssh_key": _PATH,
    "sudo": _boolean,
}
_DEFAULTS_CHECKS = {**_LOGIN_CHECKS, "known_hosts": _PATH}
_HOST_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "name": _text_of(_NAME, "letters, digits, . _ - and start with a letter or digit"),
    "address": _text_of(_ADDRESS, "a host name or an IP address"),
    "arch": _arch,
    "site": _text_of(_SITE, "letters, digits, _ - and start with a letter or digit"),
    "wave": _whole(CANARY_WAVE, 999),
    **_LOGIN_CHECKS,
}
_HOST_REQUIRED = ("name", "address", "arch", "site")


@dataclass(frozen=True, slots=True)
class _Odd:
    """What no setting can be, as a fault shows it."""

    shown: str

    def __repr__(self) -> str:
        return self.shown


@dataclass(slots=True)
class _Parser:
    path: Path
    faults: list[tuple[int, str]] = field(default_factory=list)

    def parse(self, text: str) -> Fleet:
        root = self._compose(text)
        top = self._children(root, ("defaults", "hosts"), "the file")
        defaults: dict[str, Any] = {}
        if "defaults" in top:
            defaults = self._mapping(top["defaults"][1], _DEFAULTS_CHECKS, (), "defaults")
        hosts: list[tuple[int, dict[str, Any]]] = []
        if "hosts" not in top:
            if isinstance(root, yaml.MappingNode):
                self._fault(root, "hosts: is missing")
        else:
            hosts = self._hosts(top["hosts"][1])
        self._check_doubles(hosts, defaults.get("ssh_port", 22))
        if self.faults:
            raise FleetFaults(self.path, self._lines())
        return Fleet(
            path=self.path,
            hosts=tuple(self._host(values, defaults) for _, values in hosts),
            settings=defaults.get("settings", {}),
        )

    def _compose(self, text: str) -> yaml.Node:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            why = error.problem or error.context or "unreadable"
            raise FleetFaults(self.path, [f"{self.path}{at}: no YAML: {why}"]) from None
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1
            why = f"character U+{error.character:04X} is not allowed"
            raise FleetFaults(self.path, [f"{self.path}:{line}: no YAML: {why}"]) from None
        except RecursionError:
            raise FleetFaults(self.path, [f"{self.path}: no YAML: nested too deeply"]) from None
        if root is None:
            raise FleetFaults(self.path, [f"{self.path}:1: the file is empty: it needs hosts:"])
        return root

    def _hosts(self, node: yaml.Node) -> list[tuple[int, dict[str, Any]]]:
        if not isinstance(node, yaml.SequenceNode):
            self._fault(node, "hosts: must be a list of hosts, each beginning with '- name: ...'")
            return []
        if not node.value:
            self._fault(node, "hosts: is an empty list")
        return [
            (
                entry.start_mark.line + 1,
                self._mapping(entry, _HOST_CHECKS, _HOST_REQUIRED, f"host {number}"),
            )
            for number, entry in enumerate(node.value, 1)
        ]

    def _mapping(
        self,
        node: yaml.Node,
        checks: Mapping[str, Callable[[Any], str | None]],
        required: Iterable[str],
        what: str,
    ) -> dict[str, Any]:
        """One mapping's right values; its faults are noted with their lines."""
        what = self._name_in(node) or what
        children = self._children(node, (*checks, "settings"), what)
        values: dict[str, Any] = {}
        for key, (_, value_node) in children.items():
            if key == "settings":
                values[key] = self._settings(value_node, what)
                continue
            value = self._value(value_node)
            fault = checks[key](value)
            if fault is None and key == "name" and self._is_group(value):
                fault = f"{value!r} is the name of a group: --limit could not tell them apart"
            if fault:
                self._fault(value_node, f"{what}: {key} {fault}")
            else:
                values[key] = value
        if isinstance(node, yaml.MappingNode):
            for key in required:
                if key not in children:
                    self._fault(node, f"{what}: {key} is missing")
        return values

    def _settings(self, node: yaml.Node, what: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, (key_node, value_node) in self._children(node, None, f"{what}: settings").items():
            value = self._value(value_node)
            fault = check_value(key, value)
            if fault:
                self._fault(key_node, f"{what}: {fault}")
            else:
                values[key] = value
        return values

    def _children(
        self, node: yaml.Node, known: tuple[str, ...] | None, what: str
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key -> its key node and value node. Notes unknown and repeated keys."""
        if not isinstance(node, yaml.MappingNode):
            wanted = f" with {', '.join(known)}" if known else ""
            self._fault(node, f"{what} must be a mapping (key: value){wanted}")
            return {}
        children: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            if key in children:
                first = children[key][0].start_mark.line + 1
                self._fault(key_node, f"{what}: {key} is already on line {first}")
            elif known is not None and key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                self._fault(key_node, f"{what}: {key} is not a key ({hint})")
            else:
                children[key] = (key_node, value_node)
        return children

    def _value(self, node: yaml.Node) -> Any:
        """A scalar as YAML reads it; anything else has no place here and fails every check."""
        if not isinstance(node, yaml.ScalarNode):
            return _Odd("a list" if isinstance(node, yaml.SequenceNode) else "a mapping")
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node)
        except (yaml.YAMLError, ValueError):  # a foreign tag; 2024-13-45, which looks like a date
            return _Odd(f"{node.value!r} as {node.tag.rpartition(':')[2]}")
        finally:
            loader.dispose()

    def _name_in(self, node: yaml.Node) -> str | None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value == "name":
                name = self._value(value)
                return name if isinstance(name, str) and _NAME.fullmatch(name) else None
        return None

    def _is_group(self, name: str) -> bool:
        return bool(_GROUP_NAME.fullmatch(name)) or name == self.path.stem

    def _check_doubles(self, hosts: list[tuple[int, dict[str, Any]]], default_port: int) -> None:
        names: dict[str, int] = {}
        addresses: dict[tuple[str, int], tuple[int, str]] = {}
        for number, (line, values) in enumerate(hosts, 1):
            name = values.get("name")
            shown = name or f"host {number}"
            if name is not None:
                if name in names:
                    self.faults.append((line, f"{name}: already a host on line {names[name]}"))
                names.setdefault(name, line)
            if "address" in values:
                key = (values["address"].lower(), values.get("ssh_port", default_port))
                if key in addresses:
                    first, other = addresses[key]
                    text = f"{shown}: {key[0]} port {key[1]} is already {other}, on line {first}"
                    self.faults.append((line, text))
                addresses.setdefault(key, (line, shown))

    def _host(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Host:
        def given(key: str, otherwise: Any) -> Any:
            return values.get(key, defaults.get(key, otherwise))

        ssh_user = given("ssh_user", "root")
        ssh_key = given("ssh_key", None)
        return Host(
            name=values["name"],
            address=values["address"],
            arch=Arch(values["arch"]),
            site=values["site"],
            wave=values.get("wave", DEFAULT_WAVE),
            ssh_user=ssh_user,
            ssh_port=given("ssh_port", 22),
            ssh_key=None if ssh_key is None else self._path(ssh_key),
            known_hosts=self._path(defaults.get("known_hosts", DEFAULT_KNOWN_HOSTS)),
            sudo=given("sudo", ssh_user != "root"),
            settings=values.get("settings", {}),
        )

    def _path(self, text: str) -> Path:
        return (self.path.parent / Path(text).expanduser()).absolute()

    def _fault(self, node: yaml.Node, text: str) -> None:
        self.faults.append((node.start_mark.line + 1, text))

    def _lines(self) -> list[str]:
        return [f"{self.path}:{line}: {text}" for line, text in sorted(self.faults)]
