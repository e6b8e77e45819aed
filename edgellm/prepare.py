"""One host -> its Context: settings, profile, plan, and the files of its release.

Everything that can be wrong with a host is found here, before anything on it changes, and fails
that host alone.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gevent.lock import RLock
from pyinfra import logger
from pyinfra.context import ctx_state

from edgellm import drift, inspection, layout, recorder, render, report_files
from edgellm.desired import DesiredState, desired_state
from edgellm.errors import EdgellmError, SettingsError
from edgellm.facts.host_profile import HostProfileFact
from edgellm.facts.paths import ArtifactsWhole
from edgellm.facts.reading import read
from edgellm.fitness import check_arch, check_host
from edgellm.hardware import Arch, HostProfile
from edgellm.health import LastGood, TtftBudget
from edgellm.measured import ResultKey, apply_measured, result_key
from edgellm.model_source import fetch_model
from edgellm.operations import upstream
from edgellm.operations.containment import as_edgellm_error
from edgellm.operations.smoke import SmokeTest
from edgellm.operations.transfer import Transfer
from edgellm.release import ModelArtifact, Release, ReleaseFile, Runtime
from edgellm.reports.history import last_good
from edgellm.runtime_build import build_runtime
from edgellm.server_app import app_files
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, plan_tuning

if TYPE_CHECKING:
    from pyinfra.api import Host

SHORTEST_API_KEY = 20  # characters; a key that can be guessed is worse than loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All that the steps of one host need; nothing in it is decided later."""

    settings: Settings
    profile: HostProfile
    plan: TuningPlan  # with what this host's own trials say, where there is a result
    planned: TuningPlan  # without
    measured_key: ResultKey | None  # what a result must be of; None: no model of ours
    model: ModelArtifact | None  # None: another server on the host has it
    runtime: Runtime
    release: Release
    desired: DesiredState
    api_key_hashes: tuple[str, ...]  # () where no key is asked for
    probe_key: str | None
    upstream_key: str | None
    last_good: LastGood | None = None  # of this host, with the same model

    @property
    def model_transfer(self) -> Transfer | None:
        if self.model is None:
            return None
        return Transfer(
            label=f"model {self.model.name}",
            source=self.model.path,
            path=layout.model_path(self.model.sha256),
            sha256=self.model.sha256,
            size_bytes=self.model.size_bytes,
            deadline_s=self.settings.transfer_deadline_s,
        )

    @property
    def runtime_transfer(self) -> Transfer:
        return Transfer(
            label=f"runtime {self.runtime.id}",
            source=self.runtime.archive,
            path=f"{layout.runtime_directory(self.runtime.id)}.tar.gz",
            sha256=self.runtime.sha256,
            size_bytes=self.runtime.size_bytes,
            deadline_s=self.settings.transfer_deadline_s,
        )

    @property
    def smoke_test(self) -> SmokeTest:
        return SmokeTest(
            url=render.local_url(self.settings),
            model_name=self.settings.model_name,
            needs_key=self.probe_key is not None,
            requests=self.settings.smoke_requests,
            max_tokens=self.settings.smoke_max_tokens,
            load_deadline_s=self.settings.load_deadline_s,
            first_token_deadline_s=self.settings.first_token_deadline_s,
            stall_deadline_s=self.settings.stall_deadline_s,
            request_deadline_s=self.settings.request_deadline_s,
            budget=TtftBudget.from_settings(self.settings, last_good=self.last_good),
            concurrency=self.settings.smoke_concurrency,
            kernel=self.profile.kernel.release,
            from_control=self.settings.verify_from == "control",
            probe_key=self.probe_key,
        )


def context_for(host: Host) -> Context | None:
    """None: the host cannot be rolled out to, has been failed, and its reason noted."""
    found = context_or_reason(host)
    if isinstance(found, EdgellmError):
        _fail(host, found)
        return None
    return found


def context_or_reason(host: Host) -> Context | EdgellmError:
    """As context_for, for who can do something on a host that cannot be rolled out to."""
    try:
        return _context_for(host)
    except Exception as error:
        return as_edgellm_error(error)


