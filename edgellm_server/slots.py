"""Admission: so many answers at a time, so many requests waiting, the rest refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from edgellm_server.request import ApiError


class Slots:
    """At most `n_slots` hold a slot, at most `max_queue` wait for one, in order of arrival."""

    def __init__(self, n_slots: int, max_queue: int) -> None:
        self.n_slots = n_slots
        self._max_queue = max_queue
        self._free = n_slots
        self._waiting: deque[asyncio.Future[None]] = deque()
        # How long a slot is held, smoothed: what Retry-After is made of.
        self._held_s = 1.0

    @property
    def n_busy(self) -> int:
        return self.n_slots - self._free

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self) -> None:
        """Returns holding a slot. Raises ApiError 503 at once when the queue is full."""
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self._max_queue:
            raise ApiError(
                503,
                f"overloaded: {self.n_slots} answers are being generated and "
                f"{len(self._waiting)} requests wait; try again later",
                kind="server_error",
                code="overloaded",
                retry_after_s=self._retry_after_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the slot was handed to us in the moment we left
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    async def acquire_unless(self, gone: asyncio.Future[None]) -> bool:
        """Wait for a slot as long as the client does: False where `gone` was done first.

        Raises ApiError as `acquire` does.
        """
        acquire = asyncio.create_task(self.acquire())
        try:
            await asyncio.wait({acquire, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._give_back(acquire)
            raise
        if gone.done():
            self._give_back(acquire)
            return False
        acquire.result()
        return True

    def release(self, held_s: float | None = None) -> None:
        """`held_s` is None for a slot that was not used."""
        if held_s is not None:
            self._held_s += 0.2 * (held_s - self._held_s)
        self._pass_on()

    def _give_back(self, acquire: asyncio.Task[None]) -> None:
        if not acquire.done():
            acquire.cancel()
        elif not acquire.cancelled() and acquire.exception() is None:
            self.release()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _retry_after_s(self) -> int:
        wait_s = self._held_s * (len(self._waiting) + 1) / self.n_slots
        return max(1, min(60, math.ceil(wait_s)))
