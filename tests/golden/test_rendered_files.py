"""Every file on a host as reviewed text. After a deliberate change: pytest tests/golden \
--update-golden.

tests/golden/files/<scenario>/<name>: a board of tests/hardware, with settings where they matter.
"""

from __future__ import annotations

import configparser
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import layout, render
from edgellm.desired import RESERVE_DROP_INS, desired_state
from edgellm.hardware import HostProfile, Tools
from edgellm.release import Release, ReleaseFile
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, plan_tuning

GOLDEN = Path(__file__).with_name("files")
HARDWARE = Path(__file__).parents[1] / "hardware"
API_KEY = "correct-horse-battery-staple"
KEY_HASHES = (hashlib.sha256(API_KEY.encode()).hexdigest(), "ab" * 32)
UNITS = (".service", ".slice", ".socket")

# Where a rendered file may point on a host: our own places, and what every distribution has
ALLOWED_PATHS = (
    "/opt/edgellm/",
    "/etc/edgellm/",
    "/run/edgellm-zram",
    layout.REALTIME_TRIAL,
    "/sys/devices/system/cpu/cpufreq/",
    "/bin/sh",
    "/sbin/modprobe",
    "/dev/null",
)
NO_PATHS = ("system_prompt.txt", "app/main.py")  # the operator's own text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A board, what of it and its tools is otherwise, and settings beside the defaults."""

    board: str
    profile: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    key_hashes: tuple[str, ...] = ()
    upstream_key_hash: str | None = None
    app_files: tuple[ReleaseFile, ...] = ()


SCENARIOS = {
    # Also of boards that check_host refuses: what they get once their OS is a later one
    **{path.parent.name: Scenario(board=path.parent.name) for path in HARDWARE.glob("*/probe.txt")},
    "raspberry-pi-4-with-zram-generator": Scenario(
        board="raspberry-pi-4", profile={"zram_devices": ()}, tools={"zram_generator": True}
    ),
    "raspberry-pi-4-without-chrt": Scenario(
        board="raspberry-pi-4",
        tools={"chrt": False, "package_manager": None},
        settings={"install_packages": False},
    ),
    "raspberry-pi-5-open-with-key-and-prompt": Scenario(
        board="raspberry-pi-5",
        settings={
            "bind_address": "::",
            "port": 8080,
            "api_key_env": "EDGELLM_API_KEY",
            "system_prompt": "You are a terse assistant.\n'Quotes', $HOME, `ls` and 100 % stay.\n",
            "mlock": False,
        },
        key_hashes=KEY_HASHES,
    ),
    "i5-8250u-realtime": Scenario(
        board="i5-8250u",
        settings={
            "scheduling": "fifo",
            "scheduling_priority": 10,
            "allow_realtime": True,
            "threads": 2,
            "swappiness": 0,
        },
    ),
    "rk3588-reserved": Scenario(
        board="rk3588", settings={"reserve_cpus": True, "cpu_governor": "performance"}
    ),
    "n100-with-a-later-sysctl-file": Scenario(
        board="n100", profile={"swappiness_files": ("/etc/sysctl.d/99-local.conf",)}
    ),
    "rk3588-forwarding": Scenario(
        board="rk3588",
        settings={
            "engine": "forward",
            "upstream_url": "http://[::1]:8080/v1",
            "upstream_model": "qwen2.5:0.5b",
            "upstream_key_env": "UPSTREAM_KEY",
            "upstream_unit": "llama-server.service",
            "cors_origins": "https://panel.example:8443,http://[fd00::1]:8080",
            "log_prompts": True,
            "drain_deadline_s": 5,
        },
        upstream_key_hash="cd" * 32,
    ),
    "raspberry-pi-4-own-app": Scenario(
        board="raspberry-pi-4",
        settings={"server_app": "main:app", "server_app_dir": "my_app", "web_ui": False},
        app_files=(ReleaseFile(name="app/main.py", content="app = 1\n", mode=0o644),),
    ),
    "kunpeng-920-without-numa": Scenario(board="kunpeng-920", settings={"numa": "off"}),
}


# Beside the release's own: where it lies on a host -> its name in a scenario's folder
NAMES = {
    layout.SYSCTL_CONF: "90-edgellm.sysctl.conf",
    layout.SYSCTL_CONF_LAST: "zz-edgellm.sysctl.conf",
    layout.LIMITS_CONF: "90-edgellm.limits.conf",
    layout.GOVERNOR_CONF: "90-edgellm.governor.conf",
    layout.ZRAM_UNIT: "edgellm-zram.service",
    layout.ZRAM_GENERATOR_CONF: "zram-generator.conf",
    **{path: "reserved.slice.conf" for path in RESERVE_DROP_INS},  # both have the same text
}


