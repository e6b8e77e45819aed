"""The one error: it names the host, what was wanted, what is there, and the fix."""

from __future__ import annotations

import pytest

from edgellm import errors
from edgellm.errors import EdgellmError, HostMismatchError, ParseError

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, EdgellmError)
]


def arch_mismatch(host: str | None = None) -> HostMismatchError:
    return HostMismatchError(
        host=host,
        what="architecture",
        want="arm64, as its group says",
        have="armv7l",
        fix="install a 64-bit OS",
    )


def test_message_says_host_what_want_have_and_fix_in_this_order() -> None:
    assert str(arch_mismatch("pi5-02")) == (
        "pi5-02: architecture: want arm64, as its group says, have armv7l; fix: install a 64-bit OS"
    )


def test_message_without_a_host_starts_with_what() -> None:
    assert str(arch_mismatch()).startswith("architecture: want")


def test_message_is_also_the_exceptions_argument_so_that_tracebacks_show_it() -> None:
    error = arch_mismatch("pi5-02")
    assert error.args == (str(error),)


@pytest.mark.parametrize("kind", KINDS)
def test_for_host_keeps_the_kind_and_every_word(kind: type[EdgellmError]) -> None:
    error = kind(what="a", want="b", have="c", fix="d")
    named = error.for_host("pi5-02")
    assert type(named) is kind
    assert str(named) == "pi5-02: a: want b, have c; fix: d"


def test_for_host_leaves_the_original_unnamed_for_the_next_host() -> None:
    error = arch_mismatch()
    error.for_host("pi5-02")
    assert error.host is None


def test_every_kind_is_caught_as_an_edgellm_error() -> None:
    with pytest.raises(EdgellmError, match="fix: d"):
        raise ParseError(what="a", want="b", have="c", fix="d")
