"""Rules of docs/tuning.md, one truth a test; boards are those of tests/hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgellm.cpuset import CpuSet
from edgellm.errors import EdgellmError
from edgellm.fitness import check_host
from edgellm.hardware import Arch, CpuFreq, HostProfile, RecordedHost, Swap, ZramDevice
from edgellm.parse import ZRAM_MANAGER_FILES
from edgellm.settings import Settings
from edgellm.tuning import NumaBinding, Reason, TuningPlan, available_memory, plan_tuning

Board = Callable[[str], HostProfile]
SettingsWith = Callable[..., Settings]

GIB = 1 << 30


@pytest.fixture(scope="session")
def plan(board: Board, settings_with: SettingsWith) -> Callable[..., TuningPlan]:
    """plan("rk3588", threads=2): that board's plan with these settings."""

    def build(name: str | HostProfile, **data: Any) -> TuningPlan:
        profile = board(name) if isinstance(name, str) else name
        return plan_tuning(profile, settings_with(**data))

    return build


Plan = Callable[..., TuningPlan]


def reason(plan: TuningPlan, knob: str) -> Reason:
    return next(r for r in plan.reasons if r.knob == knob)


def with_tools(profile: HostProfile, **changes: Any) -> HostProfile:
    return replace(profile, tools=replace(profile.tools, **changes))


def with_cgroup(profile: HostProfile, **changes: Any) -> HostProfile:
    return replace(profile, cgroup=replace(profile.cgroup, **changes))


def with_memory(profile: HostProfile, total_bytes: int) -> HostProfile:
    return replace(profile, mem_total_bytes=total_bytes, mem_available_bytes=total_bytes)


DISK_SWAP = Swap(path="/swap.img", kind="file", size_bytes=GIB, used_bytes=0, priority=-2)
ZRAM_SWAP = Swap(path="/dev/zram0", kind="partition", size_bytes=GIB, used_bytes=0, priority=100)


# --- CPUs


@pytest.mark.parametrize(
    ("name", "cpus", "threads"),
    [
        ("ampere-altra", "1-79", 16),  # 80 equal cores: decode is not split further
        ("cloud-vm-quota", "1-3", 1),  # a quota of 1.5 CPUs
        ("epyc-7313-2-nodes", "1-31,33-63", 15),  # a worker; core 0 is CPUs 0 and 32
        ("firecracker-vm", "0-1", 2),
        ("i5-8250u", "1-3,5-7", 3),
        ("jetson-agx-orin", "1-7", 7),  # 8 of 12 cores are on line
        ("jetson-orin-nano", "1-5", 5),
        ("kunpeng-920", "1-47", 16),
        ("kunpeng-920-4-nodes", "1-127", 16),
        ("n100", "1-3", 3),
        ("nuc-i3-5010u", "0-3", 2),  # two cores: none is set aside, siblings get no thread
        ("orion-o6", "0,5-11", 8),
        ("phytium-d2000", "1-7", 7),
        ("podman-container", "1-3", 3),
        ("raspberry-pi-4", "1-3", 3),
        ("raspberry-pi-5", "1-3", 3),
        ("raspberry-pi-5-trixie", "1-3", 3),
        ("rk3588", "4-7", 4),
        ("x86-no-avx2", "1-3", 3),
    ],
)
def test_every_board_decodes_on_its_fast_cores_one_thread_each(
    plan: Plan, name: str, cpus: str, threads: int
) -> None:
    found = plan(name)
    assert (str(found.cpus), found.engine.n_threads) == (cpus, threads)


def test_big_little_board_decodes_on_its_big_cores(plan: Plan) -> None:
    rk3588 = plan("rk3588")
    assert str(rk3588.cpus) == "4-7"
    assert rk3588.engine.n_threads == 4
    assert "(Cortex-A76) only" in reason(rk3588, "cpus").text


def test_big_cores_need_not_be_a_range(plan: Plan) -> None:
    orion = plan("orion-o6")
    assert str(orion.cpus) == "0,5-11"
    assert str(orion.allowed_cpus) == "0,5-11"
    assert orion.engine.n_threads == 8


def test_four_equal_cores_leave_one_to_the_system(plan: Plan) -> None:
    pi = plan("raspberry-pi-5")
    assert str(pi.cpus) == "1-3"
    assert pi.engine.n_threads == 3
    assert reason(pi, "cpus").text.startswith("1-3: all cores alike; 0 left to")


def test_two_cores_are_both_used_and_nothing_is_restricted(plan: Plan) -> None:
    vm = plan("firecracker-vm")
    assert str(vm.cpus) == "0-1"
    assert vm.allowed_cpus is None
    assert reason(vm, "allowed_cpus").left_alone


def test_smt_siblings_get_no_thread_of_their_own(plan: Plan) -> None:
    laptop = plan("i5-8250u")
    assert str(laptop.cpus) == "1-3,5-7"  # core 0, that is CPUs 0 and 4, stays with the system
    assert laptop.engine.n_threads == 3


def test_cores_whose_clocks_differ_a_little_are_one_kind(board: Board, plan: Plan) -> None:
    laptop = board("i5-8250u")
    kind = laptop.clusters[0]
    turbo = replace(
        laptop,
        clusters=(
            replace(kind, cpus=CpuSet.parse("0,4"), max_freq_khz=3_600_000),
            replace(kind, cpus=CpuSet.parse("1-3,5-7")),
        ),
    )
    assert str(plan(turbo).cpus) == "1-3,5-7"


