"""What the roll-out would plan for this machine, as environment: nothing is tuned by hand."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from typing import Any

from bench.weights import Weights
from edgellm.facts.host_profile import probe_command
from edgellm.parse import parse_profile
from edgellm.render import release_files
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, plan_tuning


def plan_for_this_machine(weights: Weights, **overrides: Any) -> tuple[Settings, TuningPlan]:
    """`overrides` are settings by their names, for trying others than the default ones."""
    told = subprocess.run(
        ["sh", "-c", probe_command()], capture_output=True, text=True, check=False
    ).stdout
    profile = parse_profile(told, control_time_s=time.time())
    data = {
        "model_name": weights.name,
        "model_source": f"file:{weights.path}",
        "model_sha256": weights.sha256,
        "model_size_bytes": weights.size_bytes,
    }
    settings = Settings.from_host_data(data | overrides, host="bench")
    return settings, plan_tuning(profile, settings)


def without_policy(plan: TuningPlan) -> TuningPlan:
    """The same threads and slots, started as any service is."""
    return replace(plan, use_chrt=False, cpu_weight=None, omp_wait_policy=None)


def server_environ(plan: TuningPlan, settings: Settings, weights: Weights) -> dict[str, str]:
    """What the roll-out would write into server.env, with the model where it lies here."""
    (file,) = (f for f in release_files(plan, settings, ()) if f.name == "server.env")
    lines = (line for line in file.content.splitlines() if line and not line.startswith("#"))
    environ = dict(line.split("=", 1) for line in lines)
    return environ | {"EDGELLM_MODEL_PATH": str(weights.path)}


def command_prefix(plan: TuningPlan) -> list[str]:
    """As templates/entrypoint.sh.j2 does, less numactl and taskset: all of this machine is used."""
    if not plan.use_chrt:
        return []
    return ["chrt", plan.scheduling.chrt_flag, str(plan.scheduling.priority)]


def plan_as_json(plan: TuningPlan) -> dict[str, Any]:
    return {
        "n_threads": plan.engine.n_threads,
        "n_threads_batch": plan.engine.n_threads_batch,
        "n_ctx": plan.engine.n_ctx,
        "n_parallel": plan.engine.n_parallel,
        "n_batch": plan.engine.n_batch,
        "cache_ram_mib": plan.engine.cache_ram_mib,
        "mlock": plan.engine.mlock,
        "workers": plan.workers,
        "scheduling": plan.scheduling.policy,
        "cpu_weight": plan.cpu_weight,
        "omp_wait_policy": plan.omp_wait_policy,
    }
