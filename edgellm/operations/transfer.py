"""One large file from the control machine to a host: resumable, verified, atomic.

Not `files.put`: that writes the destination in place, copies through /tmp with sudo, and an ssh
drop in SFTP ends the whole run. This streams into `receive_file` over an ssh channel of its own.
"""

from __future__ import annotations

import json
import posixpath
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paramiko import SSHException
from pyinfra import logger
from pyinfra.api.exceptions import ConnectError, PyinfraError
from pyinfra.connectors.util import make_unix_command_for_host

from edgellm import live
from edgellm.errors import EdgellmError
from edgellm.facts import reading
from edgellm.remote import script_command

if TYPE_CHECKING:
    from pyinfra.api import Host, State

CHUNK_BYTES = 256 * 1024
# No byte accepted for this long: the link is dead, reconnect and resume.
STALL_S = 30.0
# Longer than the receiver's own stall limit, so that the lock of a dead connection is gone by then.
LOCK_WAIT_S = 60.0
RECONNECT_PAUSE_S = 2.0
ANSWER_S = 60
# A worn SD card reads slower than its label says: the digest may take this long.
SLOWEST_DISK_BYTES_S = 5_000_000
PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What goes where. `path` is the destination; its directory is made when it is not there."""

    label: str  # "Model qwen2.5-0.5b-instruct"
    source: Path
    path: str
    sha256: str
    size_bytes: int
    deadline_s: float

    def job(self, action: str) -> dict[str, Any]:
        return {
            "action": action,
            "path": self.path,
            "sha256": self.sha256,
            "size_bytes": self.size_bytes,
        }

    def answer_within_s(self, action: str) -> int:
        """A receiver that says nothing for longer sits behind a dead link."""
        # "offset" reads what is there already, "finish" what has come
        reading_s = 0 if action == "append" else self.size_bytes / SLOWEST_DISK_BYTES_S
        return int(ANSWER_S + reading_s)


class LinkLost(Exception):
    """The connection went away; what has arrived stays and the rest can be sent."""


def send(state: State, host: Host, transfer: Transfer, arguments: dict[str, Any]) -> None:
    """Sends the file, resuming after each lost link until the deadline.

    `arguments` are the operation's connector arguments (sudo and the like). Raises EdgellmError.
    """
    ends_at = time.monotonic() + transfer.deadline_s
    digest_retried = False
    while True:
        try:
            offset = _ask(host, transfer, "offset", arguments, ends_at)
            if offset < transfer.size_bytes:
                _append(state, host, transfer, offset, arguments, ends_at)
            _ask(host, transfer, "finish", arguments, ends_at)
        except LinkLost as lost:
            if time.monotonic() + RECONNECT_PAUSE_S > ends_at:
                raise _failed(host, transfer, f"the link was lost ({lost})") from None
            host.log(
                f"{transfer.label}: link lost ({lost}), reconnecting to resume", logger.warning
            )
            time.sleep(RECONNECT_PAUSE_S)
            _reconnect(host)
        except _DigestMismatch:
            # The part may stem from a file that was cut or rotted: once more, from the first byte
            if digest_retried:
                raise _failed(host, transfer, "the digest differs twice") from None
            digest_retried = True
        else:
            return


class _DigestMismatch(Exception):
    """All bytes are there and are the wrong ones; the receiver has removed them."""


def _ask(
    host: Host, transfer: Transfer, action: str, arguments: dict[str, Any], ends_at: float
) -> int:
    """Runs a receiver that reads nothing; returns the bytes on the host."""
    lock_ends_at = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            ok, output = host.run_shell_command(
                script_command("receive_file", transfer.job(action)),
                **{**arguments, "_timeout": transfer.answer_within_s(action)},
            )
        except (OSError, EOFError, SSHException, AttributeError) as error:
            # AttributeError: paramiko has dropped its transport and not yet got a new one
            raise LinkLost(_words(error)) from None
        answer = _answer(output.stdout_lines)
        if answer is None:
            if not ok and not output.stderr_lines:
                raise LinkLost("the connection closed")
            raise _failed(host, transfer, " ".join(output.stderr_lines)[:400] or "no answer")
        if answer.get("kind") == "locked" and time.monotonic() < min(lock_ends_at, ends_at):
            time.sleep(RECONNECT_PAUSE_S)
            continue
        return _offset(host, transfer, answer)


def _offset(host: Host, transfer: Transfer, answer: dict[str, Any]) -> int:
    kind = answer.get("kind")
    if answer.get("ok") is True:
        return int(answer["offset"])
    if kind == "short":
        raise LinkLost(f"{answer['offset']} of {transfer.size_bytes} bytes arrived")
    if kind == "digest":
        raise _DigestMismatch
    if kind == "locked":
        raise _failed(host, transfer, "another transfer of this file is under way")
    if kind == "disk_full":
        raise EdgellmError(
            host=host.name,
            what=transfer.label,
            want=f"{_mb(answer['needed_bytes'])} free in {posixpath.dirname(transfer.path)}",
            have=_mb(answer["free_bytes"]),
            fix="free some space there and run again",
        )
    raise _failed(host, transfer, str(answer.get("error", answer)))


def _append(
    state: State,
    host: Host,
    transfer: Transfer,
    offset: int,
    arguments: dict[str, Any],
    ends_at: float,
) -> None:
    """Streams the bytes from `offset` on. Raises LinkLost."""
    command = script_command("receive_file", transfer.job("append"))
    client = getattr(host.connector, "client", None)
    if client is None:
        # A connector without an ssh channel (@local, @docker): its own upload, then the same check
        part = f".{posixpath.basename(transfer.path)}.part"
        directory = posixpath.dirname(transfer.path)
        host.put_file(str(transfer.source), posixpath.join(directory, part), **arguments)
        return
    if offset:
        host.log(f"{transfer.label}: resuming at {_mb(offset)}")
    unix_command = make_unix_command_for_host(state, host, command, **unix_arguments(arguments))
    try:
        channel = client.get_transport().open_session(timeout=STALL_S)
        channel.settimeout(STALL_S)
        channel.exec_command(unix_command.get_raw_value())
        shown_at = time.monotonic()
        sent_bytes = offset
        with transfer.source.open("rb") as source:
            source.seek(offset)
            while chunk := source.read(CHUNK_BYTES):
                channel.sendall(chunk)
                sent_bytes += len(chunk)
                told = f"{transfer.label}: {_mb(sent_bytes)} of {_mb(transfer.size_bytes)}"
                live.note_transfer(host.name, told)
                now = time.monotonic()
                if now > ends_at:
                    channel.close()
                    raise _failed(host, transfer, f"{_mb(sent_bytes)} sent when the time was up")
                if now - shown_at >= PROGRESS_EVERY_S and not live.is_shown():
                    shown_at = now
                    host.log(told)
        channel.shutdown_write()
        channel.recv_exit_status()
        channel.close()
    except (OSError, EOFError, SSHException, AttributeError) as error:
        # AttributeError: get_transport() is None once paramiko has noticed that the link is gone
        raise LinkLost(_words(error)) from None


def unix_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments that speak of running a command, not of wrapping it."""
    control = ("_success_exit_codes", "_timeout", "_get_pty", "_stdin")
    return {key: value for key, value in arguments.items() if key not in control}


def _reconnect(host: Host) -> None:
    """A new connection in the old one's place; the next command tells whether it works."""
    reading.forget(host)  # it may have booted meanwhile
    try:
        host.connector.disconnect()
        host.connector.connect()
    except (ConnectError, PyinfraError, OSError, EOFError, SSHException) as error:
        host.log(f"not back yet: {_words(error)}")


def _answer(stdout_lines: list[str]) -> dict[str, Any] | None:
    for line in reversed(stdout_lines):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    return None


def _failed(host: Host, transfer: Transfer, have: str) -> EdgellmError:
    return EdgellmError(
        host=host.name,
        what=transfer.label,
        want=f"{_mb(transfer.size_bytes)} at {transfer.path} within {transfer.deadline_s:.0f} s",
        have=have,
        fix="run again: it resumes where it stopped (transfer_deadline_s allows more time)",
    )


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