def test_hybrid_x86_decodes_on_its_p_cores_though_clocks_are_close(
    board: Board, plan: Plan
) -> None:
    laptop = board("i5-8250u")
    kind = laptop.clusters[0]
    hybrid = replace(
        laptop,
        smt_siblings=(),
        clusters=(
            replace(kind, cpus=CpuSet.parse("0-3"), max_freq_khz=5_000_000, core_type="core"),
            replace(kind, cpus=CpuSet.parse("4-7"), max_freq_khz=4_600_000, core_type="atom"),
        ),
    )
    assert str(plan(hybrid).cpus) == "0-3"


def test_one_prime_core_alone_is_not_enough(board: Board, plan: Plan) -> None:
    rk3588 = board("rk3588")
    kind = rk3588.clusters[0]
    phone = replace(
        rk3588,
        clusters=(
            replace(kind, cpus=CpuSet.parse("0-3"), cpu_capacity=350),
            replace(kind, cpus=CpuSet.parse("4-6"), cpu_capacity=760),
            replace(kind, cpus=CpuSet.parse("7"), cpu_capacity=1024),
        ),
    )
    assert str(plan(phone).cpus) == "4-7"


def test_mask_of_the_cgroup_bounds_the_cpus(board: Board, plan: Plan) -> None:
    masked = with_cgroup(board("rk3588"), effective_cpus=CpuSet.parse("0-5"))
    assert str(plan(masked).cpus) == "4-5"
    assert plan(masked).engine.n_threads == 2


def test_isolated_cpus_are_left_out_unless_named(board: Board, plan: Plan) -> None:
    pi = board("raspberry-pi-5")
    isolated = replace(pi, kernel=replace(pi.kernel, isolated_cpus=CpuSet.parse("2-3")))
    assert str(plan(isolated).cpus) == "0-1"
    assert str(plan(isolated, cpus="2-3").cpus) == "2-3"
    # What starts is kept off isolated CPUs: all of them are asked for by their numbers
    every = plan(isolated, cpus="0-3")
    assert (every.allowed_cpus, str(every.affinity)) == (None, "0-3")
    assert plan(pi, cpus="0-3").affinity is None


def test_quota_bounds_the_threads_and_ends_spinning(plan: Plan) -> None:
    vm = plan("cloud-vm-quota")
    assert vm.engine.n_threads == 1  # floor of 1.5 CPUs
    assert vm.omp_wait_policy == "PASSIVE"
    assert "CFS quota of 1.5 CPUs" in reason(vm, "threads").text


def test_quota_of_one_cpu_serves_as_many_at_once_as_one_core(board: Board, plan: Plan) -> None:
    one_core = replace(board("n100"), cpus_online=CpuSet.parse("0"))
    one_core = with_cgroup(one_core, effective_cpus=None)
    for name in ("cloud-vm-quota", one_core):
        found = plan(name)
        assert found.engine.n_parallel == 4
        assert reason(found, "n_parallel").text.startswith("4: the time of one CPU")
    assert plan(with_cgroup(board("cloud-vm-quota"), quota_cpus=2.0)).engine.n_parallel == 8
    assert plan("raspberry-pi-5", workers=3).engine.n_parallel == 4  # a core for each worker


def test_cpus_of_the_inventory_are_clamped_with_a_warning(plan: Plan) -> None:
    pi = plan("raspberry-pi-5", cpus="2-5")
    assert str(pi.cpus) == "2-3"
    assert reason(pi, "cpus") == Reason(
        knob="cpus",
        text="2-3: set by the inventory; 4-5 of 2-5 cannot be used here",
        warning=True,
    )


def test_threads_of_the_inventory_are_clamped_to_the_cpus(plan: Plan) -> None:
    assert plan("raspberry-pi-5", threads=2).engine.n_threads == 2
    many = plan("raspberry-pi-5", threads=16)
    assert many.engine.n_threads == 3
    assert reason(many, "threads").warning


def test_operator_may_spread_threads_over_smt_siblings(plan: Plan) -> None:
    assert plan("i5-8250u", cpus="0-7", threads=8).engine.n_threads == 8


def test_cpulist_set_backwards_does_not_break_the_plan(plan: Plan) -> None:
    assert str(plan("raspberry-pi-5", cpus="3-1").cpus) == "1-3"
    assert reason(plan("raspberry-pi-5", cpus="9"), "cpus").warning


# --- workers and NUMA


def test_one_worker_on_cpus_of_two_nodes_has_a_thread_for_each_of_them(plan: Plan) -> None:
    # Nodes are 0-23 and 24-47
    across = plan("kunpeng-920", workers=1, cpus="20-30")
    assert (across.engine.n_threads, across.engine.n_threads_batch) == (11, 11)
    assert [str(part) for part in across.worker_cpus] == ["20-30"]
    assert across.numa is not None
    assert across.numa.nodes == (0, 1)


def test_two_node_server_gets_a_worker_on_each_node(plan: Plan) -> None:
    server = plan("kunpeng-920")
    assert server.workers == 2
    assert server.numa == NumaBinding(cpus=CpuSet.parse("1-47"), nodes=(0, 1))
    assert [str(cpus) for cpus in server.worker_cpus] == ["1-23", "24-47"]
    assert (server.engine.n_threads, server.engine.n_threads_batch) == (16, 23)


def test_single_node_host_gets_no_numa_binding(plan: Plan) -> None:
    laptop = plan("i5-8250u")
    assert laptop.numa is None
    assert laptop.workers == 1
    assert reason(laptop, "numa").text == "one node: nothing to bind to"


def test_emulated_nodes_of_a_raspberry_pi_5_are_not_bound_to(plan: Plan) -> None:
    pi = plan("raspberry-pi-5")
    assert pi.numa is None
    assert "8 nodes share their CPUs (numa=fake)" in reason(pi, "numa").text


