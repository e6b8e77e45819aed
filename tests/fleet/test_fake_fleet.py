"""Roll-outs to many hosts of which some are bad: each bad one fails alone, with its reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edgellm.cpuset import CpuSet
from tests.rolled_out import RolledOut

HEALTHY = {"pi5-01", "i5-01", "new-model"}
DOWN = {"success": False, "stderr": "ssh: the host went away"}


def slow(ttft_ms: float) -> str:
    line = {"schema": 1, "ready": True, "n": 5, "median_ttft_ms": ttft_ms, "p95_ttft_ms": 9000}
    return json.dumps({**line, "failures": []})


@pytest.fixture(scope="module")
def mixed(new_fleet: Callable[[], Any]) -> Any:
    """One run over healthy hosts, and over one host for each way to be bad."""
    fleet = new_fleet()
    fleet.add("pi5-01")
    fleet.add("i5-01", "x86_64")
    fleet.add(
        "new-model",
        responses={
            # Before the other: the script that receives has its function too
            '"action": "offset"': '{"ok": true, "offset": 0}',
            '"action": "finish"': json.dumps({"ok": True, "offset": 1}),
            **_not_whole(fleet),
        },
    )
    fleet.add("bad-settings", data={"thread": 4})
    fleet.add("bad-realtime", "x86_64", data={"scheduling": "fifo"})
    fleet.add("bad-arch", board="i5-8250u")
    fleet.add("bad-cpu", "x86_64", board="x86-no-avx2")
    fleet.add("bad-probe", responses={"section format": "Segmentation fault"})
    fleet.add("mute-probe", responses={"section format": DOWN})
    fleet.add("no-python", responses={"def runtime_is_whole": DOWN})
    fleet.add("odd-artifacts", responses={"def runtime_is_whole": "{}"})
    fleet.add("odd-paths", responses={"def state_of": "{}"})
    fleet.add("mute-paths", responses={"def state_of": DOWN})
    fleet.add("mute-service", responses={"SliceReload": DOWN})
    fleet.add("no-restart", responses={"systemctl stop edgellm.service": DOWN})
    fleet.add("slow", responses={"edgellm_server/probe.py": slow(8000)})
    fleet.add("no-smoke", responses={"edgellm_server/probe.py": "Killed"})
    fleet.add("full", responses={'"action": "offset"': _full(), **_not_whole(fleet)})
    return fleet.run("qwen")


def _not_whole(fleet: Any) -> dict[str, str]:
    model = f"/opt/edgellm/models/{fleet.depot.model_sha256}.gguf"
    runtimes = {f"/opt/edgellm/runtimes/{i}": True for i in fleet.depot.runtime_ids.values()}
    return {"def runtime_is_whole": json.dumps({model: False, **runtimes})}


def _full() -> str:
    return json.dumps(
        {"ok": False, "kind": "disk_full", "free_bytes": 1_000_000, "needed_bytes": 2_000_000}
    )


def test_healthy_hosts_are_verified_although_others_are_bad(mixed: Any) -> None:
    assert {name for name, status in mixed.statuses.items() if status == "ok"} == HEALTHY


def test_every_other_host_failed_and_none_is_missing(mixed: Any) -> None:
    assert {status for name, status in mixed.statuses.items() if name not in HEALTHY} == {"failed"}
    assert len(mixed.statuses) == 18


def test_a_run_with_a_bad_host_does_not_exit_0(mixed: Any) -> None:
    assert mixed.returncode == 1


def test_no_bad_host_shows_a_traceback(mixed: Any) -> None:
    assert "Traceback" not in mixed.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bad-settings", "thread"),
        ("bad-realtime", "allow_realtime"),
        ("bad-arch", "architecture"),
        ("bad-cpu", "avx2"),
        ("bad-probe", "HostProfileFact"),
        ("mute-probe", "HostProfileFact"),
        ("no-python", "ArtifactsWhole"),
        ("odd-artifacts", ""),
        ("odd-paths", ""),
        ("mute-paths", "PathStates"),
        ("mute-service", "Service"),
        ("no-restart", "the host went away"),
        ("slow", "slow: median TTFT 8000 ms is over the budget of 1500 ms"),
        ("no-smoke", "probe.py"),
        ("full", "want 2 MB free in /opt/edgellm/models, have 1 MB"),
    ],
)
def test_the_report_says_why_a_host_is_bad_and_what_to_do(
    mixed: Any, name: str, reason: str
) -> None:
    found = mixed.host(name)["reason"]
    assert reason in found
    assert "fix: " in found


@pytest.mark.parametrize(
    "name", ["bad-settings", "bad-realtime", "bad-arch", "bad-cpu", "bad-probe", "mute-probe"]
)
def test_a_host_that_is_bad_from_the_start_is_not_touched(mixed: Any, name: str) -> None:
    assert mixed.host(name)["changed"] == []


def test_a_host_whose_links_fail_midway_shows_what_had_changed_before(mixed: Any) -> None:
    assert mixed.host("no-restart")["changed"]


def test_a_verified_host_has_its_release_figures_plan_and_groups(mixed: Any) -> None:
    found = mixed.host("pi5-01")
    assert len(found["release"]) == 16
    assert found["ttft_ms"]["median"] == 112.4
    assert found["plan"]["cpus"] == "1-3"
    assert "arm64" in found["groups"]
    assert found["reason"] is None


def test_hosts_with_the_same_release_content_have_the_same_release(mixed: Any) -> None:
    assert mixed.host("pi5-01")["release"] == mixed.host("new-model")["release"]
    assert mixed.host("pi5-01")["release"] != mixed.host("i5-01")["release"]


def test_a_slow_host_has_its_figures_in_the_report(mixed: Any) -> None:
    assert mixed.host("slow")["ttft_ms"]["median"] == 8000


def test_the_table_ends_the_output_with_every_host_and_the_reports_path(mixed: Any) -> None:
    assert "18 hosts: 3 ok, 15 failed" in mixed.output
    table = mixed.output.partition("18 hosts:")[2]
    assert all(f"@fake/{name}" in table for name in mixed.statuses)
    assert "fleet.json" in table


def test_a_run_of_healthy_hosts_exits_0(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01")
    fleet.add("i5-01", "x86_64")
    ended = fleet.run("qwen")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"pi5-01": "ok", "i5-01": "ok"}


def test_a_host_that_forwards_is_sent_no_model(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    # Its own model file is not even looked at
    missing = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}
    fleet.add("pi5-01", data={**missing, "model_source": "file:/nowhere.gguf"})
    fleet.add("i5-01", "x86_64")
    ended = fleet.run("qwen")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"pi5-01": "ok", "i5-01": "ok"}
    assert ended.host("pi5-01")["plan"]["memory_needed_bytes"] < 200_000_000
    assert ended.report["model"]["name"] == "tiny"


def test_a_fleet_of_bad_hosts_only_is_reported_and_does_not_exit_0(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("bad-settings", data={"thread": 4})
    fleet.add("bad-probe", responses={"section format": "Segmentation fault"})
    ended = fleet.run("qwen")
    assert ended.returncode != 0
    assert ended.statuses == {"bad-settings": "failed", "bad-probe": "failed"}
    assert "thread" in ended.host("bad-settings")["reason"]
    assert "Traceback" not in ended.output


def test_a_dry_run_reports_nothing_and_exits_0(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01")
    ended = fleet.run("qwen", "--dry")
    assert ended.returncode == 0, ended.output
    assert not ended.reports.exists()


def test_a_later_wave_is_not_touched_where_an_earlier_one_is_unhealthy(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add(
        "canary",
        data={"wave": 0},
        responses={"edgellm_server/probe.py": slow(8000)},
    )
    fleet.add("pi5-01", data={"wave": 1})
    fleet.add("pi5-02", data={"wave": 2})
    ended = fleet.run("qwen")
    assert ended.returncode == 1
    assert ended.statuses == {"canary": "failed", "pi5-01": "pending", "pi5-02": "pending"}
    for name in ("pi5-01", "pi5-02"):
        assert ended.host(name)["changed"] == []
        assert "not touched" in ended.host(name)["reason"]


def test_a_later_wave_follows_a_healthy_one(new_fleet: Callable[[], Any]) -> None:
    fleet = new_fleet()
    fleet.add("canary", data={"wave": 0})
    fleet.add("pi5-01", data={"wave": 1})
    ended = fleet.run("qwen")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"canary": "ok", "pi5-01": "ok"}


# Hosts that were rolled out to before


def entrypoint_edited(host: RolledOut) -> RolledOut:
    return host.lying(f"{host.desired.release_directory}/entrypoint.sh", sha256="0" * 64)


def threads_moved(host: RolledOut) -> RolledOut:
    return host.threaded(1, cpus=CpuSet.parse("0-3")).served(previous_release="old")


@pytest.fixture(scope="module")
def again(new_fleet: Callable[[], Any]) -> Any:
    """A roll-out that every host had already."""
    fleet = new_fleet()
    fleet.add("in-order", since=lambda host: host)
    fleet.add("edited", since=entrypoint_edited)
    fleet.add("moved", since=threads_moved)
    fleet.add("stubborn", since=threads_moved, stays=True)
    fleet.add("reverted", since=lambda host: host.in_force(swappiness=60), stays=True)
    return fleet.run("qwen")


def test_a_host_that_is_in_order_is_verified_again_and_nothing_is_changed(again: Any) -> None:
    found = again.host("in-order")
    assert found["status"] == "ok", again.output
    assert found["changed"] == []
    assert found["repaired"] == []
    assert {knob["verdict"] for knob in found["knobs"]} == {"in order", "left alone"}


def test_the_report_says_which_drift_a_roll_out_has_repaired(again: Any) -> None:
    assert again.host("edited")["status"] == "ok", again.output
    (repaired,) = again.host("edited")["repaired"]
    assert repaired.endswith("/entrypoint.sh")
    assert again.host("moved")["repaired"] == ["cpus"]
    assert "repaired: entrypoint.sh" in again.output


def test_a_server_that_answers_on_the_wrong_cpus_is_rolled_back(again: Any) -> None:
    found = again.host("stubborn")
    assert found["status"] == "failed"
    assert "may run on 0-3, not 1-3" in found["reason"]
    assert found["changed"][-1] == "Verify | Previous release back"
    assert found["release"] == "old"


def test_a_host_of_which_a_knob_is_still_off_fails_and_keeps_the_release(again: Any) -> None:
    found = again.host("reverted")
    assert found["status"] == "failed"
    assert "have swappiness: 60 now" in found["reason"]
    assert "Verify | Previous release back" not in found["changed"]
    assert found["ttft_ms"]["median"] == 112.4


# The way back


INSTALLED = [
    "ActiveState=active",
    "UnitFileState=enabled",
    "NeedDaemonReload=no",
    "Release=new",
    "Current=/opt/edgellm/releases/new",
    "Previous=/opt/edgellm/releases/old",
]


def test_a_roll_back_fails_only_the_host_that_has_nothing_to_go_back_to(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", responses={"SliceReload": INSTALLED})
    fleet.add("fresh")
    ended = fleet.run("rollback")
    assert ended.returncode == 1
    assert ended.statuses == {"pi5-01": "ok", "fresh": "failed"}
    assert ended.host("pi5-01")["release"] == "old"
    assert "previous release" in ended.host("fresh")["reason"]


def test_an_uninstallation_that_went_well_is_reported_so_and_exits_0(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", responses={"SliceReload": INSTALLED})
    fleet.add("fresh")
    ended = fleet.run("uninstall")
    assert ended.returncode == 0, ended.output
    assert ended.statuses == {"pi5-01": "ok", "fresh": "ok"}
    assert ended.host("fresh")["changed"] == []
    assert ended.host("pi5-01")["changed"]


# The exit code, and a run that is cut


def test_a_run_that_only_bad_settings_keep_from_being_whole_exits_4(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01")
    fleet.add("bad-settings", data={"thread": 4})
    ended = fleet.run("qwen")
    assert ended.returncode == 4, ended.output
    assert ended.host("bad-settings")["fault"] == "input"
    assert ended.report["exit_code"] == 4


def test_a_key_in_place_of_its_variables_name_is_in_no_file_and_not_on_the_terminal(
    new_fleet: Callable[[], Any],
) -> None:
    fleet = new_fleet()
    fleet.add("pi5-01", data={"ssh_password": "hunter2"})
    ended = fleet.run("qwen", "--data", "api_key_env=sk-live-0123456789")
    assert ended.statuses == {"pi5-01": "failed"}
    texts = [ended.output, *(p.read_text() for p in ended.reports.glob("latest/*"))]
    assert len(texts) > 5
    assert not [text for text in texts if "sk-live" in text or "hunter2" in text]


@pytest.mark.parametrize(
    "text",
    [
        "Connecting to hosts",
        "Preparing operation",
        "Beginning operation run",
        "Service runs the release",
        "Results:",
    ],
)
def test_a_run_that_is_interrupted_leaves_a_whole_report(
    new_fleet: Callable[[], Any], text: str
) -> None:
    fleet = new_fleet()
    for number in range(6):
        fleet.add(f"pi5-{number:02}")
    ended = fleet.run("qwen", interrupt_at=text)
    assert text in ended.output
    assert ended.returncode == 130, ended.output
    assert ended.report["interrupted_by"] == "SIGINT"
    assert len(ended.statuses) == 6
    assert set(ended.statuses.values()) <= {"pending", "ok"}
    expected = {"fleet.json", "fleet.html", "fleet.prom", "junit.xml"}
    assert expected <= {path.name for path in ended.reports.glob("latest/*")}
    assert "Traceback" not in ended.output