def host_files(plan: TuningPlan, settings: Settings, chosen: Scenario) -> dict[str, str]:
    """{name: text} of all that steps/ write on a host of this plan."""
    hashes = chosen.key_hashes
    release = render.release_files(
        plan,
        settings,
        hashes,
        upstream_key_hash=chosen.upstream_key_hash,
        app_files=chosen.app_files,
    )
    files = {file.name: file.content for file in release}
    desired = desired_state(
        settings=settings,
        plan=plan,
        release=Release.of(model_sha256="0" * 64, runtime_id="1" * 16, files=release),
        text=render.text,
    )
    for group in (desired.kernel, desired.zram, desired.reserve):
        files.update({NAMES[file.path]: file.content for file in group.files})
    if hashes:
        files["api_keys"] = render.api_keys_file(hashes)
    return files


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def files(
    scenario: str,
    board: Callable[[str], HostProfile],
    settings_with: Callable[..., Settings],
) -> dict[str, str]:
    chosen = SCENARIOS[scenario]
    profile = board(chosen.board)
    tools: Tools = replace(profile.tools, **chosen.tools)
    settings = settings_with(**chosen.settings)
    plan = plan_tuning(replace(profile, tools=tools, **chosen.profile), settings)
    return host_files(plan, settings, chosen)


def test_files_of_a_host_are_the_reviewed_ones(
    scenario: str, files: dict[str, str], update_golden: bool
) -> None:
    folder = GOLDEN / scenario
    if update_golden:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    reviewed = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert files.keys() == reviewed.keys()
    for name, text in files.items():
        assert text == reviewed[name], f"{scenario}/{name}"


def test_every_reviewed_folder_belongs_to_a_scenario() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == SCENARIOS.keys()


def test_every_template_is_rendered_by_a_scenario() -> None:
    templates = {path.name.removesuffix(".j2") for path in render.TEMPLATES.glob("*.j2")}
    on_the_control_machine = {"fleet_report.html"}
    rendered = {path.name for path in GOLDEN.glob("*/*")}
    if list(GOLDEN.glob("*/upstream.d/*.conf")):  # named after the operator's unit
        rendered.add("upstream.conf")
    assert templates - on_the_control_machine <= rendered


def test_every_file_ends_in_one_newline_and_has_no_trailing_spaces(files: dict[str, str]) -> None:
    for name, text in files.items():
        assert text.endswith("\n"), name
        assert not text.endswith("\n\n"), name
        assert not [line for line in text.splitlines() if line != line.rstrip()], name


def test_no_template_syntax_and_no_python_value_is_left(files: dict[str, str]) -> None:
    for name, text in files.items():
        assert not re.search(r"\{\{|\{%|%\}|\bNone\b|\bTrue\b|\bFalse\b|object at 0x", text), name


def test_no_secret_is_in_any_file(files: dict[str, str]) -> None:
    for name, text in files.items():
        assert API_KEY not in text, name
        if name != "api_keys":
            assert not any(key_hash in text for key_hash in KEY_HASHES), name


def test_no_path_of_this_machine_is_in_any_file(files: dict[str, str]) -> None:
    for name, text in files.items():
        if name in NO_PATHS:
            continue
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        for path in re.findall(r"(?<![\w.$}/:*])/[a-z][\w./-]*", "\n".join(lines)):
            assert path.startswith(ALLOWED_PATHS), f"{name}: {path}"


# Advice of the field (docs/tuning.md) that no file may follow: pattern -> why
NEVER = {
    r"^CPUQuota": "a hard stop, not a share",
    r"(taskset|chrt) (-p|--pid)": "set on a running server it reaches one thread",
    r"^Nice=|\bnice -": "counts inside one session only",
    r"--cpunodebind": "undoes an affinity, and is refused for nodes outside the mask",
    r"OMP_NUM_THREADS": "the engine sets its own",
    r"--threads": "no option of uvicorn",
    r"swapoff -a|swapoff --all": "can kill a host",
    r"overcommit_memory": "unrelated",
    r"mlockall": "no such command",
    r"cpu[0-9*]+/online": "small cores stay on line",
    r"\bshm": "the server uses none",
    r"set_numa_enabled": "does not exist",
}


def test_no_file_follows_advice_that_is_wrong(files: dict[str, str]) -> None:
    for name, text in files.items():
        for pattern, why in NEVER.items():
            assert not re.search(pattern, text, re.MULTILINE), f"{name}: {why}"


def test_no_slice_has_an_affinity_which_is_no_property_of_slices(files: dict[str, str]) -> None:
    for name, text in files.items():
        assert "slice" not in name or "CPUAffinity" not in text, name


def test_open_files_and_locked_memory_are_limits_of_the_unit(files: dict[str, str]) -> None:
    assert re.search(r"^LimitNOFILE=65536$", files["edgellm.service"], re.MULTILINE)
    assert re.search(r"^LimitMEMLOCK=(\d+|infinity)$", files["edgellm.service"], re.MULTILINE)


# What the programs that read them say