def test_numactl_refused_drops_the_knob_and_keeps_to_one_node(board: Board, plan: Plan) -> None:
    refused = plan(with_tools(board("kunpeng-920"), numactl_works=False))
    assert refused.numa is None
    assert refused.workers == 1
    assert str(refused.cpus) == "24-47"
    assert "EPERM" in reason(refused, "numa").text


def test_numactl_to_be_installed_counts_as_there(board: Board, plan: Plan) -> None:
    fresh = plan(with_tools(board("kunpeng-920"), numactl=False, numactl_works=False))
    assert fresh.packages == ("numactl",)
    assert fresh.numa is not None
    assert fresh.workers == 2


def test_node_too_small_for_a_strict_binding_is_not_bound_to(board: Board, plan: Plan) -> None:
    server = board("kunpeng-920")
    small = replace(
        server,
        numa_nodes=tuple(replace(n, mem_total_bytes=2 * GIB) for n in server.numa_nodes),
    )
    assert plan(small).numa is None
    assert plan(small).workers == 1


def test_numa_off_means_off(plan: Plan) -> None:
    assert plan("kunpeng-920", numa="off").numa is None
    assert str(plan("kunpeng-920", numa="off").cpus) == "1-47"


def test_workers_of_the_inventory_are_bounded_by_memory(plan: Plan) -> None:
    pi = plan("raspberry-pi-4", workers=3)  # 2 GB: one model and its copy, not three
    assert pi.workers == 1
    assert reason(pi, "workers") == Reason(
        knob="workers",
        text="1 instead of 3: memory carries 1 of 1033 MB, cores and quota carry 3",
        warning=True,
    )


def test_workers_share_the_cores_in_whole(plan: Plan) -> None:
    pi = plan("raspberry-pi-5", workers=3)
    assert pi.workers == 3
    assert [str(cpus) for cpus in pi.worker_cpus] == ["1", "2", "3"]
    assert pi.engine.n_threads == 1


# --- memory


def test_memory_is_two_copies_of_the_model_runtime_and_kv_cache(plan: Plan) -> None:
    pi = plan("raspberry-pi-4")
    assert pi.engine.cache_ram_mib == 0
    assert pi.kv_cache_bytes == 2048 * 8 * 12 * 1024
    assert pi.memory_needed_bytes == 2 * 428_730_208 + 150_000_000 + pi.kv_cache_bytes


def test_little_memory_means_fewer_slots(board: Board, plan: Plan) -> None:
    pi = board("raspberry-pi-4")
    assert plan(pi).engine.n_parallel == 8
    assert plan(pi, n_ctx=8192).engine.n_parallel == 2
    assert plan(replace(pi, mem_available_bytes=1_400_000_000)).engine.n_parallel == 4
    assert plan(replace(pi, mem_available_bytes=1_000_000_000)).engine.n_parallel == 1


def test_edgellm_that_runs_already_does_not_change_the_plan(board: Board, plan: Plan) -> None:
    before = board("raspberry-pi-4")
    held = 1_000_000_000
    after = replace(
        before,
        mem_available_bytes=before.mem_available_bytes - held,
        mem_own_bytes=held,
    )
    assert plan(after) == plan(before)


def test_mlock_only_where_memory_is_ample(board: Board, plan: Plan) -> None:
    pi = plan("raspberry-pi-4")
    assert pi.engine.mlock is True
    assert pi.limits.memlock_bytes == 2 * 428_730_208 + 256 * (1 << 20)
    tight = plan(replace(board("raspberry-pi-4"), mem_available_bytes=850_000_000), mlock=True)
    assert tight.engine.mlock is False
    assert tight.limits.memlock_bytes == 8 << 20
    assert reason(tight, "mlock").warning


def test_mlock_off_in_the_inventory_stays_off(plan: Plan) -> None:
    assert plan("rk3588", mlock=False).engine.mlock is False


# --- scheduling

REALTIME = {"scheduling": "rr", "scheduling_priority": 10, "allow_realtime": True}


def test_default_policy_is_batch_at_exec(plan: Plan) -> None:
    pi = plan("raspberry-pi-5")
    assert pi.use_chrt is True
    assert pi.scheduling.chrt_flag == "--batch"
    assert pi.scheduling.priority == 0


def test_real_time_is_refused_on_tegra_even_when_acknowledged(plan: Plan) -> None:
    jetson = plan("jetson-orin-nano", **REALTIME)
    assert jetson.scheduling.policy == "batch"
    assert jetson.scheduling.priority == 0
    assert reason(jetson, "scheduling").warning
    rk3588 = plan("rk3588", **REALTIME)
    assert (rk3588.scheduling.policy, rk3588.scheduling.priority) == ("rr", 10)
    assert rk3588.omp_wait_policy == "PASSIVE"


@pytest.mark.parametrize(
    ("kernel", "tools", "why"),
    [
        ({"rt_runtime_us": -1}, {}, "sched_rt_runtime_us=-1"),
        ({"rt_runtime_us": 1_000_000}, {}, "sched_rt_runtime_us=1000000"),  # all of a period
        ({"rt_runtime_us": 0}, {}, "sched_rt_runtime_us=0"),
        ({"rt_runtime_us": None}, {}, "does not tell"),
        ({}, {"realtime_works": False}, "chrt --fifo was refused"),
    ],
)
def test_real_time_without_a_budget_that_works_is_batch(
    board: Board, plan: Plan, kernel: dict[str, Any], tools: dict[str, Any], why: str
) -> None:
    host = board("rk3588")
    host = with_tools(replace(host, kernel=replace(host.kernel, **kernel)), **tools)
    found = plan(host, **REALTIME)
    assert (found.scheduling.policy, found.scheduling.priority) == ("batch", 0)
    assert not found.scheduling.is_realtime
    assert found.omp_wait_policy is None
    assert reason(found, "scheduling").warning
    assert why in reason(found, "scheduling").text


