"""Real time that nobody confirms is ended by the host itself: the run's own command, on a host."""

from __future__ import annotations

from demo.fleet import Fleet
from edgellm.layout import REALTIME_CONFIRMED, REALTIME_TRIAL
from edgellm.operations import service

from .conftest import FirstRollOut
from .support import Ssh, wait_ready, wait_until

HOST = "edge-1"
TIMER = f"systemctl is-active {service.GUARD}.timer"


def test_a_trial_that_is_not_confirmed_ends_with_a_restart(
    served: None, first: FirstRollOut, fleet: Fleet, ssh: Ssh
) -> None:
    release, pid = first.release(HOST), ssh.main_pid(HOST)
    ssh(HOST, service.guarded(release, within_s=3).get_raw_value())
    assert ssh(HOST, f"cat {REALTIME_TRIAL}; {TIMER}").split() == [release, "active"]
    wait_until("the trial over", lambda: ssh(HOST, f"ls {REALTIME_TRIAL}", check=False) == "")
    wait_until("another process", lambda: ssh.main_pid(HOST) not in (0, pid))
    wait_ready(fleet, HOST)
    assert ssh(HOST, f"ls {REALTIME_CONFIRMED}", check=False) == ""


def test_a_confirmed_trial_is_not_ended(
    served: None, first: FirstRollOut, fleet: Fleet, ssh: Ssh
) -> None:
    release, pid = first.release(HOST), ssh.main_pid(HOST)
    ssh(HOST, service.guarded(release, within_s=3).get_raw_value())
    ssh(HOST, service.confirmation(release).get_raw_value())
    assert ssh(HOST, TIMER, check=False).strip() == "inactive"
    assert ssh(HOST, f"cat {REALTIME_CONFIRMED}").strip() == release
    assert ssh(HOST, f"ls {REALTIME_TRIAL}", check=False) == ""
    ssh(HOST, f"sleep 4; rm {REALTIME_CONFIRMED}")
    assert ssh.main_pid(HOST) == pid