def test_entrypoint_is_sound_shell(files: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "entrypoint.sh"
    script.write_text(files["entrypoint.sh"])
    done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_entrypoint_execs_one_command_with_the_releases_id_in_its_environment(
    files: dict[str, str], tmp_path: Path
) -> None:
    """Run for real, with programs that print what they were given instead of the server."""
    release = tmp_path / "releases" / "3abadcf8e3b5c3fa"
    programs = tmp_path / "bin"
    release.mkdir(parents=True)
    programs.mkdir()
    script = release / "entrypoint.sh"
    script.write_text(files["entrypoint.sh"])
    script.chmod(0o755)
    current = tmp_path / "current"
    current.symlink_to("releases/3abadcf8e3b5c3fa")
    for name in ("numactl", "taskset", "chrt", "python3"):
        program = programs / name
        program.write_text('#!/bin/sh\necho "$EDGELLM_RELEASE" "$PYTHONPATH" "${0##*/}" "$@"\n')
        program.chmod(0o755)
    done = subprocess.run(
        [str(current / "entrypoint.sh")],
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    release_id, python_path, *command = done.stdout.split()
    assert release_id == "3abadcf8e3b5c3fa"
    assert python_path in (str(release / "runtime"), f"{release}/runtime:{release}/app")
    assert command[command.index("python3") :] == ["python3", "-s", "-B", "-m", "edgellm_server"]


@pytest.mark.parametrize(
    ("confirmed", "trial", "policy"),
    [
        (None, None, ["--batch", "0"]),
        ("3abadcf8e3b5c3fa", None, ["--fifo", "10"]),
        (None, "3abadcf8e3b5c3fa", ["--fifo", "10"]),
        ("another", "3abadcf8e3b5c3fa", ["--fifo", "10"]),
        ("another", None, ["--batch", "0"]),
        ("3abadcf8e3b5c3fa-and-more", "", ["--batch", "0"]),
    ],
)
def test_real_time_is_for_the_release_that_was_confirmed_or_is_tried(
    confirmed: str | None, trial: str | None, policy: list[str], tmp_path: Path
) -> None:
    release = tmp_path / "3abadcf8e3b5c3fa"
    release.mkdir()
    text = (GOLDEN / "i5-8250u-realtime" / "entrypoint.sh").read_text()
    for path, content in ((layout.REALTIME_CONFIRMED, confirmed), (layout.REALTIME_TRIAL, trial)):
        place = tmp_path / Path(path).name
        assert path in text
        text = text.replace(path, str(place))
        if content is not None:
            place.write_text(f"{content}\n")
    script = release / "entrypoint.sh"
    script.write_text(text)
    program = tmp_path / "chrt"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", str(script)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [*policy, "python3", "-s", "-B", "-m", "edgellm_server"]


def test_server_env_is_one_assignment_a_line(files: dict[str, str]) -> None:
    lines = [line for line in files["server.env"].splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*=[][A-Za-z0-9_./:,;-]+", line), line
    names = [line.partition("=")[0] for line in lines]
    assert len(names) == len(set(names))


def test_units_are_sections_of_assignments(files: dict[str, str]) -> None:
    for name, text in files.items():
        if not name.endswith((*UNITS, "zram-generator.conf", ".service.conf", ".slice.conf")):
            continue
        parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters="=")
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their case
        parser.read_string(text, source=name)
        assert parser.sections(), name
        for section in parser.sections():
            for key, value in parser[section].items():
                assert key[0].isupper() or name == "zram-generator.conf", f"{name}: {key}"
                assert value or key == "CapabilityBoundingSet", f"{name}: {key} is empty"


def test_sysctl_and_limits_files_are_lines_their_readers_know(files: dict[str, str]) -> None:
    def lines(name: str) -> list[str]:
        return [line for line in files.get(name, "").splitlines() if not line.startswith("#")]

    for line in lines("90-edgellm.sysctl.conf") + lines("zz-edgellm.sysctl.conf"):
        assert re.fullmatch(r"vm\.swappiness = \d+", line)
    for line in lines("90-edgellm.governor.conf"):
        assert re.fullmatch(r"w /sys/\S+/policy\*/scaling_governor - - - - [a-z]+", line)
    for line in lines("90-edgellm.limits.conf"):
        assert re.fullmatch(r"(\*|root) +soft nofile \d+", line)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_no_fault_in_the_units(files: dict[str, str], tmp_path: Path) -> None:
    units = []
    for name, text in files.items():
        if name.endswith(UNITS):
            unit = tmp_path / name
            # It looks for the program; ours lies on no control machine
            unit.write_text(text.replace("/opt/edgellm/current/entrypoint.sh", "/bin/true"))
            units.append(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, units)],
        capture_output=True,
        text=True,
    )
    # Units of this machine may have faults of their own
    said = [line for line in done.stderr.splitlines() if "edgellm" in line]
    assert said == []
    assert done.returncode == 0, done.stderr