def test_real_time_is_for_who_acknowledges_it(board: Board, settings_with: SettingsWith) -> None:
    asked = settings_with(**REALTIME)
    assert plan_tuning(board("rk3588"), asked).scheduling.is_realtime
    silent = replace(asked, allow_realtime=False)
    assert plan_tuning(board("rk3588"), silent).scheduling.policy == "batch"


@pytest.mark.parametrize("policy", ["other", "batch", "idle"])
def test_policies_that_harm_nobody_need_no_acknowledgement(plan: Plan, policy: str) -> None:
    found = plan("rk3588", scheduling=policy)
    assert (found.scheduling.policy, found.scheduling.priority) == (policy, 0)
    assert found.scheduling.chrt_flag == f"--{policy}"
    assert not reason(found, "scheduling").warning


def test_real_time_refused_on_cgroup_v1_names_the_usual_cause(board: Board, plan: Plan) -> None:
    host = with_tools(with_cgroup(board("rk3588"), version=1), realtime_works=False)
    assert "RT_GROUP_SCHED" in reason(plan(host, **REALTIME), "scheduling").text


def test_an_upstreams_unit_never_gets_real_time(plan: Plan) -> None:
    assert plan("rk3588", **REALTIME).scheduling.is_realtime
    found = plan("rk3588", **REALTIME, **FORWARD)
    assert found.scheduling.policy == "batch"
    assert reason(found, "scheduling").warning


# --- cores for the server alone


def test_others_keep_all_cores_unless_asked(plan: Plan) -> None:
    assert plan("rk3588").reserved_cpus is None
    assert reason(plan("rk3588"), "reserved_cpus").left_alone


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("rk3588", "0-3"),
        ("orion-o6", "1-4"),
        ("n100", "0"),
        ("i5-8250u", "0,4"),  # a core is both its threads
        ("epyc-7313-2-nodes", "0,32"),
    ],
)
def test_reserve_cpus_leaves_others_what_the_server_does_not_use(
    plan: Plan, name: str, reserved: str
) -> None:
    found = plan(name, reserve_cpus=True)
    assert str(found.reserved_cpus) == reserved
    assert found.allowed_cpus is not None
    assert not found.reserved_cpus & found.allowed_cpus
    assert not reason(found, "reserved_cpus").warning


def test_isolated_cpus_are_not_given_to_others(board: Board, plan: Plan) -> None:
    host = board("n100")
    host = replace(host, kernel=replace(host.kernel, isolated_cpus=CpuSet.parse("1")))
    found = plan(host, reserve_cpus=True, cpus="2-3")
    assert str(found.reserved_cpus) == "0"


@pytest.mark.parametrize("cpus", ["0-3,5-7", "0-7"])
def test_no_cores_are_reserved_where_no_whole_one_would_be_left(plan: Plan, cpus: str) -> None:
    found = plan("i5-8250u", reserve_cpus=True, cpus=cpus)  # 4 is the sibling of 0
    assert found.reserved_cpus is None
    assert reason(found, "reserved_cpus").warning
    assert "no whole core is left" in reason(found, "reserved_cpus").text


def test_reserving_without_the_controller_says_what_brings_it_back(
    board: Board, plan: Plan
) -> None:
    pi = plan(with_cgroup(board("raspberry-pi-5"), controllers=("cpu",)), reserve_cpus=True)
    assert pi.reserved_cpus is None
    assert reason(pi, "reserved_cpus").warning
    assert "cgroup_enable=cpuset" in reason(pi, "reserved_cpus").text
    assert "/boot/firmware/cmdline.txt and reboot" in reason(pi, "reserved_cpus").text
    assert str(pi.affinity) == "1-3"  # the best that works


# --- the clock


def test_governor_is_left_as_it_is_unless_asked(plan: Plan) -> None:
    assert plan("rk3588").cpu_governor is None
    assert reason(plan("rk3588"), "cpu_governor").text.startswith("ondemand, as it is")
    assert plan("rk3588", cpu_governor="performance").cpu_governor == "performance"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("n100", "the kernel offers performance, powersave"),
        ("virtual machine", "no cpufreq here"),
        ("podman-container", "the kernel that podman shares"),
    ],
)
def test_governor_that_cannot_be_had_is_said(board: Board, plan: Plan, name: str, why: str) -> None:
    host = replace(board("n100"), cpufreq=None) if name == "virtual machine" else board(name)
    found = plan(host, cpu_governor="schedutil")
    assert found.cpu_governor is None
    assert reason(found, "cpu_governor").warning
    assert why in reason(found, "cpu_governor").text


def test_generic_powersave_is_warned_of_and_pstates_own_is_not(board: Board, plan: Plan) -> None:
    assert not reason(plan("n100"), "cpu_governor").warning
    freq = CpuFreq(governors=("powersave",), available=("performance", "powersave", "schedutil"))
    slow = reason(plan(replace(board("rk3588"), cpufreq=freq)), "cpu_governor")
    assert slow.warning
    assert "cpu_governor=schedutil" in slow.text


