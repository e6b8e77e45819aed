"""What generates tokens: the Engine protocol, and llama.cpp in this process.

The other engine, which forwards to a server on loopback, is in forward.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from edgellm_server.config import ServerConfig
from edgellm_server.notify import notify
from edgellm_server.request import ChatRequest, CompletionRequest, Message
from edgellm_server.slot_choice import SlotState, choose_slot, common_chars
from edgellm_server.stream import Usage

# llama.cpp's levels: 1 errors, 2 warnings, 3 info. Level 2 writes two lines for each request whose
# prompt is cached; level 1 leaves what explains a failed load.
_LOG_ERRORS_ONLY: Final = 1

# A prompt with more to compute than this many batches is long: others are not made to wait for it.
_LONG_BATCHES: Final = 2
# For choosing a slot only. English has some 4 characters a token, other scripts fewer.
_CHARS_PER_TOKEN: Final = 3
_READ_BYTES: Final = 8 * 1024 * 1024
_SAMPLES: Final = 64


# For one token: to warm up, and to see whether an engine works.
SMALLEST_CHAT: Final = ChatRequest(messages=(Message(role="user", content="Hi"),), max_tokens=1)


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


class BusyError(Exception):
    """The engine takes no more work now. Where it says until when, in `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The engine's own clock, in ms: computing the prompt, generating the tokens."""

    prompt_ms: float
    predicted_ms: float


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
    timings: Timings | None = None


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
        """Accepted, Tokens, Finished.

        Raises PromptTooLongError, RefusedError, BusyError or EngineError.
        """
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

    def complete(self, request: CompletionRequest) -> Generation:
        """As `chat`, for a text without a chat template."""

    def silent_s(self) -> float:
        """Seconds since the engine did anything for the work it has; 0 without. From any thread."""

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
        self._slots = [SlotState(index) for index in range(config.n_parallel)]
        self._long_chars = _LONG_BATCHES * config.n_batch * _CHARS_PER_TOKEN
        self._n_started = 0
        self._warming: Generation | None = None
        self._keeping_warm: asyncio.Task[None] | None = None
        self._progress = time.monotonic()
        # handle_chat_completions blocks for the length of an answer: one thread a slot, and one
        # for a warm-up that is just being cancelled.
        self._pool = ThreadPoolExecutor(config.n_parallel + 1, thread_name_prefix="edgellm-slot")

    @property
    def n_slots(self) -> int:
        return self._config.n_parallel

    async def load(self) -> None:
        loop = asyncio.get_running_loop()
        # Loading holds Python's lock, so nothing else runs here meanwhile, not even /health. What
        # takes long, the disk, is therefore waited for before.
        await loop.run_in_executor(self._pool, _read_model_through, self._config.model_path)
        notify("STATUS=loading the model")
        self._server = await loop.run_in_executor(self._pool, self._open_server)
        await self._generate_a_token()
        self._keeping_warm = asyncio.create_task(self._warm_all_slots())

    def chat(self, request: ChatRequest) -> Generation:
        messages = with_system_prompt(request.messages, self._config.system_prompt)
        return self._start(_chat_body(request, messages), _text_of(messages), self._handle_chat)

    def complete(self, request: CompletionRequest) -> Generation:
        body = _llama_body(request) | {"prompt": request.prompt}
        return self._start(body, request.prompt, self._handle_completion)

    def silent_s(self) -> float:
        return time.monotonic() - self._progress if self._running else 0.0

    async def stop(self) -> None:
        if self._keeping_warm is not None:
            self._keeping_warm.cancel()
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

    async def _generate_a_token(self) -> None:
        """What "ready" means: one real token, behind the system prompt where there is one."""
        if self._config.system_prompt is None:
            # The shortest there is: a chat template's head would delay the start by its prefill.
            generation = self.complete(CompletionRequest(prompt="Hi", max_tokens=1))
        else:
            generation = self.chat(SMALLEST_CHAT)
        await first_token(generation, "the warm-up")
        if self._config.system_prompt is None:
            for slot in self._slots:
                slot.text, slot.last_used = "", 0

    async def _warm_all_slots(self) -> None:
        """While nothing else runs: the start of every conversation, into each slot's KV cache."""
        system_prompt = self._config.system_prompt
        start = _text_of(with_system_prompt((), system_prompt))
        messages = with_system_prompt(SMALLEST_CHAT.messages, system_prompt)
        body = _chat_body(SMALLEST_CHAT, messages)
        for slot in self._slots:
            finished = False
            # Not once a slot is used: what it holds is worth more, and begins alike most often.
            while slot.last_used == 0 and not finished:
                if self._running:
                    await asyncio.wait({generation.ended for generation in self._running})
                    continue
                self._warming = Generation()
                reader = _ChunkReader(self._warming, SlotState(slot.index), self._saw_progress)
                self._launch(body, reader, self._handle_chat)
                # A fault here costs a later request some milliseconds, and that one will tell.
                with contextlib.suppress(EngineError, RefusedError, PromptTooLongError):
                    async for _ in self._warming.events():
                        pass
                finished = not self._warming.cancelled
                if reader.prompt_is_cached and slot.last_used == 0:
                    slot.text = start
        self._warming = None

    def _handle_chat(self, body: dict[str, Any], reader: _ChunkReader) -> None:
        self._server.handle_chat_completions(body, reader)

    def _handle_completion(self, body: dict[str, Any], reader: _ChunkReader) -> None:
        self._server.handle_completions(body, reader)

    def _start(self, body: dict[str, Any], text: str, handle: _Handle) -> Generation:
        """`text`: the prompt as far as it decides what a KV cache has of it."""
        if self._warming is not None:
            # A request comes first. llama.cpp ends the warm-up after its batch.
            self._warming.cancel()
        slot = choose_slot(self._slots, text, self._long_chars)
        self._n_started += 1
        slot.busy, slot.last_used = True, self._n_started
        slot.prefill_chars = len(text) - common_chars(slot.text, text)
        slot.text = text
        generation = Generation()
        reader = _ChunkReader(generation, slot, self._saw_progress)

        def ended() -> None:
            slot.busy, slot.prefill_chars = False, 0
            # Cut short in mid-prefill, some of the text is there, but nobody says how much.
            slot.text = text + "".join(reader.text) if reader.prompt_is_cached else ""

        self._launch(body, reader, handle, ended)
        return generation

    def _launch(
        self,
        body: dict[str, Any],
        reader: _ChunkReader,
        handle: _Handle,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        generation = reader.generation
        self._progress = time.monotonic()
        self._running.add(generation)
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, self._run, body | {"id_slot": reader.slot.index}, reader, handle
        )

        def over(_: asyncio.Future[None]) -> None:
            self._running.discard(generation)
            ended()
            generation.end()

        future.add_done_callback(over)

    def _saw_progress(self) -> None:
        self._progress = time.monotonic()

    def _run(self, body: dict[str, Any], reader: _ChunkReader, handle: _Handle) -> None:
        """On a thread of the pool, for as long as the answer takes."""
        generation = reader.generation
        try:
            if not generation.cancelled:
                handle(body, reader)
            if not reader.closed and not generation.cancelled:
                generation.emit(EngineError("llama.cpp ended an answer without finishing it"))
        except ValueError as error:
            # xllamacpp raises what llama.cpp calls an invalid argument: the request's fault.
            generation.emit(RefusedError(_first_line(error)))
        except Exception as error:
            generation.emit(EngineError(f"{type(error).__name__}: {_first_line(error)}"))


_Handle = Callable[[dict[str, Any], "_ChunkReader"], None]


class _ChunkReader:
    """llama.cpp's chunks -> events. Called with a dict or a list of them; True stops it."""

    def __init__(
        self, generation: Generation, slot: SlotState, saw_progress: Callable[[], None]
    ) -> None:
        self.generation = generation
        self.slot = slot
        self._prompt_chars = slot.prefill_chars
        self._saw_progress = saw_progress
        self._accepted = False
        self._reason = "stop"
        self.text: list[str] = []
        self.prompt_is_cached = False
        self.closed = False

    def __call__(self, chunk: dict[str, Any] | list[dict[str, Any]]) -> bool:
        self._saw_progress()
        for item in chunk if isinstance(chunk, list) else [chunk]:
            self._read(item)
        # During prefill too: return_progress makes llama.cpp call for each batch of the prompt.
        return self.generation.cancelled

    def _read(self, chunk: dict[str, Any]) -> None:
        if (error := chunk.get("error")) is not None:
            self.closed = True
            self.generation.emit(_error_of(error))
            return
        if not self._accepted:
            self._accepted = True
            self.generation.emit(Accepted())
        if (progress := chunk.get("prompt_progress")) is not None:
            self._note_prefill(progress)
        for choice in chunk.get("choices") or ():
            # A chat's first chunk has content null: a role, not a token.
            if text := (choice.get("delta") or choice).get("content") or choice.get("text"):
                self.slot.prefill_chars = 0
                self.prompt_is_cached = True
                self.text.append(text)
                self.generation.emit(Token(text))
            self._reason = choice.get("finish_reason") or self._reason
        if (usage := chunk.get("usage")) is not None:
            self.closed = True
            self.prompt_is_cached = True
            details = usage.get("prompt_tokens_details") or {}
            timings = chunk.get("timings") or {}
            self.generation.emit(
                Finished(
                    self._reason,
                    Usage(
                        prompt_tokens=usage["prompt_tokens"],
                        cached_tokens=details.get("cached_tokens", 0),
                        completion_tokens=usage["completion_tokens"],
                    ),
                    Timings(
                        prompt_ms=timings.get("prompt_ms", 0.0),
                        predicted_ms=timings.get("predicted_ms", 0.0),
                    ),
                )
            )

    def _note_prefill(self, progress: dict[str, int]) -> None:
        """How much of the prompt is left, for who chooses the next slot."""
        to_do = progress["total"] - progress["cache"]
        left = progress["total"] - progress["processed"]
        self.slot.prefill_chars = self._prompt_chars * left // to_do if to_do > 0 else 0


async def first_token(generation: Generation, what: str) -> None:
    """Reads an answer to its end. Raises EngineError unless it held a token."""
    completion_tokens = 0
    try:
        async for event in generation.events():
            if isinstance(event, Finished):
                completion_tokens = event.usage.completion_tokens
    except PromptTooLongError as error:
        raise EngineError(f"{what}: the system prompt does not fit: {error}") from error
    except RefusedError as error:
        raise EngineError(f"{what} was refused: {error}") from error
    finally:
        generation.cancel()
    if completion_tokens < 1:
        raise EngineError(f"{what} generated no token")


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


def _read_model_through(path: Path) -> None:
    """Into the page cache, unless it is there already. Tells systemd how far it is."""
    check_gguf(path)
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if _is_cached(file.fileno(), size_bytes):
            return
        buffer, done_bytes, told = bytearray(_READ_BYTES), 0, time.monotonic()
        while n_bytes := file.readinto(buffer):
            done_bytes += n_bytes
            if time.monotonic() - told > 1:
                told = time.monotonic()
                notify(f"STATUS=reading the model: {done_bytes * 100 // max(1, size_bytes)} %")


def _is_cached(descriptor: int, size_bytes: int) -> bool:
    """Whether samples of the file can be had without waiting for the disk."""
    step = max(1, size_bytes // _SAMPLES)
    try:
        for offset in range(0, size_bytes, step):
            os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: not there yet; EOPNOTSUPP: this file system does not tell
        return False
    return True


def with_system_prompt(
    messages: tuple[Message, ...], system_prompt: str | None
) -> tuple[Message, ...]:
    """Ours in front, unless the client brings its own."""
    if system_prompt is None or any(message.role == "system" for message in messages):
        return messages
    return (Message(role="system", content=system_prompt), *messages)


def _text_of(messages: tuple[Message, ...]) -> str:
    """Two conversations that begin alike are texts that begin alike; answers follow seamlessly."""
    text = "".join(f"\x1e{message.role}\x1f{message.content}" for message in messages)
    return f"{text}\x1eassistant\x1f" if messages and messages[-1].role == "user" else text


def _chat_body(request: ChatRequest, messages: tuple[Message, ...]) -> dict[str, Any]:
    body = _llama_body(request)
    body["messages"] = [{"role": m.role, "content": m.content} for m in messages]
    if request.response_format is not None:
        body["response_format"] = request.response_format
    return body


def _llama_body(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
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
    return body


def _error_of(error: dict[str, Any]) -> Exception:
    message = str(error.get("message", "no reason given"))
    if error.get("type") == "exceed_context_size_error":
        return PromptTooLongError(int(error["n_prompt_tokens"]), int(error["n_ctx"]))
    # A grammar asks for text that this model has no token for: code 500, and yet the request's.
    if error.get("code") == 400 or "grammar stack" in message:
        return RefusedError(message)
    return EngineError(message)


def _runtime_directory() -> str | None:
    """systemd's RuntimeDirectory= where there is one, else where Python puts temporary files."""
    directory = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return directory if directory and os.access(directory, os.W_OK) else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
