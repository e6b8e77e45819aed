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
from edgellm.hardware import CpuCluster, CpuFreq, HostProfile, NumaNode, RecordedHost, Swap, plain
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
governors = st.builds(
    CpuFreq,
    governors=st.sampled_from([("powersave",), ("ondemand", "performance")]),
    available=st.sampled_from([(), ("performance", "powersave"), ("ondemand", "performance")]),
)
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
        for n, part in enumerate(split(draw, online, 4))
    )
    total = draw(capacities)
    swaps = tuple(
        Swap(path=path, kind="partition", size_bytes=1 << 30, used_bytes=0, priority=-2)
        for path in draw(st.sets(st.sampled_from(["/dev/zram0", "/swap.img"])))
    )
    return replace(
        base,
        virtualization=draw(st.sampled_from([None, "kvm", "lxc"])),
        cpus_online=online,
        clusters=clusters,
        smt_siblings=draw(st.sampled_from([(), siblings])),
        numa_nodes=draw(st.sampled_from([(), nodes])),
        kernel=replace(
            base.kernel,
            isolated_cpus=draw(st.just(CpuSet(cpus=())) | some),
            zram_module=draw(st.booleans()),
            rt_runtime_us=draw(st.sampled_from([None, -1, 0, 950_000, 1_000_000])),
        ),
        cgroup=replace(
            base.cgroup,
            effective_cpus=draw(st.none() | some),
            quota_cpus=draw(st.none() | st.floats(min_value=0.05, max_value=64)),
            controllers=tuple(draw(st.sets(st.sampled_from(["cpu", "cpuset", "memory"])))),
            effective_nodes=draw(st.none() | st.sampled_from(["0", "1", "0-3"]).map(CpuSet.parse)),
        ),
        tools=replace(
            base.tools,
            numactl=draw(st.booleans()),
            numactl_works=draw(st.booleans()),
            chrt=draw(st.booleans()),
            zram_manager=draw(st.sampled_from([None, "edgellm", "zram-tools", "rpi-swap"])),
            zram_generator=draw(st.booleans()),
            realtime_works=draw(st.booleans()),
            irqbalance=draw(st.booleans()),
        ),
        cpufreq=draw(st.none() | governors),
        swappiness_files=tuple(
            f"/etc/sysctl.d/{name}.conf"
            for name in sorted(draw(st.sets(st.sampled_from(["10-a", "99-b", "zzz-c"]))))
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
        "reserve_cpus": st.booleans(),
        "cpu_governor": st.sampled_from(["performance", "schedutil"]),
        "swappiness": st.integers(min_value=0, max_value=200),
        "zram": st.sampled_from(["auto", "off"]),
        "allow_realtime": st.booleans(),
    }
    policy = draw(st.sampled_from(["other", "batch", "idle", "rr", "fifo"]))
    data["scheduling"] = policy
    for name in draw(st.sets(st.sampled_from(sorted(optional)))):
        data[name] = draw(optional[name])
    if policy in ("rr", "fifo"):
        data |= {"scheduling_priority": 1, "allow_realtime": True}
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
    if wanted.threads is None:
        assert engine.n_threads * plan.workers <= len(physical_cores(profile, plan.cpus))
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

    # others keep a whole core, and none of ours
    if plan.reserved_cpus is not None:
        rest = set(plan.reserved_cpus.cpus)
        assert wanted.reserve_cpus
        assert plan.allowed_cpus is not None
        assert rest <= visible - cpus - set(profile.kernel.isolated_cpus.cpus)
        assert any(set(core.cpus) <= rest for core in cores)

    # a binding is to nodes that services may have memory of, on a host of two and more
    if plan.numa is not None:
        assert len(profile.numa_nodes) >= 2
        assert profile.tools.numactl_works or "numactl" in plan.packages
        assert wanted.numa == "auto"
        if profile.cgroup.effective_nodes is not None:
            assert set(plan.numa.nodes) <= set(profile.cgroup.effective_nodes.cpus)

    # real time is acknowledged, has a budget and does not spin
    if plan.scheduling.is_realtime:
        assert profile.tools.realtime_works
        assert 0 < (profile.kernel.rt_runtime_us or 0) < 1_000_000
        assert wanted.allow_realtime
        assert plan.omp_wait_policy == "PASSIVE"

    # the clock and the sysctl file
    if plan.cpu_governor is not None:
        assert profile.cpufreq is not None
        assert plan.cpu_governor == wanted.cpu_governor
        assert plan.cpu_governor in profile.cpufreq.available
    names = [path.rpartition("/")[2] for path in profile.swappiness_files]
    if plan.swappiness is not None and max(names, default="") < "zz-edgellm.conf":
        assert all(name < plan.sysctl_name for name in names)

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
    foreign_zram = profile.tools.zram_manager not in (None, "edgellm")
    zram_swap = any(swap.is_zram for swap in profile.swaps)
    unknown_zram = zram_swap and profile.tools.zram_manager is None
    if plan.zram.manager in ("zram-generator", "own-unit"):
        assert profile.kernel.zram_module
        assert not foreign_zram
        assert not unknown_zram
    if plan.zram.manager == "adopted":
        assert foreign_zram or unknown_zram
    assert plan.swappiness is None or 0 <= plan.swappiness <= 200
    if wanted.swappiness is None and plan.swappiness is not None:
        disk = any(not swap.is_zram for swap in profile.swaps)
        ours = plan.zram.manager in ("zram-generator", "own-unit")
        others = zram_swap and profile.tools.zram_manager != "edgellm"
        assert plan.swappiness == (100 if (ours or others) and not disk else 10)

    # every reason says something, once
    assert all(r.text and r.knob for r in plan.reasons)
    assert len({(r.knob, r.text) for r in plan.reasons}) == len(plan.reasons)


@run_with(max_examples=50, deadline=None)
@given(profiles(), settings())
def test_real_time_that_nobody_acknowledged_is_never_planned(
    profile: HostProfile, wanted: Settings
) -> None:
    plan = plan_tuning(profile, replace(wanted, allow_realtime=False))
    assert not plan.scheduling.is_realtime


@run_with(max_examples=50, deadline=None)
@given(profiles(), settings(), st.floats(min_value=-0.149, max_value=0.149))
def test_a_second_run_plans_the_same_whatever_memory_is_taken_meanwhile(
    profile: HostProfile, wanted: Settings, drift: float
) -> None:
    plan = plan_tuning(profile, wanted)
    now = int(RecordedHost.of(profile).mem_available_bytes + drift * profile.mem_total_bytes)
    again = replace(
        profile,
        recorded=RecordedHost.of(profile),
        mem_available_bytes=max(0, min(now, profile.mem_total_bytes)),
        mem_own_bytes=0,
    )
    assert plan_tuning(again, wanted) == plan
    assert RecordedHost.of(again) == again.recorded


@run_with(max_examples=50, deadline=None)
@given(profiles(), settings())
def test_plan_and_faults_are_functions_of_their_arguments(
    profile: HostProfile, wanted: Settings
) -> None:
    assert plan_tuning(profile, wanted) == plan_tuning(profile, wanted)
    faults = check_host(profile, wanted, group_arch=profile.arch, disk_needed_bytes=10**9)
    assert all(error.fix and error.want and error.have for error in faults)
    assert isinstance(plain(profile), dict)