def test_daemons_that_set_the_governor_too_are_named(board: Board, plan: Plan) -> None:
    busy = with_tools(board("i5-8250u"), power_profiles_daemon=True, tuned_profile="balanced")
    text = reason(plan(busy, cpu_governor="performance"), "cpu_governor").text
    assert "power-profiles-daemon and tuned (balanced)" in text


# --- what others do


def test_irqbalance_is_told_which_cores_to_keep_off(board: Board, plan: Plan) -> None:
    server = reason(plan("epyc-7313-2-nodes"), "irqbalance")
    assert "IRQBALANCE_BANNED_CPULIST=1-31,33-63" in server.text
    all_used = with_tools(board("nuc-i3-5010u"), irqbalance=True)
    assert "irqbalance" not in {r.knob for r in plan(all_used).reasons}


def test_tuned_is_named_with_who_wins(plan: Plan) -> None:
    text = reason(plan("kunpeng-920"), "tuned").text
    assert text.startswith("tuned (throughput-performance) applies its own sysctls")
    assert "reapply_sysctl=1" in text
    assert "tuned" not in {r.knob for r in plan("rk3588").reasons}


def test_power_profiles_daemon_is_seen(plan: Plan) -> None:
    assert "powerprofilesctl" in reason(plan("i5-8250u"), "power_profiles_daemon").text


# --- memory from run to run


def recorded(profile: HostProfile, available_bytes: int, **changes: Any) -> HostProfile:
    before = replace(RecordedHost.of(profile), mem_available_bytes=available_bytes, **changes)
    return replace(profile, recorded=before)


def test_available_memory_near_the_recorded_one_counts_as_that(board: Board, plan: Plan) -> None:
    pi = with_memory(board("raspberry-pi-4"), 2 * GIB)
    then = available_memory(pi)
    now = replace(pi, mem_available_bytes=pi.mem_available_bytes - 256 * (1 << 20))
    assert plan(now) != plan(pi)  # a plan near a limit
    assert available_memory(recorded(now, then)) == then
    assert plan(recorded(now, then)) == plan(pi)


def test_available_memory_far_from_the_recorded_one_counts_as_it_is(board: Board) -> None:
    pi = with_memory(board("raspberry-pi-4"), 2 * GIB)
    far = replace(pi, mem_available_bytes=GIB)
    assert available_memory(recorded(far, 2 * GIB)) == GIB


def test_a_board_with_other_memory_forgets_what_was_recorded(board: Board) -> None:
    pi = board("raspberry-pi-4")
    host = recorded(pi, pi.mem_available_bytes + 1, mem_total_bytes=2 * pi.mem_total_bytes)
    assert available_memory(host) == pi.mem_available_bytes


def test_what_is_recorded_is_what_the_plan_used(board: Board) -> None:
    pi = recorded(board("raspberry-pi-4"), board("raspberry-pi-4").mem_available_bytes + 1000)
    again = RecordedHost.of(pi)
    assert again == pi.recorded  # so it does not creep from run to run
    assert again.python == "3.11.2"
    assert again.distribution == "debian 12"


