"""The account that the server runs as."""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra.api import FactBase

from edgellm.layout import USER


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    """`home`, `shell` and `comment` as the host's name service has them; None: no such account."""

    home: str | None
    shell: str | None
    comment: str | None
    group: str | None  # its primary one

    @property
    def is_there(self) -> bool:
        return self.home is not None


class ServiceAccount(FactBase[AccountState]):
    """Asks for one name: with accounts of a directory service, reading all of them takes long."""

    def command(self) -> str:
        return (
            f"printf 'Passwd=%s\\n' \"$(getent passwd {USER})\"; "
            f"printf 'Group=%s\\n' \"$(id -gn {USER} 2>/dev/null)\""
        )

    def process(self, output: list[str]) -> AccountState:
        values = dict(line.split("=", 1) for line in output if "=" in line)
        # name:password:uid:gid:comment:home:shell, passwd(5)
        fields = values.get("Passwd", "").split(":")
        if len(fields) != 7:
            return AccountState(home=None, shell=None, comment=None, group=None)
        return AccountState(
            home=fields[5], shell=fields[6], comment=fields[4], group=values.get("Group") or None
        )
