"""Host data -> Settings, and the faults that a person can make in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgellm.errors import SettingsError
from edgellm.settings import Settings, check_value


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
        ({"scheduling": "deadline"}, "scheduling must be one of other, batch, idle, rr, fifo"),
        ({"cpus": "0-3;reboot"}, "cpus must look like"),
        ({"port": None}, "port must not be empty"),
        ({"scheduling": "rr", "scheduling_priority": 10}, "needs allow_realtime=true"),
        ({"scheduling": "fifo", "allow_realtime": True}, "needs scheduling_priority 1 to 50"),
        ({"scheduling_priority": 5}, "has a meaning for rr and fifo alone"),
        ({"bind_address": "0.0.0.0"}, "needs api_key_env"),
        ({"max_tokens": 4096, "n_ctx": 2048}, "max_tokens=4096 leaves no room for a prompt"),
    ],
)
def test_fault_is_named_with_what_is_allowed(
    settings_with: Callable[..., Settings], data: dict[str, Any], fault: str
) -> None:
    with pytest.raises(SettingsError, match=fault):
        settings_with(**data)


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
