"""What holds of every plan, whatever the host and the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import settings as run_with
from hypothesis import strategies as st

from edgellm.cpuset import CpuSet
from edgellm.fitness import check_host
from edgellm.hardware import CpuCluster, HostProfile, NumaNode, Swap, plain
from edgellm.parse import parse_profile
from edgellm.settings import Settings
from edgellm.tuning import (
    HOUSEKEEPING_FROM_CORES,
    available_memory,
    physical_cores,
    plan_tuning,
    visible_cpus,
    worker_bytes,
)

HARDWARE = Path(__file__).parents[1] / "hardware"
BOARDS = tuple(
    parse_profile(path.read_text(encoding="ascii"), control_time_s=None)
    for path in sorted(HARDWARE.glob("*/probe.txt"))
)
MIB = 1 << 20

speeds = st.sampled_from([None, 250, 397, 760, 905, 1024])
capacities = st.integers(min_value=256 * MIB, max_value=256 << 30)


def split(draw: st.DrawFn, cpus: CpuSet, parts: int) -> list[CpuSet]:
    """`cpus` dealt out at random to at most `parts` sets."""
    owner = {cpu: draw(st.integers(min_value=0, max_value=parts - 1)) for cpu in cpus.cpus}
    sets = [CpuSet.of(c for c in cpus.cpus if owner[c] == part) for part in range(parts)]
    return [part for part in sets if part]


@st.composite
def profiles(draw: st.DrawFn) -> HostProfile:
    base = draw(st.sampled_from(BOARDS))
    numbers = draw(st.sets(st.integers(min_value=0, max_value=40), min_size=1, max_size=24))
    online = CpuSet.of(numbers)
    some = st.sets(st.sampled_from(online.cpus), min_size=1).map(CpuSet.of)
    clusters = tuple(
        CpuCluster(
            cpus=part,
            cpu_capacity=draw(speeds),
            max_freq_khz=draw(speeds),
            core_type=draw(st.sampled_from([None, "Cortex-A55", "core", "atom"])),
        )
        for part in split(draw, online, 3)
    )
    # SMT siblings are of one kind
    siblings = tuple(
        part
        for cluster in clusters
        for part in split(draw, cluster.cpus, max(1, len(cluster.cpus) // 2))
        if len(part) > 1
    )
    nodes = tuple(
        NumaNode(node=n, cpus=part, mem_total_bytes=draw(st.none() | capacities))
        for n, part in enumerate(split(draw, online, 2))
    )
    total = draw(capacities)
    swaps = tuple(
        Swap(path=path, kind="partition", size_bytes=1 << 30, used_bytes=0, priority=-2)
        for path in draw(st.sets(st.sampled_from(["/dev/zram0", "/swap.img"])))
    )
    return replace(
        base,
        cpus_online=online,
        clusters=clusters,
        smt_siblings=draw(st.sampled_from([(), siblings])),
        numa_nodes=draw(st.sampled_from([(), nodes])),
        kernel=replace(
            base.kernel,
            isolated_cpus=draw(st.just(CpuSet(cpus=())) | some),
            zram_module=draw(st.booleans()),
        ),
        cgroup=replace(
            base.cgroup,
            effective_cpus=draw(st.none() | some),
            quota_cpus=draw(st.none() | st.floats(min_value=0.05, max_value=64)),
            controllers=tuple(draw(st.sets(st.sampled_from(["cpu", "cpuset", "memory"])))),
        ),
        tools=replace(
            base.tools,
            numactl=draw(st.booleans()),
            numactl_works=draw(st.booleans()),
            chrt=draw(st.booleans()),
            zram_manager=draw(st.sampled_from([None, "edgellm", "zram-tools"])),
        ),
        swaps=swaps,
        mem_total_bytes=total,
        mem_available_bytes=draw(st.integers(min_value=0, max_value=total)),
    )


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    data: dict[str, Any] = {
        "model_name": "qwen2.5-0.5b-instruct",
        "model_source": "file:/model.gguf",
        "model_sha256": "0" * 64,
        "model_size_bytes": draw(st.sampled_from([98_362_432, 428_730_208])),
    }
    optional = {
        "threads": st.integers(min_value=1, max_value=64),
        "workers": st.integers(min_value=1, max_value=8),
        "cpus": st.sampled_from(["0", "0-3", "2,5-7", "40", "9-1"]),
        "n_parallel": st.integers(min_value=1, max_value=8),
        "zram_size_bytes": st.integers(min_value=MIB, max_value=1 << 40),
        "mlock": st.booleans(),
        "install_packages": st.booleans(),
        "numa": st.sampled_from(["auto", "off"]),
    }
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        data[name] = draw(optional[name])
    return Settings.from_host_data(data, host="edge-01")


@run_with(max_examples=150, deadline=None)
@given(profiles(), settings())
def test_invariants_of_every_plan(profile: HostProfile, wanted: Settings) -> None:
    plan = plan_tuning(profile, wanted)
    cpus, visible = set(plan.cpus.cpus), set(visible_cpus(profile).cpus)

    # within the online CPUs and the cgroup's mask
    assert cpus
    assert cpus <= set(profile.cpus_online.cpus)
    assert cpus <= visible
    for narrower in (plan.allowed_cpus, plan.affinity, plan.numa and plan.numa.cpus):
        assert narrower is None or narrower == plan.cpus

    # threads fit, and a quota can feed them
    engine = plan.engine
    assert engine.n_threads >= 1
    assert engine.n_threads * plan.workers <= len(plan.cpus)
    assert engine.n_threads_batch * plan.workers <= len(plan.cpus)
    if profile.cgroup.quota_cpus is not None:
        assert engine.n_threads * plan.workers <= max(1, int(profile.cgroup.quota_cpus))

    # each worker has CPUs of its own
    assert len(plan.worker_cpus) == plan.workers
    shares = [cpu for part in plan.worker_cpus for cpu in part.cpus]
    assert len(shares) == len(set(shares))
    assert set(shares) <= cpus
    assert all(len(part) >= engine.n_threads for part in plan.worker_cpus)

    # a core stays with the system where there are four, unless the operator names the CPUs
    cores = physical_cores(profile, visible_cpus(profile))
    if wanted.cpus is None and len(cores) >= HOUSEKEEPING_FROM_CORES:
        free = visible - cpus
        assert free
        assert profile.kernel.isolated_cpus or any(set(core.cpus) <= free for core in cores)

    # memory
    assert plan.memory_needed_bytes == plan.workers * worker_bytes(
        wanted, engine.n_parallel, engine.cache_ram_mib
    )
    if plan.workers > 1 or engine.n_parallel > 1:
        assert plan.memory_needed_bytes <= available_memory(profile)
    if engine.mlock and wanted.mlock is None:
        assert 2 * wanted.model_size_bytes * plan.workers < available_memory(profile)

    # swap
    if plan.zram.size_bytes is not None:
        assert plan.zram.size_bytes <= profile.mem_total_bytes // 2
        assert plan.zram.manager in ("zram-generator", "own-unit")
    assert plan.swappiness is None or 0 <= plan.swappiness <= 200

    # every reason says something, once
    assert all(r.text and r.knob for r in plan.reasons)
    assert len({(r.knob, r.text) for r in plan.reasons}) == len(plan.reasons)


@run_with(max_examples=50, deadline=None)
@given(profiles(), settings())
def test_plan_and_faults_are_functions_of_their_arguments(
    profile: HostProfile, wanted: Settings
) -> None:
    assert plan_tuning(profile, wanted) == plan_tuning(profile, wanted)
    faults = check_host(profile, wanted, group_arch=profile.arch, disk_needed_bytes=10**9)
    assert all(error.fix and error.want and error.have for error in faults)
    assert isinstance(plain(profile), dict)