def test_zram_keeps_its_size_while_a_kernel_counts_some_mib_otherwise(
    board: Board, plan: Plan
) -> None:
    pi = replace(board("raspberry-pi-4"), zram_devices=(), swaps=())
    then = pi.mem_total_bytes
    updated = recorded(
        replace(pi, mem_total_bytes=then - 9 * (1 << 20)),
        pi.mem_available_bytes,
        mem_total_bytes=then,
    )
    assert plan(updated).zram == plan(pi).zram
    assert RecordedHost.of(updated).mem_total_bytes == then  # nor does it creep
    halved = recorded(
        replace(pi, mem_total_bytes=then // 2), pi.mem_available_bytes, mem_total_bytes=then
    )
    assert plan(halved).zram.size_bytes == 462 << 20


def test_host_without_chrt_installs_it_or_goes_without(board: Board, plan: Plan) -> None:
    bare = with_tools(board("rk3588"), chrt=False)
    assert plan(bare).packages == ("util-linux",)
    assert plan(bare).use_chrt is True
    assert plan(bare, install_packages=False).use_chrt is False
    assert plan(bare, install_packages=False).scheduling.policy == "other"


def test_missing_cpu_controller_drops_the_weight_and_ends_spinning(
    board: Board, plan: Plan
) -> None:
    bare = plan(with_cgroup(board("raspberry-pi-5"), controllers=("io", "pids")))
    assert bare.cpu_weight is None
    assert bare.omp_wait_policy == "PASSIVE"
    assert reason(bare, "cpu_weight").warning
    assert plan("raspberry-pi-5").cpu_weight == 1000
    assert plan("raspberry-pi-5").omp_wait_policy is None


def test_missing_cpuset_controller_names_the_kernel_command_line(board: Board, plan: Plan) -> None:
    bare = plan(with_cgroup(board("raspberry-pi-5"), controllers=("cpu", "io")))
    assert bare.allowed_cpus is None
    assert "cgroup_enable=cpuset" in reason(bare, "allowed_cpus").text
    assert "/boot/firmware/cmdline.txt and reboot" in reason(bare, "allowed_cpus").text


def test_memory_controller_that_a_raspberry_pi_lacks_is_said_and_changes_nothing(
    board: Board, plan: Plan
) -> None:
    pi = plan("raspberry-pi-5")
    assert "cgroup_enable=memory" in reason(pi, "memory_cgroup").text
    assert reason(pi, "memory_cgroup").left_alone
    whole = plan(
        with_cgroup(board("raspberry-pi-5"), controllers=("cpu", "cpuset", "io", "memory"))
    )
    assert replace(whole, reasons=()) == replace(pi, reasons=())
    assert "memory_cgroup" not in {r.knob for r in whole.reasons}


def test_missing_controller_elsewhere_names_no_file_of_a_raspberry_pi(
    board: Board, plan: Plan
) -> None:
    bare = plan(with_cgroup(board("n100"), controllers=("cpu",)))
    text = reason(bare, "allowed_cpus").text
    assert "remove cgroup_disable=cpuset from the kernel command line" in text
    assert "cmdline.txt" not in text
    inside = plan(with_cgroup(board("podman-container"), controllers=("cpu",)))
    assert "podman does not delegate it" in reason(inside, "allowed_cpus").text


def test_cgroup_v1_has_no_allowed_cpus_so_affinity_is_set_at_exec(board: Board, plan: Plan) -> None:
    old = plan(with_cgroup(board("raspberry-pi-5"), version=1))
    assert old.allowed_cpus is None
    assert str(old.affinity) == "1-3"
    assert plan("raspberry-pi-5").affinity is None
    assert "no AllowedCPUs= on cgroup v1" in reason(old, "allowed_cpus").text


# --- swap


def test_small_board_gets_zram_of_half_its_memory(board: Board, plan: Plan) -> None:
    pi = replace(board("raspberry-pi-4"), zram_devices=(), swaps=())
    zram = plan(pi).zram
    assert zram.manager == "own-unit"
    assert zram.size_bytes == 925 << 20
    assert zram.priority == 100
    assert plan(with_tools(pi, zram_generator=True)).zram.manager == "zram-generator"


def test_zram_device_of_others_is_not_touched(board: Board, plan: Plan) -> None:
    log2ram = with_tools(board("raspberry-pi-4"), zram_generator=True)
    zram = plan(log2ram)
    assert zram.zram.manager == "own-unit"  # zram-generator's [zram0] would collide
    assert "zram0 belongs to others" in reason(zram, "zram").text


def test_zram_manager_that_is_there_is_adopted(board: Board, plan: Plan) -> None:
    armbian = plan("rk3588").zram
    assert (armbian.manager, armbian.adopted_manager) == ("adopted", "armbian-zram-config")
    assert armbian.size_bytes is None
    unknown = replace(board("raspberry-pi-4"), swaps=(ZRAM_SWAP,))
    assert plan(unknown).zram.adopted_manager == "unknown"


def test_our_own_zram_leads_to_the_same_plan_again(board: Board, plan: Plan) -> None:
    first = replace(board("raspberry-pi-4"), swaps=(), zram_devices=())
    device = ZramDevice(
        name="zram0", disksize_bytes=GIB, algorithm="lzo-rle", is_swap=True, mountpoint=None
    )
    second = with_tools(
        replace(first, swaps=(ZRAM_SWAP,), zram_devices=(device,)), zram_manager="edgellm"
    )
    assert plan(second) == plan(first)


def test_large_board_gets_no_zram_unless_asked(plan: Plan) -> None:
    assert plan("raspberry-pi-5").zram.manager == "none"
    asked = plan("raspberry-pi-5", zram_size_bytes=64 * GIB).zram
    assert asked.manager == "own-unit"
    assert asked.size_bytes == 4026 << 20  # half of 8 GB of memory, not 64 GiB


@pytest.mark.parametrize("manager", [manager for _, manager in ZRAM_MANAGER_FILES])
@pytest.mark.parametrize("swaps", [(), (ZRAM_SWAP,)])
def test_every_manager_that_is_there_is_adopted_and_gets_no_second(
    board: Board, plan: Plan, manager: str, swaps: tuple[Swap, ...]
) -> None:
    pi = with_tools(board("raspberry-pi-4"), zram_manager=manager, zram_generator=True)
    found = plan(replace(pi, swaps=swaps), zram_size_bytes=GIB)
    assert (found.zram.manager, found.zram.adopted_manager) == ("adopted", manager)
    assert found.zram.size_bytes is None
    assert found.swappiness == (100 if swaps else 10)


def test_kernel_without_zram_module_is_left_alone(board: Board, plan: Plan) -> None:
    pi = board("raspberry-pi-4")
    without = replace(pi, kernel=replace(pi.kernel, zram_module=False))
    assert plan(without).zram.manager == "none"
    assert "no zram module" in reason(plan(without), "zram").text


def test_container_keeps_its_hands_off_swap(board: Board, plan: Plan) -> None:
    vm = plan(with_memory(board("cloud-vm-quota"), 2 * GIB))
    assert vm.zram.manager == "none"
    assert vm.swappiness is None
    assert reason(vm, "swappiness").left_alone


@pytest.mark.parametrize(
    ("swaps", "swappiness"),
    [((DISK_SWAP,), 10), ((ZRAM_SWAP,), 100), ((DISK_SWAP, ZRAM_SWAP), 10), ((), 10)],
)
def test_swappiness_follows_what_swap_there_is(
    board: Board, plan: Plan, swaps: tuple[Swap, ...], swappiness: int
) -> None:
    assert plan(replace(board("i5-8250u"), swaps=swaps)).swappiness == swappiness


def test_zram_that_we_set_up_counts_for_swappiness(board: Board, plan: Plan) -> None:
    pi = replace(board("raspberry-pi-4"), swaps=())
    assert plan(pi).swappiness == 100
    assert plan(pi, zram="off").swappiness == 10


def test_old_kernels_get_no_swappiness_above_100(board: Board, plan: Plan) -> None:
    jetson = board("jetson-orin-nano")
    nano = replace(jetson, kernel=replace(jetson.kernel, release="4.9.337-tegra"))
    assert plan(nano, swappiness=180).swappiness == 100
    assert plan(jetson, swappiness=180).swappiness == 180


def test_sysctl_file_that_is_read_after_ours_is_named(board: Board, plan: Plan) -> None:
    files = ("/etc/sysctl.d/10-swap.conf", "/etc/sysctl.d/99-swappiness.conf")
    laptop = plan(replace(board("i5-8250u"), swappiness_files=files))
    assert laptop.sysctl_name == "zz-edgellm.conf"
    assert reason(laptop, "sysctl_name").text == (
        "zz-edgellm.conf: /etc/sysctl.d/99-swappiness.conf sets vm.swappiness too, and would win "
        "over 90-edgellm.conf"
    )
    assert not reason(laptop, "sysctl_name").warning


def test_sysctl_file_that_is_read_before_ours_changes_nothing(board: Board, plan: Plan) -> None:
    files = ("/usr/lib/sysctl.d/10-swap.conf", "/etc/sysctl.d/90-a.conf")
    laptop = plan(replace(board("i5-8250u"), swappiness_files=files))
    assert laptop == plan("i5-8250u")
    assert laptop.sysctl_name == "90-edgellm.conf"


def test_sysctl_file_that_no_name_of_ours_beats_is_warned_of(board: Board, plan: Plan) -> None:
    files = ("/etc/sysctl.d/zzz-last.conf",)
    laptop = plan(replace(board("i5-8250u"), swappiness_files=files))
    assert laptop.sysctl_name == "90-edgellm.conf"
    assert reason(laptop, "sysctl_name").warning
    assert "zzz-last.conf" in reason(laptop, "sysctl_name").text


def test_container_that_gets_no_sysctl_needs_no_name_for_it(board: Board, plan: Plan) -> None:
    files = ("/etc/sysctl.d/99-swappiness.conf",)
    assert plan(replace(board("podman-container"), swappiness_files=files)).sysctl_name == (
        "90-edgellm.conf"
    )


# --- packages and reasons


def test_missing_libraries_are_named_as_the_package_manager_does(board: Board, plan: Plan) -> None:
    assert plan("raspberry-pi-5").packages == ("libgomp1",)
    bare = with_tools(board("kunpeng-920"), libgomp=False, libstdcxx=False)
    assert plan(bare).packages == ("libgomp", "libstdc++")


def test_numactl_is_installed_only_where_it_can_bind(board: Board, plan: Plan) -> None:
    server = with_tools(board("kunpeng-920"), numactl=False, numactl_works=False)
    assert plan(server).packages == ("numactl",)
    assert plan(server, numa="off").packages == ()
    assert plan(replace(server, virtualization="lxc")).packages == ()
    assert plan("i5-8250u").packages == ()


def test_every_knob_of_the_plan_has_its_reason(plan: Plan) -> None:
    knobs = {r.knob for r in plan("raspberry-pi-5").reasons}
    assert knobs >= {
        "threads", "threads_batch", "workers", "cpus", "allowed_cpus", "cpu_weight", "numa",
        "scheduling", "realtime", "omp_wait_policy", "n_parallel", "n_batch", "kv_cache",
        "cache_ram", "memory", "mlock", "memlock", "nofile", "zram", "swappiness", "packages",
        "cpu_quota", "reserved_cpus", "cpu_governor", "cpu_online", "nice", "omp_num_threads",
        "overcommit_memory", "swapoff", "mlockall", "page_size", "memory_cgroup",
    }  # fmt: skip


def test_throttled_board_warns_the_operator(plan: Plan) -> None:
    pi = reason(plan("raspberry-pi-4"), "throttling")
    assert pi.warning
    assert pi.text.startswith("under-voltage, throttled now (0x50005)")


def test_pages_of_a_raspberry_pi_5_are_seen(plan: Plan) -> None:
    assert reason(plan("raspberry-pi-5"), "page_size").text.startswith("16 KiB pages")
    assert "page_size" not in {r.knob for r in plan("raspberry-pi-4").reasons}


def test_host_that_is_hot_or_whose_clock_is_off_warns_the_operator(
    board: Board, plan: Plan
) -> None:
    pi = board("raspberry-pi-5")
    off = plan(replace(pi, health=replace(pi.health, temperature_c=82.4, clock_skew_s=-86_400.0)))
    assert reason(off, "temperature").warning
    assert reason(off, "temperature").text.startswith("82 C")
    assert reason(off, "clock").warning
    assert reason(off, "clock").text.startswith("-86400 s")
    assert not {"temperature", "clock"} & {r.knob for r in plan("raspberry-pi-5").reasons}


def test_selinux_that_enforces_is_said(plan: Plan) -> None:
    assert "restorecon" in reason(plan("kunpeng-920"), "selinux").text


# --- check_host


@pytest.fixture(scope="session")
def faults(settings_with: SettingsWith) -> Callable[..., tuple[EdgellmError, ...]]:
    """faults(profile, group_arch=…, disk_needed_bytes=…, **settings)."""

    def check(
        profile: HostProfile,
        *,
        group_arch: Arch | None = None,
        disk_needed_bytes: int = 0,
        **data: Any,
    ) -> tuple[EdgellmError, ...]:
        return check_host(
            profile,
            settings_with(**data),
            group_arch=group_arch,
            disk_needed_bytes=disk_needed_bytes,
        )

    return check


Faults = Callable[..., tuple[EdgellmError, ...]]


@pytest.mark.parametrize(
    "name",
    ["raspberry-pi-4", "raspberry-pi-5", "rk3588", "orion-o6", "jetson-orin-nano", "kunpeng-920"],
)
def test_fit_arm64_host_has_no_faults(board: Board, faults: Faults, name: str) -> None:
    assert faults(board(name), group_arch=Arch.ARM64, disk_needed_bytes=10**9) == ()


def test_host_in_the_wrong_group_is_told_which_is_right(board: Board, faults: Faults) -> None:
    (error,) = faults(board("i5-8250u"), group_arch=Arch.ARM64)
    assert str(error) == (
        "architecture: want arm64, the group it is in, have x86_64; fix: move it to group x86_64"
    )


def test_32_bit_host_needs_another_os(board: Board, faults: Faults) -> None:
    (error,) = faults(replace(board("raspberry-pi-4"), machine="armv7l"), group_arch=Arch.ARM64)
    assert error.fix == "install a 64-bit OS"
    assert error.have.startswith("armv7l")


def test_cpu_without_avx2_would_die_of_sigill(board: Board, faults: Faults) -> None:
    (error,) = faults(board("x86-no-avx2"), group_arch=Arch.X86_64)
    assert error.have == "no avx2, bmi2, f16c, fma"


def test_host_that_does_not_run_systemd_is_refused(board: Board, faults: Faults) -> None:
    (error,) = faults(board("firecracker-vm"))
    assert error.what == "systemd"
    assert error.have == "none running"


@pytest.mark.parametrize(
    ("tools", "what", "have"),
    [
        ({"python_version": (3, 9, 2)}, "python3", "3.9.2"),
        ({"python_version": None}, "python3", "none"),
        ({"systemd_version": 241}, "systemd", "241"),
        (
            {"libgomp": False, "package_manager": None},
            "shared libraries",
            "libgomp1 missing, no apt or dnf",
        ),
    ],
)
def test_missing_requirement_is_named(
    board: Board, faults: Faults, tools: dict[str, Any], what: str, have: str
) -> None:
    (error,) = faults(with_tools(board("rk3588"), **tools))
    assert (error.what, error.have) == (what, have)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("nuc-i3-5010u", "Debian 12, Ubuntu 22.04 and later"),
        ("jetson-agx-orin", "JetPack 6"),
        ("ampere-altra", "Rocky 10, openEuler 24.03 and later"),
        ("kunpeng-920-4-nodes", "Rocky 10, openEuler 24.03 and later"),
    ],
)
def test_too_old_a_python_is_refused_with_a_release_that_has_it(
    board: Board, faults: Faults, name: str, fix: str
) -> None:
    (error,) = faults(board(name))
    assert error.what == "python3"
    assert fix in error.fix


