"""Takes keys, prompts and answers out of what a bug report shows. Pure.

Where it is not known what a text is, it goes: a report with a hole can be asked about, one with a
customer's question in it cannot be taken back.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable

REMOVED = "<removed>"
SHORTEST_SECRET = 8  # shorter ones would take ordinary words with them

# Of a request's line in the journal (edgellm_server/record.py): none of them can hold its text.
REQUEST_TEXTS = frozenset({"event", "id", "endpoint", "finish_reason"})
# Of our other lines: what these hold came from a client.
CLIENT_TEXTS = frozenset(
    {"prompt", "answer", "messages", "content", "text", "input", "output", "body", "system_prompt"}
)
CODE = re.compile(r"[a-z0-9_.-]{1,40}")  # of an error: "engine_error"

PATTERNS = (
    # Also over WebSocket, where the key is a subprotocol
    (re.compile(r"(?i)\b(proxy-)?(authorization|x-api-key|api-key|cookie)\b(['\"]?\s*[:=]).*"), 3),
    (re.compile(r"(?i)\b(bearer|basic)(\s+)\S+"), 2),
    (re.compile(r"(?i)(edgellm\.key)(\.)\S+"), 2),
    # Of a command line
    (re.compile(r"(?i)(--?(?:[\w-]*-)?(?:key|token|secret|password))(\s+)[^\s-]\S*"), 2),
    # Not of max_tokens, or first_token_deadline_s
    (
        re.compile(
            r"(?i)([\w-]*(?:api_?key|secret|passw(?:or)?d|(?:\b|auth_?|access_?|hf_?)token(?!s))"
            r"(?:_?(?:s|id|env|value))?['\"]?\s*)([:=])\s*\S+"
        ),
        2,
    ),
    (re.compile(r"(?i)(://)([^/\s:@]*:)[^/\s@]+(?=@)"), 2),
    (re.compile(r"\b(sk|hf|ghp|pat)([-_])[A-Za-z0-9_-]{16,}"), 2),
    (re.compile(r"(?m)^(# keys?)( )[0-9a-f]+$"), 2),  # the fingerprints in server.env
)
# Keys are made so, and their hashes are; a release's id is 16 digits, a model's file has 64.
LONG_HEX = re.compile(r"(?<![0-9A-Za-z])(?!(?<=models/)[0-9a-f]{64}\.gguf)[0-9a-fA-F]{32,}")
SETTINGS_OF_OURS = re.compile(r"(EDGELLM|OMP|MALLOC|PYTHON)\w*=")
ENVIRONMENT = re.compile(r"^(\s*Environment=)((?:.*\\\n)*.*)$", re.MULTILINE)
# "2026-12-02T17:40:01+0000 edge-1 python3[812]: {...}"
JOURNAL_LINE = re.compile(r"^(\S+ \S+ (?P<program>[^\s\[:]+)(?:\[\d+\])?: )(?P<message>.*)$")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Without these secrets, and without whatever looks like one."""
    for secret in sorted({s for s in secrets if len(s) >= SHORTEST_SECRET}, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    text = ENVIRONMENT.sub(_environment, text)
    for pattern, kept in PATTERNS:
        groups = "".join(rf"\g<{number}>" for number in range(1, kept + 1))
        text = pattern.sub(groups + REMOVED, text)
    return LONG_HEX.sub(REMOVED, text)


def journal(lines: Iterable[str], *, holds_texts: bool, secrets: Iterable[str] = ()) -> str:
    """The service's journal (short-iso) without what clients asked and were answered.

    `holds_texts`: the server writes prompts, or is not ours. Then no line but systemd's and our
    own structured ones can be trusted: journald cuts a long prompt's line into several.
    """
    lines = list(lines)
    holds_texts = holds_texts or any('"prompt":' in line for line in lines)
    kept = [_journal_line(line, holds_texts) for line in lines]
    return redacted("\n".join(kept), secrets)


def _journal_line(line: str, holds_texts: bool) -> str:
    found = JOURNAL_LINE.match(line)
    if found is None:
        return REMOVED if holds_texts and not line.startswith("-- ") else line
    message = found["message"]
    try:
        event = json.loads(message)
    except (ValueError, RecursionError):
        if message.startswith("{"):
            return f"{found[1]}{REMOVED}"  # a line of ours that was cut
        trusted = found["program"] in ("systemd", "kernel") or not holds_texts
        return line if trusted else f"{found[1]}{REMOVED}"
    if not isinstance(event, dict):
        return f"{found[1]}{REMOVED}"
    return found[1] + json.dumps({key: _value(event, key) for key in event})


def _value(event: dict[str, object], key: str) -> object:
    value = event[key]
    if value is None or isinstance(value, bool | int | float):
        return value
    if not isinstance(value, str) or key in CLIENT_TEXTS:
        return REMOVED
    if event.get("event") != "request" or key in REQUEST_TEXTS or CODE.fullmatch(value):
        return value
    return REMOVED


def _environment(found: re.Match[str]) -> str:
    """An operator's drop-in may set anything; the names are enough."""
    try:
        settings = shlex.split(found[2].replace("\\\n", " "))
    except ValueError:  # a quote that does not end
        return f"{found[1]}{REMOVED}"
    told = (
        one if SETTINGS_OF_OURS.match(one) else f"{one.partition('=')[0]}={REMOVED}"
        for one in settings
    )
    return found[1] + " ".join(shlex.quote(one) if " " in one else one for one in told)
