"""Notices a process that hangs, from a thread of its own: a hung event loop cannot.

A healthy process feeds systemd's watchdog. A hung one ends itself, so that it is restarted where
no systemd watches too, each worker by itself; where even this thread is stuck, the watchdog acts.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Final

from edgellm_server.lifecycle import LIFECYCLE
from edgellm_server.log import exit_now, log_event
from edgellm_server.notify import notify, watchdog_interval_s

EXIT_HUNG: Final = 70  # EX_SOFTWARE, as for an engine that died
BEAT_S: Final = 1.0


class Sentinel:
    def __init__(self) -> None:
        self._beat = time.monotonic()
        self._interval_s = min(watchdog_interval_s() or 5.0, 5.0)
        self._over = threading.Event()

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        beating = asyncio.create_task(self._keep_beating())
        threading.Thread(target=self._watch, name="edgellm-sentinel", daemon=True).start()
        try:
            yield
        finally:
            beating.cancel()
            self._over.set()

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._over.wait(self._interval_s):
            now = time.monotonic()
            if now - woke > 2 * self._interval_s:
                # This thread stood still as well: a suspended machine, a load that holds Python's
                # lock. Nobody is to blame for that time.
                self._beat = now
            woke = now
            if why := self._why_hung(now):
                log_event("hung", why=why)
                exit_now(EXIT_HUNG)
            notify("WATCHDOG=1")

    def _why_hung(self, now: float) -> str | None:
        limit_s = LIFECYCLE.engine_stall_s
        if now - self._beat > limit_s:
            return f"the event loop has not run for {now - self._beat:.0f} s (limit {limit_s:g})"
        silent_s = LIFECYCLE.engine_silent_s()
        if silent_s > limit_s:
            return f"the engine made no progress for {silent_s:.0f} s (limit {limit_s:g})"
        return None
