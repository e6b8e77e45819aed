"""Host data -> Settings, and the faults that a person can make in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgellm.errors import SettingsError
from edgellm.settings import Settings, check_value

FORWARD = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}


def test_defaults_leave_the_tuning_to_the_plan(settings_with: Callable[..., Settings]) -> None:
    settings = settings_with()
    assert (settings.threads, settings.workers, settings.cpus) == (None, None, None)
    assert (settings.scheduling, settings.zram, settings.numa) == ("batch", "auto", "auto")
    assert settings.ttft_budget_ms == 1500


def test_missing_model_is_named_with_its_meaning() -> None:
    with pytest.raises(SettingsError, match=r"edge-01: .*model_sha256 is missing \(SHA-256"):
        Settings.from_host_data({}, host="edge-01")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"thread": 4}, r"thread is not a setting \(did you mean threads\?\)"),
        ({"threads": "4"}, "threads must be a whole number, not '4'"),
        ({"threads": True}, "threads must be a whole number, not True"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"swappiness": 201}, "swappiness must be at most 200, not 201"),
        ({"cpu_governor": "userspace"}, "cpu_governor must be one of performance, schedutil"),
        ({"reserve_cpus": "0"}, "reserve_cpus must be true or false"),
        ({"scheduling": "deadline"}, "scheduling must be one of other, batch, idle, rr, fifo"),
        ({"cpus": "0-3;reboot"}, "cpus must look like"),
        ({"port": None}, "port must not be empty"),
        ({"scheduling": "rr", "scheduling_priority": 10}, "needs allow_realtime=true"),
        ({"scheduling": "fifo", "allow_realtime": True}, "needs scheduling_priority 1 to 50"),
        ({"scheduling_priority": 5}, "has a meaning for rr and fifo alone"),
        (
            {"scheduling": "fifo", "scheduling_priority": 99, "allow_realtime": True},
            "must be at most 50",
        ),
        ({"bind_address": "0.0.0.0"}, "needs api_key_env"),
        ({"max_tokens": 4096, "n_ctx": 2048}, "max_tokens=4096 leaves no room for a prompt"),
        ({"cors_origins": "*"}, "cors_origins must look like"),
        ({"cors_origins": "https://a.example/page"}, "cors_origins must look like"),
        ({"cors_origins": "https://a.example, https://b.example"}, "cors_origins must look like"),
        ({"api_key_env": "ONE,two"}, "api_key_env must look like"),
        ({"engine": "vllm"}, "engine must be one of llama, forward"),
        ({"engine": "forward"}, "engine=forward needs upstream_url"),
        ({"upstream_url": "http://127.0.0.1:8080/v1"}, "has a meaning for engine=forward alone"),
        ({"upstream_unit": "vllm.service"}, "has a meaning for engine=forward alone"),
        ({**FORWARD, "upstream_url": "http://192.0.2.7:8080/v1"}, "is not on loopback"),
        ({**FORWARD, "upstream_url": "http://127.0.0.1.evil.example/v1"}, "is not on loopback"),
        ({**FORWARD, "upstream_url": "https://127.0.0.1/v1"}, "upstream_url must look like http"),
        ({**FORWARD, "upstream_url": "http://a@127.0.0.1/v1"}, "upstream_url must look like http"),
        ({**FORWARD, "upstream_url": "http://localhost:8000/v1"}, "is this server itself"),
        ({**FORWARD, "upstream_url": "http://127.0.0.1:99999/v1"}, "it must look like"),
        ({**FORWARD, "upstream_unit": "../x.service"}, "upstream_unit must look like"),
        ({**FORWARD, "upstream_unit": "edgellm.service"}, "is this server itself"),
        ({"server_app": "main:app"}, "server_app and server_app_dir belong together"),
        ({"server_app_dir": "app"}, "server_app and server_app_dir belong together"),
        ({"server_app": "main", "server_app_dir": "app"}, "server_app must look like"),
    ],
)
def test_fault_is_named_with_what_is_allowed(
    settings_with: Callable[..., Settings], data: dict[str, Any], fault: str
) -> None:
    with pytest.raises(SettingsError, match=fault):
        settings_with(**data)


@pytest.mark.parametrize(
    "data",
    [
        FORWARD,
        {**FORWARD, "upstream_url": "http://[::1]:8000/v1"},  # not the address that ours has
        {**FORWARD, "upstream_url": "http://localhost", "upstream_model": "Qwen/Qwen2.5:0.5b"},
        {**FORWARD, "max_tokens": 4096, "n_ctx": 2048},  # the context is the upstream's
        {**FORWARD, "upstream_unit": "ollama@gpu0.service", "upstream_key_env": "UP_KEY"},
        {"server_app": "pkg.main:create.app", "server_app_dir": "my app"},
        {"cors_origins": "http://localhost:3000,https://[fd00::1]"},
        {"api_key_env": "KEY_1,KEY_2"},
    ],
)
def test_what_belongs_together_is_taken(
    settings_with: Callable[..., Settings], data: dict[str, Any]
) -> None:
    settings = settings_with(**data)
    assert all(getattr(settings, name) == value for name, value in data.items())


@pytest.mark.parametrize(
    ("address", "listen_stream"), [("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000")]
)
def test_address_and_port_are_written_as_systemd_reads_them(
    settings_with: Callable[..., Settings], address: str, listen_stream: str
) -> None:
    assert settings_with(bind_address=address).listen_stream == listen_stream


def test_all_faults_are_told_at_once(settings_with: Callable[..., Settings]) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_with(threads=0, workers=0)
    assert "threads must be at least 1" in str(caught.value)
    assert "workers must be at least 1" in str(caught.value)


def test_data_of_connectors_and_inventory_is_no_setting(
    settings_with: Callable[..., Settings],
) -> None:
    assert settings_with(ssh_user="root", arch="arm64", wave=1, _sudo=True).port == 8000


def test_one_value_can_be_checked_alone() -> None:
    assert check_value("n_batch", 128) is None
    assert check_value("n_batch", 8) == "n_batch must be at least 16, not 8"