def secrets_of(host: Host) -> tuple[str, ...]:
    """Every key that this machine knows of for the host, and the SHA-256 of each: what must not be
    shown. Whatever is wrong with the host's settings."""
    keys = []
    for setting in ("api_key_env", "upstream_key_env"):
        names = str(host.data.dict().get(setting) or "").split(",")
        keys += [os.environ.get(name, "") for name in names]
    keys = [key for key in keys if key]
    keys += [_probe_key(key, host.name) for key in keys]
    return (*keys, *(hashlib.sha256(key.encode()).hexdigest() for key in keys))


def _context_for(host: Host) -> Context:
    settings = Settings.from_host_data(host.data.dict(), host=host.name)
    api_keys = _keys("api_key_env", settings.api_key_env, host.name, SHORTEST_API_KEY)
    upstream_keys = _keys("upstream_key_env", settings.upstream_key_env, host.name, 1)
    upstream_key = upstream_keys[0] if upstream_keys else None
    own_app = _app_files(settings)
    model = _model(settings) if settings.holds_model else None
    recorder.note_model(host, settings.model_name, None if model is None else model.sha256)

    profile = read(HostProfileFact)
    recorder.note_profile(host, profile)
    mismatch = check_arch(profile, _group_arch(host))
    if mismatch is not None:  # before a runtime is built for an architecture that nobody asked for
        raise mismatch
    runtime = None if profile.arch is None else _runtime(profile.arch)
    faults = check_host(profile, settings, group_arch=_group_arch(host), disk_needed_bytes=0)
    if faults:
        raise _first_of(host, faults)
    assert runtime is not None  # check_host has refused an architecture without one

    planned = plan_tuning(profile, settings)
    plan, measured_key = planned, None
    if model is not None:
        measured_key = result_key(
            profile, model_sha256=model.sha256, runtime_id=runtime.id, plan=planned
        )
        plan, said = apply_measured(planned, profile, measured_key)
        if said is not None:
            host.log(f"measured choice: {said}")
    probe_key = _probe_key(api_keys[0], host.name) if api_keys else None
    keys = api_keys if probe_key is None else (*api_keys, probe_key)
    hashes = tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    upstream_key_hash = None
    if upstream_key is not None:
        upstream_key_hash = hashlib.sha256(upstream_key.encode()).hexdigest()
    release = Release.of(
        model_sha256=None if model is None else model.sha256,
        runtime_id=runtime.id,
        files=render.release_files(
            plan, settings, hashes, upstream_key_hash=upstream_key_hash, app_files=own_app
        ),
    )
    desired = desired_state(
        settings=settings,
        plan=plan,
        release=release,
        text=render.text,
        api_keys_text=None if probe_key is None else render.api_keys_file(hashes),
        probe_key=probe_key,
        upstream_key=upstream_key,
        upstream_drop_in=None if settings.upstream_unit is None else render.upstream_drop_in(plan),
    )
    # By Python scripts: a host without Python was refused for that above, not for its silence
    observed = inspection.observed_state(desired)
    recorder.note_found(
        host,
        drift.compare(desired, observed),
        repairable=drift.drifted_before(desired, observed),
        is_first=drift.is_first_installation(observed),
    )
    if observed.service is not None:
        recorder.note_release(host, observed.service.running_release)
    faults = check_host(
        profile,
        settings,
        group_arch=_group_arch(host),
        disk_needed_bytes=_disk_needed_bytes(desired, model, runtime),
    )
    if faults:
        raise _first_of(host, faults)
    if settings.upstream_unit is not None:
        upstream.require(settings.upstream_unit)
    recorder.note_plan(host, plan)
    return Context(
        settings=settings,
        profile=profile,
        plan=plan,
        planned=planned,
        measured_key=measured_key,
        model=model,
        runtime=runtime,
        release=release,
        desired=desired,
        api_key_hashes=hashes,
        probe_key=probe_key,
        upstream_key=upstream_key,
        last_good=_last_good(host.name, None if model is None else model.sha256),
    )


def _last_good(name: str, model_sha256: str | None) -> LastGood | None:
    """As this control machine has noted it. What cannot be read is compared with nothing, as on
    the first day."""
    try:
        runs = _earlier_runs(recorder.reports_dir())
    except OSError:
        return None
    return last_good(runs.get(name, ()), model_sha256)


