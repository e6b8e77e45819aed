"""Rules of docs/tuning.md, one truth a test; boards are those of tests/hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edgellm.cpuset import CpuSet
from edgellm.errors import EdgellmError
from edgellm.fitness import check_host
from edgellm.hardware import Arch, HostProfile, Swap, ZramDevice
from edgellm.settings import Settings
from edgellm.tuning import NumaBinding, Reason, TuningPlan, plan_tuning

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


def test_quota_bounds_the_threads_and_ends_spinning(plan: Plan) -> None:
    vm = plan("cloud-vm-quota")
    assert vm.engine.n_threads == 1  # floor of 1.5 CPUs
    assert vm.omp_wait_policy == "PASSIVE"
    assert "CFS quota of 1.5 CPUs" in reason(vm, "threads").text


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
    assert reason(pi, "workers").warning


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


def test_default_policy_is_batch_at_exec(plan: Plan) -> None:
    pi = plan("raspberry-pi-5")
    assert pi.use_chrt is True
    assert pi.scheduling.chrt_flag == "--batch"
    assert pi.scheduling.priority == 0


def test_real_time_is_refused_on_tegra_even_when_acknowledged(plan: Plan) -> None:
    realtime = {"scheduling": "rr", "scheduling_priority": 10, "allow_realtime": True}
    jetson = plan("jetson-orin-nano", **realtime)
    assert jetson.scheduling.policy == "batch"
    assert jetson.scheduling.priority == 0
    assert reason(jetson, "scheduling").warning
    rk3588 = plan("rk3588", **realtime)
    assert (rk3588.scheduling.policy, rk3588.scheduling.priority) == ("rr", 10)
    assert rk3588.omp_wait_policy == "PASSIVE"


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
    warnings = [r.text for r in laptop.reasons if r.knob == "swappiness" and r.warning]
    assert warnings == [
        "/etc/sysctl.d/99-swappiness.conf sets it again at boot, after our 90-edgellm.conf: "
        "remove it"
    ]


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
        "cpu_quota", "exclusive_cpus", "cpu_online", "nice", "omp_num_threads",
        "overcommit_memory", "swapoff", "mlockall", "page_size", "memory_cgroup",
    }  # fmt: skip


def test_throttled_board_warns_the_operator(plan: Plan) -> None:
    pi = reason(plan("raspberry-pi-4"), "throttling")
    assert pi.warning
    assert pi.text.startswith("under-voltage, throttled now (0x50005)")


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
