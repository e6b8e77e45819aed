"""A large file on its way to a host: lost links, wrong bytes, full disks, locks, deadlines.

The host's receiver is scripted here; tests/remote runs the real one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import SSHException
from pyinfra.api.exceptions import ConnectError

from edgellm.errors import EdgellmError
from edgellm.operations import transfer as module
from edgellm.operations.transfer import CHUNK_BYTES, Transfer, send
from edgellm.remote import script

CONTENT = bytes(range(256)) * 4096  # four chunks
SIZE_BYTES = len(CONTENT)


class Clock:
    """time.monotonic and time.sleep without the waiting."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


class Channel:
    """One ssh channel; it breaks with `error` once `breaks_after_bytes` have been taken."""

    def __init__(
        self,
        *,
        breaks_after_bytes: int | None = None,
        error: BaseException | None = None,
        takes: Callable[[], None] = lambda: None,
    ):
        self.received = bytearray()
        self.command: str | None = None
        self.ended = self.closed = False
        self._breaks_after_bytes = breaks_after_bytes
        self._error = error or EOFError()
        self._takes = takes

    def settimeout(self, seconds: float) -> None:
        assert seconds == module.STALL_S

    def exec_command(self, command: str) -> None:
        self.command = command

    def sendall(self, data: bytes) -> None:
        limit = self._breaks_after_bytes
        if limit is not None and len(self.received) + len(data) > limit:
            raise self._error
        self._takes()
        self.received += data

    def shutdown_write(self) -> None:
        self.ended = True

    def recv_exit_status(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Link:
    """The connector: hands out the channels of its script, and counts connections."""

    def __init__(self, *channels: Any, reconnects: tuple[BaseException | None, ...] = ()):
        self._channels: Iterator[Any] = iter(channels)
        self._reconnects = iter(reconnects)
        self.connections = 0
        self.client = SimpleNamespace(get_transport=lambda: self)

    def open_session(self, timeout: float) -> Channel:
        channel = next(self._channels)
        if isinstance(channel, BaseException):
            raise channel
        assert isinstance(channel, Channel)
        return channel

    def disconnect(self) -> None:
        pass

    def connect(self) -> None:
        self.connections += 1
        error = next(self._reconnects, None)
        if error is not None:
            raise error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def model(tmp_path: Path) -> Transfer:
    source = tmp_path / "m.gguf"
    source.write_bytes(CONTENT)
    return Transfer(
        label="model m",
        source=source,
        path="/opt/edgellm/models/m.gguf",
        sha256="ab" * 32,
        size_bytes=SIZE_BYTES,
        deadline_s=600,
    )


@pytest.fixture
def host_with(scripted_host: Any) -> Callable[..., Any]:
    """host_with(link, answers…): a host behind this link whose receiver answers so."""

    def build(link: Any, *answers: Any) -> Any:
        host = scripted_host(answers=answers)
        host.connector = link
        return host

    return build


def at(offset: int) -> dict[str, Any]:
    return {"ok": True, "offset": offset}


def actions(host: Any) -> list[str]:
    """What the receiver was asked to do, in order."""
    return [
        json.loads(shlex.split(command.get_raw_value())[-1])["action"] for command in host.commands
    ]


def run(host: Any, transfer: Transfer, **arguments: Any) -> None:
    send(host.state, host, transfer, arguments)
    assert host.answers == [], "the script was not played to its end"


def error_of(host: Any, transfer: Transfer) -> EdgellmError:
    with pytest.raises(EdgellmError) as raised:
        send(host.state, host, transfer, {})
    assert raised.value.host == "pi5-01"
    assert raised.value.what == transfer.label
    return raised.value


def test_a_file_goes_over_in_one_channel_and_is_finished(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channel = Channel()
    host = host_with(Link(channel), at(0), at(SIZE_BYTES))
    run(host, model)
    assert bytes(channel.received) == CONTENT
    assert channel.ended
    assert channel.closed
    assert actions(host) == ["offset", "finish"]
    assert clock.slept_s == 0


def test_the_channel_runs_the_receiver_with_the_operations_sudo(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channel = Channel()
    host = host_with(Link(channel), at(0), at(SIZE_BYTES))
    run(host, model, _sudo=True, _timeout=3, _retries=0)
    assert channel.command is not None
    assert channel.command.startswith("sudo ")
    assert '"action": "append"' in channel.command


def test_only_the_bytes_that_are_missing_are_sent(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channel = Channel()
    host = host_with(Link(channel), at(CHUNK_BYTES + 7), at(SIZE_BYTES))
    run(host, model)
    assert bytes(channel.received) == CONTENT[CHUNK_BYTES + 7 :]
    assert any("resuming" in line for line in host.lines)


def test_a_file_that_is_all_there_is_only_finished(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    host = host_with(Link(), at(SIZE_BYTES), at(SIZE_BYTES))
    run(host, model)
    assert actions(host) == ["offset", "finish"]


@pytest.mark.parametrize(
    "error",
    [
        EOFError(),
        OSError("Socket is closed"),
        TimeoutError("timed out"),
        ConnectionResetError(104, "Connection reset by peer"),
        SSHException("Server connection dropped"),
        AttributeError("'NoneType' object has no attribute 'open_session'"),
    ],
)
def test_a_link_lost_in_mid_file_is_resumed_on_a_new_connection(
    host_with: Any, model: Transfer, clock: Clock, error: BaseException
) -> None:
    first, second = Channel(breaks_after_bytes=CHUNK_BYTES, error=error), Channel()
    link = Link(first, second)
    host = host_with(link, at(0), at(CHUNK_BYTES), at(SIZE_BYTES))
    run(host, model)
    assert bytes(first.received) + bytes(second.received) == CONTENT
    assert link.connections == 1
    assert actions(host) == ["offset", "offset", "finish"]


def test_a_link_that_is_lost_again_and_again_is_resumed_each_time(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channels = [Channel(breaks_after_bytes=CHUNK_BYTES) for _ in range(3)] + [Channel()]
    host = host_with(Link(*channels), *(at(n * CHUNK_BYTES) for n in range(4)), at(SIZE_BYTES))
    run(host, model)
    assert b"".join(bytes(channel.received) for channel in channels) == CONTENT


def test_a_channel_that_cannot_be_opened_is_a_lost_link(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channel = Channel()
    link = Link(SSHException("Timeout opening channel."), channel)
    run(host_with(link, at(0), at(0), at(SIZE_BYTES)), model)
    assert bytes(channel.received) == CONTENT


def test_a_link_lost_while_the_digest_is_taken_is_asked_once_more(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    link = Link(Channel())
    host = host_with(link, at(0), EOFError(), at(SIZE_BYTES), at(SIZE_BYTES))
    run(host, model)
    assert actions(host) == ["offset", "finish", "offset", "finish"]
    assert link.connections == 1


def test_a_host_that_is_not_back_yet_is_tried_again(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    channel = Channel()
    link = Link(channel, reconnects=(ConnectError("refused"), None))
    host = host_with(link, EOFError(), EOFError(), at(0), at(SIZE_BYTES))
    run(host, model)
    assert link.connections == 2
    assert "not back yet: refused" in host.lines
    assert bytes(channel.received) == CONTENT


def test_bytes_that_got_lost_behind_the_channel_are_sent_again(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    first, second = Channel(), Channel()
    short = {"ok": False, "kind": "short", "offset": CHUNK_BYTES}
    host = host_with(Link(first, second), at(0), short, at(CHUNK_BYTES), at(SIZE_BYTES))
    run(host, model)
    assert bytes(second.received) == CONTENT[CHUNK_BYTES:]


def test_wrong_bytes_are_sent_once_more_from_the_first_one(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    first, second = Channel(), Channel()
    wrong = {"ok": False, "kind": "digest", "have": "cd" * 32}
    host = host_with(Link(first, second), at(CHUNK_BYTES), wrong, at(0), at(SIZE_BYTES))
    run(host, model)
    assert bytes(second.received) == CONTENT


def test_bytes_that_are_wrong_twice_fail_the_host(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    wrong = {"ok": False, "kind": "digest", "have": "cd" * 32}
    host = host_with(Link(Channel(), Channel()), at(0), wrong, at(0), wrong)
    assert error_of(host, model).have == "the digest differs twice"


def test_a_link_that_does_not_come_back_fails_at_the_deadline_and_not_before(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    host = host_with(Link(), *(EOFError() for _ in range(1000)))
    began_s = clock.now_s
    error = error_of(host, model)
    assert "the link was lost" in error.have
    assert "resumes" in error.fix
    assert model.deadline_s - 10 < clock.now_s - began_s <= model.deadline_s


def test_a_link_that_is_too_slow_fails_at_the_deadline(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    def takes_long() -> None:
        clock.now_s += 250

    channel = Channel(takes=takes_long)
    error = error_of(host_with(Link(channel), at(0)), model)
    assert "when the time was up" in error.have
    assert channel.closed


def test_a_slow_link_shows_its_progress(host_with: Any, model: Transfer, clock: Clock) -> None:
    def takes_its_time() -> None:
        clock.now_s += 6

    host = host_with(Link(Channel(takes=takes_its_time)), at(0), at(SIZE_BYTES))
    run(host, model)
    assert len([line for line in host.lines if " of 1 MB" in line]) == 4


def test_a_full_disk_fails_the_host_before_a_byte_is_sent(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    full = {"ok": False, "kind": "disk_full", "free_bytes": 5_000_000, "needed_bytes": 428_000_000}
    error = error_of(host_with(Link(), full), model)
    assert (error.want, error.have) == ("428 MB free in /opt/edgellm/models", "5 MB")


def test_a_disk_that_fills_up_in_mid_file_fails_the_host_with_what_the_host_said(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    said = {"ok": False, "kind": "os", "error": "[Errno 28] No space left on device"}
    assert "No space left" in error_of(host_with(Link(), said), model).have


def test_a_lock_that_a_dead_connection_holds_is_waited_for(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    locked = {"ok": False, "kind": "locked"}
    host = host_with(Link(Channel()), *([locked] * 20), at(0), at(SIZE_BYTES))
    run(host, model)
    assert clock.slept_s == 20 * module.RECONNECT_PAUSE_S


def test_a_lock_that_another_run_holds_fails_the_host_in_time(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    locked = {"ok": False, "kind": "locked"}
    host = host_with(Link(), *([locked] * 1000))
    assert error_of(host, model).have == "another transfer of this file is under way"
    assert module.LOCK_WAIT_S <= clock.slept_s <= module.LOCK_WAIT_S + 5


def test_the_lock_is_waited_for_longer_than_a_dead_receiver_can_hold_it() -> None:
    (line,) = [line for line in script("receive_file").splitlines() if line.startswith("STALL_S")]
    assert float(line.partition("=")[2]) < module.LOCK_WAIT_S


def test_a_host_without_python_fails_with_what_its_shell_said(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    error = error_of(host_with(Link(), ("sh: 1: python3: not found",)), model)
    assert error.have == "sh: 1: python3: not found"


def test_a_login_banner_before_the_answer_does_no_harm(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    banner = ["Welcome to edge-01", json.dumps(at(SIZE_BYTES)), ""]
    run(host_with(Link(), banner, banner), model)


def test_each_answer_has_its_own_deadline_and_the_digest_of_a_large_file_a_longer_one(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    large = replace(model, size_bytes=428_730_208)
    host = host_with(Link(), at(large.size_bytes), at(large.size_bytes))
    run(host, large)
    # Both read it whole: what lies there already, and what has come
    assert host.timeouts_s == [60 + 85, 60 + 85]


def test_a_connector_without_ssh_uploads_by_its_own_means_and_is_checked_all_the_same(
    host_with: Any, model: Transfer, clock: Clock
) -> None:
    uploads: list[tuple[str, str]] = []
    host = host_with(SimpleNamespace(), at(0), at(SIZE_BYTES))
    host.put_file = lambda source, target, **_: uploads.append((source, target))
    run(host, model)
    assert uploads == [(str(model.source), "/opt/edgellm/models/.m.gguf.part")]
    assert actions(host) == ["offset", "finish"]
