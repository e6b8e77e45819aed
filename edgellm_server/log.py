"""One structured line an event, to standard error, where the journal takes it."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import NoReturn

log = logging.getLogger("edgellm")


def set_up_log() -> None:
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def log_event(event: str, **fields: object) -> None:
    log.info(json.dumps({"event": event, **fields}))


def exit_now(code: int) -> NoReturn:
    """Without joining threads: those of a broken engine may never come back."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def in_ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def one_line(text: str) -> str:
    return " ".join(text.split())