def test_libraries_that_may_not_be_installed_are_a_fault(board: Board, faults: Faults) -> None:
    assert faults(board("raspberry-pi-5")) == ()
    (error,) = faults(board("raspberry-pi-5"), install_packages=False)
    assert error.have == "libgomp1 missing, install_packages is off"


def test_full_disk_is_told_with_both_numbers(board: Board, faults: Faults) -> None:
    small = replace(board("rk3588"), disk_free_bytes=300_000_000)
    (error,) = faults(small, disk_needed_bytes=900_000_000)
    assert (error.want, error.have) == ("900 MB", "300 MB free")


def test_noexec_mount_is_refused(board: Board, faults: Faults) -> None:
    (error,) = faults(replace(board("rk3588"), disk_noexec=True))
    assert error.have == "mounted noexec"


def test_host_too_small_for_one_worker_is_refused(board: Board, faults: Faults) -> None:
    (error,) = faults(with_memory(board("raspberry-pi-4"), GIB))
    assert error.what == "memory"
    assert error.want == "1033 MB for one worker with one slot"


def test_cpus_that_the_host_does_not_have_are_a_fault(board: Board, faults: Faults) -> None:
    (error,) = faults(board("rk3588"), cpus="8-11")
    assert (error.want, error.have) == ("some of 0-7", "8-11")


