"""Probe output -> HostProfile: what each board says, and what damage does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgellm.cpuset import CpuSet
from edgellm.errors import ParseError
from edgellm.hardware import (
    Arch,
    CpuCluster,
    CpuFreq,
    HostProfile,
    NumaNode,
    RecordedHost,
    Swap,
    ZramDevice,
)
from edgellm.parse import (
    has_library,
    parse_cgroup_version,
    parse_clock_skew,
    parse_cpufreq,
    parse_disk,
    parse_noexec,
    parse_profile,
    parse_quota,
    parse_recorded,
    parse_temperature,
    parse_throttled,
    parse_uname,
    parse_zram_manager,
    split_sections,
)

Board = Callable[[str], HostProfile]
ProbeText = Callable[[str], str]

WHOLE = """{
 "cgroup_version": 2,
 "cpus_online": "0-3",
 "distribution": "debian 12",
 "kernel": "6.1",
 "mem_available_bytes": 4000,
 "mem_total_bytes": 8000,
 "python": "3.11.2"
}
"""  # as it lies in /opt/edgellm/recorded.json


def test_raspberry_pi_5_has_16_kib_pages_and_no_memory_controller(board: Board) -> None:
    pi = board("raspberry-pi-5")
    assert pi.arch is Arch.ARM64
    assert pi.board_model == "Raspberry Pi 5 Model B Rev 1.0"
    assert pi.virtualization is None
    assert pi.kernel.page_size_bytes == 16384
    assert pi.cgroup.version == 2
    assert pi.cgroup.controllers == ("cpu", "cpuset", "io", "pids")
    assert pi.swaps == (
        Swap(path="/var/swap", kind="file", size_bytes=536_854_528, used_bytes=0, priority=-2),
    )
    assert pi.tools.libgomp is False
    assert pi.tools.libstdcxx is True
    assert pi.tools.python_version == (3, 11, 2)
    assert pi.tools.systemd_version == 252
    assert len(pi.numa_nodes) == 8


def test_raspberry_pi_4_tells_of_throttling_and_of_a_foreign_zram_device(board: Board) -> None:
    pi = board("raspberry-pi-4")
    assert pi.health.throttled_flags == 0x50005
    assert pi.health.temperature_c == pytest.approx(71.08)
    assert pi.zram_devices == (
        ZramDevice(
            name="zram0",
            disksize_bytes=419_430_400,
            algorithm="zstd",
            is_swap=False,
            mountpoint="/var/log",
        ),
    )


@pytest.mark.parametrize(
    ("name", "distribution", "manager", "python"),
    [
        ("nuc-i3-5010u", "debian 11", "apt", (3, 9, 2)),
        ("phytium-d2000", "debian 12", "apt", (3, 11, 2)),
        ("n100", "debian 13", "apt", (3, 13, 5)),
        ("jetson-agx-orin", "ubuntu 20.04", "apt", (3, 8, 10)),
        ("epyc-7313-2-nodes", "ubuntu 22.04", "apt", (3, 10, 12)),
        ("i5-8250u", "ubuntu 24.04", "apt", (3, 12, 3)),
        ("raspberry-pi-5", "debian 12", "apt", (3, 11, 2)),  # Raspberry Pi OS, by its own words
        ("raspberry-pi-5-trixie", "debian 13", "apt", (3, 13, 5)),
        ("rk3588", "debian 12", "apt", (3, 11, 2)),  # Armbian keeps Debian's ID
        ("kunpeng-920-4-nodes", "openEuler 22.03", "dnf", (3, 9, 9)),
        ("kunpeng-920", "openEuler 24.03", "dnf", (3, 11, 6)),
        ("ampere-altra", "rocky 9.5", "dnf", (3, 9, 21)),
    ],
)
def test_distribution_is_known_with_its_package_manager_and_python(
    board: Board, name: str, distribution: str, manager: str, python: tuple[int, int, int]
) -> None:
    found = board(name)
    assert f"{found.distribution_id} {found.distribution_version}" == distribution
    assert found.tools.package_manager == manager
    assert found.tools.python_version == python
    assert found.tools.systemd_version is not None


@pytest.mark.parametrize("name", ["raspberry-pi-4", "raspberry-pi-5", "raspberry-pi-5-trixie"])
def test_raspberry_pi_os_is_known_by_its_board_and_kernel(board: Board, name: str) -> None:
    pi = board(name)
    assert (pi.board_model or "").startswith("Raspberry Pi")
    assert "+rpt-rpi-" in pi.kernel.release


def test_armbian_names_itself(board: Board) -> None:
    assert board("rk3588").distribution_name.startswith("Armbian ")


def test_rk3588_has_three_clusters_by_capacity(board: Board) -> None:
    assert board("rk3588").clusters == (
        CpuCluster(
            cpus=CpuSet.parse("0-3"),
            cpu_capacity=397,
            max_freq_khz=1_800_000,
            core_type="Cortex-A55",
        ),
        CpuCluster(
            cpus=CpuSet.parse("4-5"),
            cpu_capacity=1024,
            max_freq_khz=2_400_000,
            core_type="Cortex-A76",
        ),
        CpuCluster(
            cpus=CpuSet.parse("6-7"),
            cpu_capacity=1003,
            max_freq_khz=2_352_000,
            core_type="Cortex-A76",
        ),
    )
    assert board("rk3588").tools.zram_manager == "armbian-zram-config"


def test_two_node_server_has_nodes_with_memory(board: Board) -> None:
    server = board("kunpeng-920")
    assert server.numa_nodes == (
        NumaNode(node=0, cpus=CpuSet.parse("0-23"), mem_total_bytes=65466380 * 1024),
        NumaNode(node=1, cpus=CpuSet.parse("24-47"), mem_total_bytes=66031616 * 1024),
    )
    assert server.clusters[0].core_type == "TSV110"
    assert server.board_model == "Huawei TaiShan 200 (Model 2280)"
    assert server.tools.package_manager == "dnf"
    assert server.tools.numactl_works is True
    assert server.tools.tuned_profile == "throughput-performance"
    assert server.tools.selinux_enforcing is True


def test_laptop_has_pairs_of_smt_siblings(board: Board) -> None:
    laptop = board("i5-8250u")
    assert [str(group) for group in laptop.smt_siblings] == ["0,4", "1,5", "2,6", "3,7"]
    assert "avx2" in laptop.cpu_flags
    assert laptop.clusters[0].cpu_capacity is None


def test_container_tells_its_quota_and_memory_limit(board: Board) -> None:
    vm = board("cloud-vm-quota")
    assert vm.virtualization == "lxc"
    assert vm.cgroup.quota_cpus == 1.5
    assert vm.cgroup.memory_limit_bytes == 4 << 30


def test_jetson_leaves_an_unwired_sensor_out(board: Board) -> None:
    jetson = board("jetson-orin-nano")
    assert jetson.health.temperature_c == pytest.approx(49.312)
    assert jetson.tools.zram_manager == "nvzramconfig"
    assert len(jetson.swaps) == 6
    assert all(swap.is_zram for swap in jetson.swaps)


def test_hybrid_cgroup_is_version_1_where_systemds_knobs_act(board: Board) -> None:
    vm = board("firecracker-vm")
    assert vm.cgroup.version == 1
    assert "cpu" in vm.cgroup.controllers
    assert vm.cgroup.quota_cpus is None
    assert vm.cgroup.memory_limit_bytes is None


def test_absent_things_are_none_and_not_zero(board: Board) -> None:
    vm = board("firecracker-vm")
    assert vm.tools.systemd_version is None  # installed, but not pid 1
    assert vm.tools.tuned_profile is None
    assert vm.tools.zram_manager is None
    assert vm.health.temperature_c is None
    assert vm.health.throttled_flags is None
    assert vm.health.clock_skew_s is None
    assert vm.clusters[0].max_freq_khz is None


def test_noise_of_a_login_shell_before_the_probe_is_skipped(probe_text: ProbeText) -> None:
    text = probe_text("rk3588")
    noisy = parse_profile("Welcome to Armbian!\n" + text, control_time_s=None)
    assert noisy == parse_profile(text, control_time_s=None)


def test_probe_cut_short_is_a_parse_error(probe_text: ProbeText) -> None:
    with pytest.raises(ParseError, match="'@@ end' as its last section"):
        parse_profile(probe_text("rk3588")[:-10], control_time_s=None)


def test_probe_of_another_format_is_a_parse_error() -> None:
    with pytest.raises(ParseError, match="the probe's format: want 1, have '2'"):
        split_sections("@@ format\n2\n@@ end\n")


def test_32_bit_userland_on_a_64_bit_kernel_is_not_arm64() -> None:
    sections = {"uname": ("6.6.31+rpt-rpi-v8 aarch64",), "long_bit": ("32",)}
    assert parse_uname(sections) == ("6.6.31+rpt-rpi-v8", "armv8l")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
            },
            2.0,
        ),
        (
            {
                "/sys/fs/cgroup/a/cpu.max": "300000 100000",
                "/sys/fs/cgroup/cpu.max": "200000 100000",
            },
            2.0,
        ),
    ],
)
def test_smallest_quota_above_the_service_counts(
    files: dict[str, str], quota: float | None
) -> None:
    assert parse_quota(files) == quota


def test_library_for_another_word_size_does_not_count() -> None:
    i386 = ("libgomp.so.1 (libc6) => /lib/i386-linux-gnu/libgomp.so.1",)
    amd64 = ("libgomp.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libgomp.so.1",)
    assert has_library(i386, "libgomp.so.1", "x86_64") is False
    assert has_library(i386 + amd64, "libgomp.so.1", "x86_64") is True
    assert has_library(("/usr/lib64/libgomp.so.1",), "libgomp.so.1", "aarch64") is True


@pytest.mark.parametrize(
    ("paths", "manager"),
    [
        ((), None),
        (("/usr/lib/systemd/system-generators/zram-generator",), None),
        (("/usr/lib/systemd/zram-generator.conf",), "systemd-zram-generator"),
        (("/lib/systemd/system/zramswap.service",), "zram-tools"),
        (("/usr/lib/systemd/system/zram-config.service",), "zram-config"),
        (
            (
                "/run/systemd/zram-generator.conf.d/20-rpi-swap.conf",
                "/usr/lib/systemd/system-generators/rpi-swap-generator",
            ),
            "rpi-swap",
        ),
        (("/etc/systemd/zram-generator.conf.d/90-edgellm.conf",), "edgellm"),
        (("/etc/systemd/system/edgellm-zram.service",), "edgellm"),
        (
            (
                "/etc/systemd/system/edgellm-zram.service",
                "/lib/systemd/system/zramswap.service",
            ),
            "zram-tools",
        ),
    ],
)
def test_zram_manager_is_told_from_its_files(paths: tuple[str, ...], manager: str | None) -> None:
    assert parse_zram_manager(paths) == manager


@pytest.mark.parametrize(
    ("name", "manager"),
    [
        ("rk3588", "armbian-zram-config"),
        ("jetson-orin-nano", "nvzramconfig"),
        ("raspberry-pi-5-trixie", "rpi-swap"),
    ],
)
def test_zram_manager_of_a_board_is_known(board: Board, name: str, manager: str) -> None:
    assert board(name).tools.zram_manager == manager


def test_governors_are_told_once_and_as_far_as_all_policies_offer_them() -> None:
    policy = "/sys/devices/system/cpu/cpufreq/policy"
    files = {
        f"{policy}0/scaling_governor": "ondemand",
        f"{policy}4/scaling_governor": "performance",
        f"{policy}6/scaling_governor": "ondemand",
        f"{policy}0/scaling_available_governors": "conservative ondemand performance",
        f"{policy}4/scaling_available_governors": "performance ondemand",
        f"{policy}6/scaling_available_governors": "ondemand performance schedutil",
    }
    assert parse_cpufreq(files) == CpuFreq(
        governors=("ondemand", "performance"), available=("ondemand", "performance")
    )
    assert parse_cpufreq({}) is None


def test_governors_that_no_two_policies_share_are_not_available() -> None:
    policy = "/sys/devices/system/cpu/cpufreq/policy"
    files = {
        f"{policy}0/scaling_governor": "a",
        f"{policy}0/scaling_available_governors": "a",
        f"{policy}1/scaling_available_governors": "b",
        f"{policy}2/scaling_available_governors": "c",
    }
    assert parse_cpufreq(files) == CpuFreq(governors=("a",), available=())


def test_real_time_and_daemons_are_read_from_the_probe(board: Board) -> None:
    laptop, server = board("i5-8250u"), board("epyc-7313-2-nodes")
    assert laptop.kernel.rt_runtime_us == 950_000
    assert laptop.tools.realtime_works
    assert laptop.tools.power_profiles_daemon
    assert not laptop.tools.irqbalance
    assert server.tools.irqbalance
    assert not server.tools.power_profiles_daemon
    assert not board("jetson-agx-orin").tools.realtime_works


def test_budget_without_limit_is_minus_one(probe_text: ProbeText) -> None:
    text = probe_text("rk3588").replace("sched_rt_runtime_us:950000", "sched_rt_runtime_us:-1")
    assert parse_profile(text, control_time_s=None).kernel.rt_runtime_us == -1


def test_memory_nodes_of_services_are_pid_1s(board: Board, probe_text: ProbeText) -> None:
    assert board("kunpeng-920").cgroup.effective_nodes == CpuSet.parse("0-1")
    older = probe_text("kunpeng-920").replace("Mems_allowed_list:\t0-1\n", "")
    assert parse_profile(older, control_time_s=None).cgroup.effective_nodes is None


def test_what_was_recorded_comes_back(board: Board, probe_text: ProbeText) -> None:
    recorded = RecordedHost.of(board("n100"))
    text = probe_text("n100").replace("@@ recorded\n", f"@@ recorded\n{recorded.to_json_text()}")
    text = text.replace("@@ measured\n", '@@ measured\n{\n "winner": "batch"\n}\n\n')
    host = parse_profile(text, control_time_s=None)
    assert host.recorded == recorded
    assert host.measured_json == '{\n"winner": "batch"\n}'
    assert (board("n100").recorded, board("n100").measured_json) == (None, None)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("{",),
        ("[]",),
        ("null",),
        ('{"kernel": "6.1"}',),
        tuple(WHOLE.replace('"kernel": "6.1"', '"kernel": 6').splitlines()),
        tuple(WHOLE.replace("4000", "-1").splitlines()),
        tuple(WHOLE.replace("4000", '"x"').splitlines()),
        tuple(WHOLE.replace("4000", "true").splitlines()),
        tuple(WHOLE.replace('"cgroup_version": 2', '"cgroup_version": [2]').splitlines()),
        tuple(WHOLE.replace("{", '{"more": 1,', 1).splitlines()),
    ],
)
def test_record_that_is_not_ours_counts_as_none(lines: tuple[str, ...]) -> None:
    assert parse_recorded(tuple(WHOLE.splitlines())) is not None
    assert parse_recorded(lines) is None


def test_sysctl_files_of_others_that_set_swappiness_are_listed(probe_text: ProbeText) -> None:
    text = probe_text("rk3588").replace(
        "@@ sysctl_swappiness\n",
        "@@ sysctl_swappiness\n"
        "/etc/sysctl.d/90-edgellm.conf:vm.swappiness = 100\n"
        "/etc/sysctl.d/99-swap.conf:vm.swappiness=1\n",
    )
    profile = parse_profile(text, control_time_s=None)
    assert profile.swappiness_files == ("/etc/sysctl.d/99-swap.conf",)


def test_cgroup2_beside_v1_is_hybrid_and_counts_as_1() -> None:
    hybrid = (
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0",
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0",
    )
    assert parse_cgroup_version(hybrid) == 1
    assert parse_cgroup_version(("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",)) == 2
    assert parse_cgroup_version(()) is None


def test_the_mount_on_top_decides_noexec() -> None:
    mounts = ("/dev/sda1 /opt ext4 rw 0 0", "tmpfs /opt tmpfs rw,noexec 0 0")
    assert parse_noexec(mounts, "/opt") is True
    assert parse_noexec(mounts[:1], "/opt") is False


def test_free_disk_is_the_available_column_in_bytes() -> None:
    line = "/dev/mmcblk0p2    30266516 5312844  23391552      19% /"
    assert parse_disk((line,)) == (23391552 * 1024, "/")


@pytest.mark.parametrize(
    ("lines", "flags"),
    [
        (("throttled=0x50005",), 0x50005),
        (("throttled=0x0",), 0),
        (("VCHI initialization failed",), None),
        ((), None),
    ],
)
def test_throttled_flags_are_none_where_the_board_does_not_tell(
    lines: tuple[str, ...], flags: int | None
) -> None:
    assert parse_throttled(lines, {}) == flags


def test_clock_skew_is_the_hosts_clock_minus_ours() -> None:
    assert parse_clock_skew(("1000",), 940.5) == 59.5
    assert parse_clock_skew((), 940.5) is None


def test_hottest_zone_counts() -> None:
    zone = "/sys/class/thermal/thermal_zone"
    assert parse_temperature({f"{zone}0/temp": "45000", f"{zone}1/temp": "51500"}) == 51.5
    assert parse_temperature({f"{zone}0/temp": "-274000"}) is None
