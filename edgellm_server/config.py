"""Environment -> ServerConfig. Every fault is reported at once, each with its variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# A short request behind a ~900-token prefill waited 1.75 s with 128 and 7.97 s with llama.cpp's
# default of 2048, since a batch is never interrupted (docs/tuning.md).
DEFAULT_N_BATCH = 128
DEFAULT_N_CTX = 2048
DEFAULT_MAX_TOKENS = 256
DEFAULT_MAX_QUEUE = 8
DEFAULT_MAX_BODY_BYTES = 1024 * 1024

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class ConfigError(Exception):
    """The environment does not make a server. `faults` holds one sentence a fault."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What one server process is to do. `n_ctx` is tokens of one slot, not of all slots."""

    model_path: Path
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

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> ServerConfig:
        """EDGELLM_* variables -> ServerConfig. Raises ConfigError with every fault found.

        Required: EDGELLM_MODEL_PATH, EDGELLM_MODEL_NAME, EDGELLM_N_THREADS. The rest has a
        default. Reads the files that EDGELLM_SYSTEM_PROMPT_FILE and EDGELLM_API_KEYS_FILE name;
        leaves the model file alone (whether it loads is the engine's to say).
        """
        read = _Reader(environ)
        n_threads = read.integer("EDGELLM_N_THREADS", None, 1, 512)
        n_ctx = read.integer("EDGELLM_N_CTX", DEFAULT_N_CTX, 64, 1_048_576)
        max_tokens = read.integer("EDGELLM_MAX_TOKENS", DEFAULT_MAX_TOKENS, 1, 1_048_576)
        config = cls(
            model_path=Path(read.text("EDGELLM_MODEL_PATH", "the path of a GGUF file")),
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
        )
        if not read.faults and max_tokens >= n_ctx:
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

    def flag(self, name: str) -> bool:
        raw = self._environ.get(name, "").strip()
        if raw not in ("", "0", "1"):
            self._fault(name, "0 or 1", repr(raw))
        return raw == "1"

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
