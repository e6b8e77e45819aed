"""The one error of the product: host, what, want, have, fix. All that a person can cause is it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Of what a host said, what a terminal can show and will not obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


class EdgellmError(Exception):
    """A fault that a person can mend: what was wanted, what is there, and the fix.

    `host` is None while no host is involved yet (inventory, model on the control machine).
    """

    def __init__(self, *, what: str, want: str, have: str, fix: str, host: str | None = None):
        self.host = host
        self.what = what
        self.want = want
        self.have = have
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        text = f"{where}{self.what}: want {self.want}, have {self.have}; fix: {self.fix}"
        return printable(text)

    def for_host(self, host: str) -> EdgellmError:
        """The same error, named for a host."""
        return type(self)(what=self.what, want=self.want, have=self.have, fix=self.fix, host=host)


class ParseError(EdgellmError):
    """Output of a host that is not in the format it should be in."""


class SettingsError(EdgellmError):
    """A setting that is unknown, of the wrong type, or outside its allowed values."""


class InventoryError(EdgellmError):
    """A fault in the fleet's YAML file; `what` starts with file:line."""


class HeldBackError(EdgellmError):
    """Nothing is wrong with this host: what was to go before it is not proven."""


class HostMismatchError(EdgellmError):
    """A host that is not what the inventory says, or cannot carry the roll-out."""


class ModelError(EdgellmError):
    """A model file that must not reach a host: wrong digest, size, format or architecture."""


class RuntimeBuildError(EdgellmError):
    """The server runtime could not be built for an architecture on the control machine."""
