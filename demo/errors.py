"""The one error of the demo fleet."""

from __future__ import annotations


class DemoError(Exception):
    """What failed, what was wanted, what is there instead, and how to put it right."""

    def __init__(self, what: str, *, want: str, have: str, fix: str) -> None:
        super().__init__(f"{what}: want {want}; have {have}; fix: {fix}")
        self.what = what
        self.want = want
        self.have = have
        self.fix = fix
