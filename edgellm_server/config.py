"""Environment -> ServerConfig. Every fault is reported at once, each with its variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

# A batch is never interrupted: what arrives meanwhile waits for it. docs/tuning.md has the figures.
DEFAULT_N_BATCH = 64
DEFAULT_N_CTX = 2048
DEFAULT_APP = "edgellm_server.app:app"
DEFAULT_MAX_TOKENS = 256
DEFAULT_MAX_QUEUE = 8
DEFAULT_MAX_BODY_BYTES = 1024 * 1024
DEFAULT_ENGINE_STALL_S = 120

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class ConfigError(Exception):
    """The environment does not make a server. `faults` holds one sentence a fault."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What one server process is to do. `n_ctx` is tokens of one slot, not of all slots."""

    engine: Literal["llama", "forward"]
    model_path: Path  # not read by the forwarding engine
    model_name: str
    n_threads: int
    n_threads_batch: int
    n_ctx: int
    n_parallel: int
    n_batch: int
    cache_ram_mib: int
    mlock: bool
    max_tokens: int
    max_queue: int
    max_body_bytes: int
    system_prompt: str | None
    # sha256 of each accepted key, lower-case hex; None: no key asked for.
    api_key_hashes: tuple[str, ...] | None
    # CPUs of each worker, where there are several; (): the process stays where it was started.
    worker_cpus: tuple[tuple[int, ...], ...]
    # The forwarding engine's: an OpenAI-compatible server on loopback. "": its first model.
    upstream_url: str
    upstream_model: str
    upstream_key: str | None
    web_ui: bool
    cors_origins: tuple[str, ...]
    log_prompts: bool
    # An engine that makes no progress on running work for this long is hung.
    engine_stall_s: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ServerConfig:
        """EDGELLM_* variables -> ServerConfig. Raises ConfigError with every fault found.

        Required: EDGELLM_MODEL_NAME, and for the llama engine EDGELLM_MODEL_PATH and
        EDGELLM_N_THREADS, for the forwarding one EDGELLM_UPSTREAM_URL. The rest has a default.
        Reads the files that EDGELLM_*_FILE name; leaves the model file alone (whether it loads is
        the engine's to say).
        """
        read = _Reader(environ)
        engine = read.choice("EDGELLM_ENGINE", ("llama", "forward"))
        is_llama = engine == "llama"
        n_threads = read.integer("EDGELLM_N_THREADS", None if is_llama else 1, 1, 512)
        n_ctx = read.integer("EDGELLM_N_CTX", DEFAULT_N_CTX, 64, 1_048_576)
        max_tokens = read.integer("EDGELLM_MAX_TOKENS", DEFAULT_MAX_TOKENS, 1, 1_048_576)
        config = cls(
            engine=cast(Literal["llama", "forward"], engine),
            model_path=Path(
                read.text("EDGELLM_MODEL_PATH", "the path of a GGUF file") if is_llama else ""
            ),
            model_name=read.text("EDGELLM_MODEL_NAME", "the id to serve in /v1/models"),
            n_threads=n_threads,
            n_threads_batch=read.integer("EDGELLM_N_THREADS_BATCH", n_threads, 1, 512),
            n_ctx=n_ctx,
            n_parallel=read.integer("EDGELLM_N_PARALLEL", 1, 1, 64),
            n_batch=read.integer("EDGELLM_N_BATCH", DEFAULT_N_BATCH, 1, 8192),
            # llama.cpp's own default is 8192 MiB: on an edge box that is the box.
            cache_ram_mib=read.integer("EDGELLM_CACHE_RAM_MIB", 0, 0, 1_048_576),
            mlock=read.flag("EDGELLM_MLOCK"),
            max_tokens=max_tokens,
            max_queue=read.integer("EDGELLM_MAX_QUEUE", DEFAULT_MAX_QUEUE, 0, 10_000),
            max_body_bytes=read.integer(
                "EDGELLM_MAX_BODY_BYTES", DEFAULT_MAX_BODY_BYTES, 1024, 1024**3
            ),
            system_prompt=read.system_prompt("EDGELLM_SYSTEM_PROMPT_FILE"),
            api_key_hashes=read.api_key_hashes("EDGELLM_API_KEYS_FILE"),
            worker_cpus=read.worker_cpus("EDGELLM_WORKER_CPUS"),
            upstream_url="" if is_llama else read.loopback_url("EDGELLM_UPSTREAM_URL"),
            upstream_model=environ.get("EDGELLM_UPSTREAM_MODEL", "").strip(),
            upstream_key=read.secret("EDGELLM_UPSTREAM_KEY_FILE"),
            web_ui=read.flag("EDGELLM_WEB_UI", default="1"),
            cors_origins=read.origins("EDGELLM_CORS_ORIGINS"),
            log_prompts=read.flag("EDGELLM_LOG_PROMPTS"),
            engine_stall_s=read.integer(
                "EDGELLM_ENGINE_STALL_S", DEFAULT_ENGINE_STALL_S, 1, 86_400
            ),
        )
        if not read.faults and is_llama and max_tokens >= n_ctx:
            read.faults.append(
                f"EDGELLM_MAX_TOKENS: want fewer than EDGELLM_N_CTX ({n_ctx}), have {max_tokens}: "
                "no room is left for a prompt"
            )
        if read.faults:
            raise ConfigError(tuple(read.faults))
        return config