_earlier_runs = cache(report_files.earlier_runs)


def _fail(host: Host, error: EdgellmError) -> None:
    error = error if error.host else error.for_host(host.name)
    recorder.note_failure(host, error)
    host.log_styled(str(error), fg="red", log_func=logger.error)
    ctx_state.get().fail_hosts({host})


def _group_arch(host: Host) -> Arch | None:
    return next((arch for arch in Arch if arch.value in host.groups), None)


def _first_of(host: Host, faults: tuple[EdgellmError, ...]) -> EdgellmError:
    """The one that the report shows; the others are on the screen."""
    for fault in faults[1:]:
        host.log(str(fault.for_host(host.name)), logger.error)
    return faults[0]


def _disk_needed_bytes(desired: DesiredState, model: ModelArtifact | None, runtime: Runtime) -> int:
    """What this roll-out will still write under /opt/edgellm."""
    whole = read(ArtifactsWhole, **inspection.artifacts(desired))
    needed_bytes = 0
    if model is not None and not whole[layout.model_path(model.sha256)]:
        needed_bytes += model.size_bytes
    if not whole[desired.runtime_directory]:
        needed_bytes += runtime.size_bytes + runtime.unpacked_size_bytes
    return needed_bytes


def _keys(setting: str, names: str | None, host: str, shortest: int) -> tuple[str, ...]:
    """The keys in the environment variables that a setting names, each once. Raises SettingsError.

    No value of one is in any message.
    """
    keys = []
    for name in names.split(",") if names else ():
        key = os.environ.get(name, "")
        if len(key) < shortest or not key.isascii() or not key.isprintable():
            raise SettingsError(
                host=host,
                what=f"{setting}: the environment variable {name}",
                want=f"an API key of {shortest} or more printable ASCII characters",
                have="none" if not key else "one that is too short or has other characters",
                fix=f"export {name}=$(openssl rand -hex 24), and keep it"
                if setting == "api_key_env"
                else f"export {name} with the key that the upstream wants",
            )
        keys.append(key)
    return tuple(dict.fromkeys(keys))


def _app_files(settings: Settings) -> tuple[ReleaseFile, ...]:
    if settings.server_app is None or settings.server_app_dir is None:
        return ()
    return app_files(Path(settings.server_app_dir), settings.server_app)


def _probe_key(api_key: str, host: str) -> str:
    """A key of the host's own for its smoke test: the operator's key never lies on a host."""
    return hmac.new(api_key.encode(), f"edgellm probe {host}".encode(), "sha256").hexdigest()


def cache_dir() -> Path:
    """Where the control machine keeps models and runtimes: EDGELLM_CACHE_DIR, or ./.cache."""
    return Path(os.environ.get("EDGELLM_CACHE_DIR") or ".cache").resolve()


# Hosts are prepared in greenlets at once; the first fetches or builds, the others wait for it.
_lock = RLock()
_models: dict[tuple[str, str], ModelArtifact | EdgellmError] = {}
_runtimes: dict[Arch, Runtime | EdgellmError] = {}


def _model(settings: Settings) -> ModelArtifact:
    key = (settings.model_source, settings.model_sha256)
    with _lock:
        if key not in _models:
            try:
                _models[key] = fetch_model(
                    settings, cache_dir(), progress=_Progress(f"model {settings.model_name}")
                )
            except EdgellmError as error:
                _models[key] = error
        found = _models[key]
    if isinstance(found, EdgellmError):
        raise found
    return found


def _runtime(arch: Arch) -> Runtime:
    with _lock:
        if arch not in _runtimes:
            try:
                _runtimes[arch] = build_runtime(arch, cache_dir())
            except EdgellmError as error:
                _runtimes[arch] = error
        found = _runtimes[arch]
    if isinstance(found, EdgellmError):
        raise found
    return found


class _Progress:
    """(done, total) in bytes -> a line every few seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.shown_at = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self.shown_at >= 5:
            self.shown_at = now
            total = f" of {total_bytes / 1e6:.0f}" if total_bytes else ""
            logger.info(f"    {self.label}: {done_bytes / 1e6:.0f}{total} MB")
