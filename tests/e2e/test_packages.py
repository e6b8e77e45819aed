"""A library that the engine needs is missing: it is installed before the engine is."""

from __future__ import annotations

from .conftest import FirstRollOut
from .support import FAST, PACKAGES, SERVICE, SPARE, CommandLine, Ssh


def test_missing_libgomp_is_installed_by_the_next_run(
    first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    spare = roll_out.inventory("spare", [SPARE])
    roll_out(*FAST, inventory=spare).assert_ok(SPARE)
    ssh(SPARE, "systemctl stop edgellm && dpkg --remove --force-depends libgomp1 2>&1")
    assert ssh(SPARE, "ldconfig -p | grep libgomp.so.1", check=False) == ""
    run = roll_out(*FAST, inventory=spare).assert_ok(SPARE)
    assert run.changed() == {SPARE: [PACKAGES, SERVICE]}
    assert "libgomp.so.1" in ssh(SPARE, "ldconfig -p")
    assert ssh(SPARE, "dpkg-query -W -f '${Status}' libgomp1") == "install ok installed"
    assert ssh.running_release(SPARE) == run.host(SPARE)["release"]
    roll_out(*FAST, inventory=spare).assert_ok(SPARE).assert_changed_nothing()
