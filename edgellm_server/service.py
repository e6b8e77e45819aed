"""What lives as long as the process: configuration, engine, their state, the slots, the counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from edgellm_server import metrics
from edgellm_server.config import ServerConfig
from edgellm_server.engine import (
    SMALLEST_CHAT,
    BusyError,
    Engine,
    EngineError,
    Generation,
    RefusedError,
)
from edgellm_server.lifecycle import LIFECYCLE
from edgellm_server.log import exit_now, in_ms, log_event, one_line
from edgellm_server.notify import notify
from edgellm_server.placement import Place
from edgellm_server.request import ApiError
from edgellm_server.slots import Slots

EXIT_ENGINE: Final = 70

# How long /health still says why the load failed, for whoever polls it, before the process ends.
FAILED_LINGER_S: Final = 3.0
# For the one token that tells a broken answer from a dead engine.
ENGINE_CHECK_DEADLINE_S: Final = 60.0
SNAPSHOT_INTERVAL_S: Final = 5.0
# A release switch loads a model that the page cache holds. Who waits longer is told to come again.
LOADING_DEADLINE_S: Final = 60.0

State = Literal["loading", "ready", "failed"]


class Service:
    def __init__(self, config: ServerConfig, engine: Engine, place: Place | None = None) -> None:
        self.place = place  # None: this is the only worker
        self.config = config
        self.engine = engine
        self.state: State = "loading"
        self.why_failed: str | None = None
        self.slots = Slots(engine.n_slots, config.max_queue)
        self.metrics = metrics.Metrics(0 if place is None else place.index)
        self.started_s = int(time.time())
        self._check: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()  # or failed
        self._n_waiting_for_load = 0

    async def load(self) -> None:
        """Load in the background of an open port. Ends the process when that fails."""
        began = time.monotonic()
        try:
            await self.engine.load()
        except asyncio.CancelledError:
            raise
        except EngineError as error:
            await self._fail(str(error))
        except Exception as error:
            # Not foreseen, and fatal all the same: a task's exception would go unseen.
            await self._fail(f"{type(error).__name__}: {error}")
        if self.config.mlock:
            _warn_unless_locked(self.config.model_path)
        load_s = time.monotonic() - began
        self.state = "ready"
        self.metrics.ready = True
        self.metrics.load_seconds = load_s
        self._loaded.set()
        LIFECYCLE.engine_stall_s = self.config.engine_stall_s
        LIFECYCLE.engine_silent_s = self.engine.silent_s
        if self.place is not None:
            self.place.say_ready()
        if self.all_workers_ready():
            notify("READY=1", f"STATUS=serving {self.config.model_name}")
        log_event("ready", model=self.config.model_name, load_ms=in_ms(load_s))

    async def until_loaded(self, gone: asyncio.Future[None]) -> None:
        """Whoever comes while the model loads waits as in the queue: a restart drops no request.

        Returns when loaded or `gone`. Raises ApiError 503 where too many wait, or too long, or the
        load has failed.
        """
        if not self._loaded.is_set():
            if self._n_waiting_for_load >= self.slots.n_slots + self.config.max_queue:
                raise _not_ready("loading, and as many requests wait as may", retry_after_s=5)
            self._n_waiting_for_load += 1
            loaded = asyncio.create_task(self._loaded.wait())
            try:
                either: set[asyncio.Future[Any]] = {loaded, gone}
                await asyncio.wait(
                    either,
                    timeout=LOADING_DEADLINE_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                loaded.cancel()
                self._n_waiting_for_load -= 1
        if self.state != "ready" and not gone.done():
            raise _not_ready(self.state, retry_after_s=5)

    def all_workers_ready(self) -> bool:
        """A request that follows may reach another worker than the one that was asked."""
        return (
            self.state == "ready"
            and not LIFECYCLE.draining
            and (self.place is None or self.place.all_ready())
        )

    async def leave_snapshots(self) -> None:
        """Where there are several workers: this one's counts, for whichever is scraped."""
        while self.place is not None:
            # A full runtime directory must not end a worker.
            with contextlib.suppress(OSError):
                metrics.write_snapshot(self.place.folder, self._up_to_date())
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)

    def exposition(self) -> tuple[bytes, str]:
        """All workers' counts -> (text, content type) for Prometheus."""
        states = [self._up_to_date().snapshot()]
        if self.place is not None:
            states += metrics.read_snapshots(self.place.folder, self.place.index)
        return metrics.exposition(states, self.config.model_name)

    def suspect(self) -> None:
        """An answer broke. Unless a check already runs, see whether the engine still works."""
        if self.state == "ready" and (self._check is None or self._check.done()):
            self._check = asyncio.create_task(self._check_engine())

    def start_holding(self, generation: Generation) -> None:
        """A slot is free when the engine has let go of it, not when the client has read it all."""
        began = time.monotonic()
        generation.ended.add_done_callback(lambda _: self.slots.release(time.monotonic() - began))

    def _up_to_date(self) -> metrics.Metrics:
        self.metrics.n_slots = self.slots.n_slots
        self.metrics.n_busy = self.slots.n_busy
        self.metrics.n_waiting = self.slots.n_waiting
        return self.metrics

    async def _check_engine(self) -> None:
        try:
            await self.slots.acquire()
        except ApiError:
            return  # those who wait will tell
        generation = self.engine.chat(SMALLEST_CHAT)
        self.start_holding(generation)
        try:
            await asyncio.wait_for(_drain(generation), ENGINE_CHECK_DEADLINE_S)
        except (BusyError, RefusedError):
            return  # an answer, if not the one hoped for: it lives
        except Exception as error:
            await self._fail(f"the engine died: {type(error).__name__}: {error}")

    async def _fail(self, why: str) -> NoReturn:
        self.state, self.why_failed = "failed", one_line(why)
        self.metrics.ready = False
        self._loaded.set()
        log_event("failed", why=self.why_failed)
        notify(f"STATUS=failed: {self.why_failed}")
        await asyncio.sleep(FAILED_LINGER_S)
        exit_now(EXIT_ENGINE)


def _not_ready(why: str, retry_after_s: int) -> ApiError:
    return ApiError(
        503,
        f"the model is not ready: {why}",
        kind="server_error",
        code="not_ready",
        retry_after_s=retry_after_s,
    )


async def _drain(generation: Generation) -> None:
    async for _ in generation.events():
        pass


def _warn_unless_locked(model_path: Path) -> None:
    """llama.cpp goes on without a lock when LimitMEMLOCK= is too small; say so."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        model_kb = model_path.stat().st_size // 1024
        for line in Path("/proc/self/status").read_text().splitlines():
            # The weights are locked, the file's vocabulary is not: a few percent less.
            if line.startswith("VmLck:") and int(line.split()[1]) < 0.8 * model_kb:
                log_event(
                    "not_locked",
                    want=f"EDGELLM_MLOCK=1: about {model_kb} kB locked in memory",
                    have=f"VmLck {line.split()[1]} kB",
                    fix="raise LimitMEMLOCK= of the service",
                )