class _Reader:
    """Reads variables, collects faults, and answers with a stand-in after a fault."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.faults: list[str] = []

    def _fault(self, name: str, want: str, have: str) -> None:
        self.faults.append(f"{name}: want {want}, have {have}")

    def text(self, name: str, want: str) -> str:
        value = self._environ.get(name, "").strip()
        if not value:
            self._fault(name, want, "nothing")
        return value

    def integer(self, name: str, default: int | None, lowest: int, highest: int) -> int:
        want = f"a whole number from {lowest} to {highest}"
        raw = self._environ.get(name, "").strip()
        if not raw:
            if default is None:
                self._fault(name, want, "nothing")
                return lowest
            return default
        # int() would also take "1_0", " 7" and other scripts' digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", raw) or not lowest <= int(raw) <= highest:
            self._fault(name, want, repr(raw))
            return lowest
        return int(raw)

    def flag(self, name: str, default: str = "0") -> bool:
        raw = self._environ.get(name, "").strip() or default
        if raw not in ("0", "1"):
            self._fault(name, "0 or 1", repr(raw))
        return raw == "1"

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The first of `choices` where the variable is not set."""
        raw = self._environ.get(name, "").strip() or choices[0]
        if raw not in choices:
            self._fault(name, " or ".join(choices), repr(raw))
            return choices[0]
        return raw

    def loopback_url(self, name: str) -> str:
        """'http://127.0.0.1:8080/v1/' -> the same without the last slash."""
        want = "an http:// URL on loopback, such as http://127.0.0.1:8080/v1"
        raw = self.text(name, want)
        if not raw:
            return ""
        try:
            url = urlsplit(raw)
            url.port  # noqa: B018  # raises where it is no number
            local = url.hostname == "localhost" or ip_address(url.hostname or "").is_loopback
        except ValueError:
            local = False
        if not local or url.scheme != "http" or url.username or url.query or url.fragment:
            self._fault(name, want, repr(raw))
        return raw.rstrip("/")

    def origins(self, name: str) -> tuple[str, ...]:
        """'https://a.example, http://b:8080' -> each, as browsers write an Origin header."""
        raw = self._environ.get(name, "")
        origins = tuple(origin.strip() for origin in raw.split(",") if origin.strip())
        for origin in origins:
            # No "*": whoever wants every page of the web to ask this host can name a proxy's.
            if not re.fullmatch(
                r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?", origin
            ):
                self._fault(name, "origins such as https://panel.example:8443", repr(origin))
        return origins

    def secret(self, name: str) -> str | None:
        """The one line of a file."""
        text = self._file_text(name)
        if text is None:
            return None
        secret = text.strip()
        if not secret or not secret.isascii() or not secret.isprintable():
            self._fault(name, "a file with one key in it", f"{self._environ[name]} (no such key)")
        return secret

    def worker_cpus(self, name: str) -> tuple[tuple[int, ...], ...]:
        """'0-2,4/5-7' -> ((0, 1, 2, 4), (5, 6, 7)): the kernel's cpulists, one a worker."""
        raw = self._environ.get(name, "").strip()
        workers: list[tuple[int, ...]] = []
        for cpulist in raw.split("/") if raw else ():
            cpus: list[int] = []
            for part in cpulist.split(","):
                found = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
                if found is None:
                    self._fault(name, "cpulists such as 0-3/4-7, one a worker", repr(raw))
                    return ()
                cpus.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
            workers.append(tuple(cpus))
        return tuple(workers)

    def _file_text(self, name: str) -> str | None:
        path = self._environ.get(name, "").strip()
        if not path:
            return None
        try:
            return Path(path).read_text(encoding="utf-8")
        except OSError as error:
            self._fault(name, "a readable file", f"{path} ({error.strerror})")
        except UnicodeDecodeError:
            self._fault(name, "a file of UTF-8 text", f"{path} (not UTF-8)")
        return None

    def system_prompt(self, name: str) -> str | None:
        text = self._file_text(name)
        if text is None:
            return None
        if not text.strip():
            self._fault(name, "a file with a prompt in it", f"{self._environ[name]} (empty)")
        return text.strip()

    def api_key_hashes(self, name: str) -> tuple[str, ...] | None:
        text = self._file_text(name)
        if text is None:
            return None
        hashes: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            if not _SHA256_HEX.fullmatch(entry):
                # The line is not quoted: it may be a key in plain text.
                self._fault(
                    name,
                    "lines of 64 lower-case hex digits (sha256 of a key)",
                    f"something else in line {number} of {self._environ[name]}",
                )
                continue
            hashes.append(entry)
        if not hashes and not self.faults:
            # No key would fit: the server would refuse everyone, which nobody asked for.
            self._fault(name, "at least one key hash", f"{self._environ[name]} (none in it)")
        return tuple(hashes)
