"""What generates tokens: the Engine protocol, and llama.cpp in this process.

A second engine (one that forwards to any OpenAI-compatible server on loopback) needs to give only
`load`, `chat`, `stop` and `n_slots`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from edgellm_server.config import ServerConfig
from edgellm_server.request import ChatRequest, Message
from edgellm_server.stream import Usage

# llama.cpp's levels: 1 errors, 2 warnings, 3 info. Level 2 writes two lines for each request whose
# prompt is cached; level 1 leaves what explains a failed load.
_LOG_ERRORS_ONLY: Final = 1


class EngineError(Exception):
    """The engine does not work: it did not load, or broke while generating."""


class PromptTooLongError(Exception):
    """The prompt does not fit the context of one slot. Both in tokens."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt is {n_prompt_tokens} tokens long, the context of a slot is {n_ctx} tokens"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class RefusedError(Exception):
    """The engine finds fault with this request alone (the chat template refuses it, say)."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt fits and a slot works on it. Comes once, before any Token."""


@dataclass(frozen=True, slots=True)
class Token:
    """Text of one token, or of the few that make up one character. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. Nothing comes after it. `reason` is "stop" or "length"."""

    reason: str
    usage: Usage


Event = Accepted | Token | Finished


class Generation:
    """One running answer: events out, a way to stop it, and a promise of its end.

    Made and read on the event loop; `emit` and `cancelled` are for the engine's own thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Not bounded: an answer is, and a client that reads slowly must not hold the slot.
        self._queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._cancelled = threading.Event()
        # Done once the engine has let go of the slot, whoever still reads the events.
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the engine to stop. Events end soon after, without a Finished."""
        self._cancelled.set()

    def emit(self, event: Event | Exception) -> None:
        """From any thread. An exception is raised to whoever reads `events`."""
        # The loop is closed only when the process ends: nobody is left to read then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    def end(self) -> None:
        """On the event loop: the engine is done with this one."""
        self._queue.put_nowait(None)
        if not self.ended.done():
            self.ended.set_result(None)

    async def events(self) -> AsyncIterator[Event]:
        """Accepted, Tokens, Finished. Raises PromptTooLongError, RefusedError or EngineError."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Engine(Protocol):
    """Generates answers in `n_slots` slots. All methods are called on the event loop."""

    @property
    def n_slots(self) -> int: ...

    async def load(self) -> None:
        """Return once a real token was generated. Raises EngineError."""

    def chat(self, request: ChatRequest) -> Generation:
        """Start one answer. The caller keeps within `n_slots` at a time."""

    async def stop(self) -> None:
        """Stop what runs and free everything."""


class LlamaEngine:
    """llama.cpp's own server (slots, continuous batching, prompt cache) by way of xllamacpp.

    What xllamacpp leaves no way around: its Server starts llama.cpp's HTTP listener, which can
    generate, besides being called in-process. Here that listener is
      - on a unix socket in a directory only our user may enter, never on TCP;
      - behind a random key that exists only in this process (llama.cpp leaves /health, /v1/health
        and its UI's assets open, and the UI is off);
      - without /slots, /props (write), /metrics, UI, MCP proxy and tools;
      - unlinked as soon as Server() returns, after which no path leads to it.
    What remains: during the seconds of loading, processes of our own user may connect and need the
    key; for good, a listening socket without a name and one idle HTTP thread or two.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._server: Any = None
        self._running: set[Generation] = set()
        # handle_chat_completions blocks for the length of an answer: one thread a slot.
        self._pool = ThreadPoolExecutor(config.n_parallel, thread_name_prefix="edgellm-slot")

    @property
    def n_slots(self) -> int:
        return self._config.n_parallel

    async def load(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.run_in_executor(self._pool, self._open_server)
        await self._warm_up()

    def chat(self, request: ChatRequest) -> Generation:
        return self._start(request, id_slot=None)

    async def stop(self) -> None:
        running = tuple(self._running)
        for generation in running:
            generation.cancel()
        await asyncio.gather(*(generation.ended for generation in running))
        self._pool.shutdown(wait=False)
        last_reference, self._server = [self._server], None
        # Dropping it ends llama.cpp's loop and joins its thread.
        await asyncio.to_thread(last_reference.clear)

    def _open_server(self) -> Any:
        """On a thread: blocks for as long as the disk takes to give the model."""
        import xllamacpp

        config = self._config
        check_gguf(config.model_path)
        directory = tempfile.mkdtemp(prefix="edgellm-", dir=_runtime_directory())  # mode 0700
        try:
            socket_path = os.path.join(directory, "llama.sock")
            params = xllamacpp.CommonParams()
            params.model.path = str(config.model_path)
            params.n_parallel = config.n_parallel
            params.n_ctx = config.n_ctx * config.n_parallel  # llama.cpp splits it over the slots
            params.n_batch = params.n_ubatch = config.n_batch
            params.cpuparams.n_threads = config.n_threads
            params.cpuparams_batch.n_threads = config.n_threads_batch
            params.cache_ram_mib = config.cache_ram_mib
            # Would shrink our settings to what it takes for free memory: the plan decides that.
            params.fit_params = False
            # An empty run; ours generates a real token and prefills the system prompt.
            params.warmup = False
            if config.mlock:
                params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK
            params.verbosity = _LOG_ERRORS_ONLY
            # See the class: the listener we do not want. ".sock" makes it a unix socket.
            params.hostnames = [socket_path]
            params.api_keys = [secrets.token_hex(32)]
            params.cors_origins = ""
            params.n_threads_http = 1
            params.endpoint_slots = False
            params.endpoint_props = False
            params.endpoint_metrics = False
            params.ui = False
            try:
                server = xllamacpp.Server(params)
            except Exception as error:
                raise EngineError(
                    f"llama.cpp could not load {config.model_path} ({error}); "
                    "its own reason is in the lines before this one"
                ) from error
            if server.listening_address != f"unix://{socket_path}":
                raise EngineError(
                    f"llama.cpp listens on {server.listening_address}, wanted only a unix socket: "
                    "this xllamacpp is not the pinned one"
                )
            return server
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _warm_up(self) -> None:
        """Generate a token in every slot, after the system prompt, which stays in its KV cache."""
        # _llama_body puts the system prompt in front, as it does for everyone.
        request = ChatRequest(messages=(Message(role="user", content="Hi"),), max_tokens=2)
        for id_slot in range(self.n_slots):
            completion_tokens = 0
            try:
                async for event in self._start(request, id_slot=id_slot).events():
                    if isinstance(event, Finished):
                        completion_tokens = event.usage.completion_tokens
            except PromptTooLongError as error:
                raise EngineError(f"the warm-up prompt does not fit: {error}") from error
            except RefusedError as error:
                raise EngineError(f"warm-up refused: {error}") from error
            if completion_tokens < 1:
                raise EngineError(f"warm-up generated no token in slot {id_slot}")

    def _start(self, request: ChatRequest, id_slot: int | None) -> Generation:
        generation = Generation()
        self._running.add(generation)
        body = _llama_body(request, self._config, id_slot)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, self._run, body, generation)

        def ended(_: asyncio.Future[None]) -> None:
            self._running.discard(generation)
            generation.end()

        future.add_done_callback(ended)
        return generation

    def _run(self, body: dict[str, Any], generation: Generation) -> None:
        """On a thread of the pool, for as long as the answer takes."""
        reader = _ChunkReader(generation)
        try:
            if not generation.cancelled:
                self._server.handle_chat_completions(body, reader)
            if not reader.closed and not generation.cancelled:
                generation.emit(EngineError("llama.cpp ended an answer without finishing it"))
        except ValueError as error:
            # xllamacpp raises what llama.cpp calls an invalid argument: the request's fault.
            generation.emit(RefusedError(_first_line(error)))
        except Exception as error:
            generation.emit(EngineError(f"{type(error).__name__}: {_first_line(error)}"))


class _ChunkReader:
    """llama.cpp's chunks -> events. Called with a dict or a list of them; True stops it."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._accepted = False
        self._reason = "stop"
        self.closed = False

    def __call__(self, chunk: dict[str, Any] | list[dict[str, Any]]) -> bool:
        for item in chunk if isinstance(chunk, list) else [chunk]:
            self._read(item)
        # During prefill too: return_progress makes llama.cpp call for each batch of the prompt.
        return self._generation.cancelled

    def _read(self, chunk: dict[str, Any]) -> None:
        if (error := chunk.get("error")) is not None:
            self.closed = True
            self._generation.emit(_error_of(error))
            return
        if not self._accepted:
            self._accepted = True
            self._generation.emit(Accepted())
        for choice in chunk.get("choices") or ():
            # The first chunk's content is null: a role, not a token.
            if text := (choice.get("delta") or {}).get("content"):
                self._generation.emit(Token(text))
            self._reason = choice.get("finish_reason") or self._reason
        if (usage := chunk.get("usage")) is not None:
            self.closed = True
            details = usage.get("prompt_tokens_details") or {}
            self._generation.emit(
                Finished(
                    self._reason,
                    Usage(
                        prompt_tokens=usage["prompt_tokens"],
                        cached_tokens=details.get("cached_tokens", 0),
                        completion_tokens=usage["completion_tokens"],
                    ),
                )
            )


def check_gguf(path: Path) -> None:
    """Raise EngineError unless `path` begins as a GGUF file does.

    llama.cpp says only "failed to init"; and a saved error page is a known guest (jan#3521).
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EngineError(f"{path}: want a GGUF model, have: {error.strerror}") from error
    if magic != b"GGUF":
        raise EngineError(f"{path}: want a GGUF model, have a file that begins with {magic!r}")


def _llama_body(request: ChatRequest, config: ServerConfig, id_slot: int | None) -> dict[str, Any]:
    messages = request.messages
    if config.system_prompt is not None and all(m.role != "system" for m in messages):
        messages = (Message(role="system", content=config.system_prompt), *messages)
    body: dict[str, Any] = {
        "messages": [{"role": m.role, "content": m.content} for m in messages],
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        # A call for each batch of the prompt: what lets a disconnect end a long prefill.
        "return_progress": True,
        "cache_prompt": True,
        **request.sampling,
    }
    if request.stop:
        body["stop"] = list(request.stop)
    if id_slot is not None:
        body["id_slot"] = id_slot
    return body


def _error_of(error: dict[str, Any]) -> Exception:
    message = str(error.get("message", "no reason given"))
    if error.get("type") == "exceed_context_size_error":
        return PromptTooLongError(int(error["n_prompt_tokens"]), int(error["n_ctx"]))
    if error.get("code") == 400:
        return RefusedError(message)
    return EngineError(message)


def _runtime_directory() -> str | None:
    """systemd's RuntimeDirectory= where there is one, else where Python puts temporary files."""
    directory = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return directory if directory and os.access(directory, os.W_OK) else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