# --- forwarding to a server of the operator's


FORWARD = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}


def test_a_host_that_forwards_needs_no_room_for_a_model(
    board: Board, settings_with: SettingsWith
) -> None:
    small = with_memory(board("raspberry-pi-4"), GIB // 2)
    (fault,) = check_host(small, settings_with(), group_arch=None, disk_needed_bytes=0)
    assert fault.what == "memory"
    settings = settings_with(**FORWARD)
    assert check_host(small, settings, group_arch=None, disk_needed_bytes=0) == ()


def test_a_host_that_forwards_plans_no_model_memory_and_leaves_locking_to_the_upstream(
    plan: Plan,
) -> None:
    found = plan("raspberry-pi-5", **FORWARD)
    assert (found.kv_cache_bytes, found.engine.cache_ram_mib, found.engine.mlock) == (0, 0, False)
    assert found.memory_needed_bytes < 200_000_000
    assert found.limits.memlock_bytes is None
    knobs = [r.knob for r in found.reasons]
    assert not {"kv_cache", "cache_ram", "mlock", "n_batch"} & set(knobs)
    assert "forward" in reason(found, "memory").text


def test_a_host_that_forwards_keeps_cores_weight_and_policy(plan: Plan) -> None:
    own, forwarding = plan("rk3588"), plan("rk3588", **FORWARD)
    for knob in ("cpus", "allowed_cpus", "cpu_weight", "scheduling", "swappiness", "zram"):
        assert getattr(forwarding, knob) == getattr(own, knob)


def test_an_upstream_of_unknown_size_is_not_bound_to_a_numa_node(plan: Plan) -> None:
    found = plan("kunpeng-920", **FORWARD)
    assert (found.numa, found.workers) == (None, 1)
    assert reason(found, "numa").left_alone
