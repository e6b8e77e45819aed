"""What is refused before any host is changed, and what is rolled back where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    FAST,
    MODEL_SHA256,
    PRUNED,
    REPO,
    ROLLED_BACK,
    SERVICE,
    SOME_CHANGE,
    THREE,
    CommandLine,
    Ssh,
    differences,
    get,
    snapshot,
)


def test_unknown_setting_is_refused_with_the_nearest_known_one(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    before = snapshot(ssh, "edge-1")
    run = roll_out("--data", "model_nam=x")
    for name in THREE:
        run.assert_bad(name, "failed", "model_nam is not a setting", "did you mean model_name?")
    assert differences(before, snapshot(ssh, "edge-1")) == []


def test_wrong_model_digest_is_refused_before_any_host_is_touched(
    served: None, fleet: Fleet, roll_out: CommandLine, ssh: Ssh, tmp_path: Path
) -> None:
    wrong_sha256 = "ab" * 32
    model = REPO / ".cache" / "models" / f"{MODEL_SHA256}.gguf"
    before = {name: snapshot(ssh, name) for name in THREE}
    run = roll_out(
        *("--data", f"model_sha256={wrong_sha256}", "--data", f"model_source=file:{model}"),
        env={"EDGELLM_CACHE_DIR": str(tmp_path)},
    )
    for name in THREE:
        run.assert_bad(name, "failed", wrong_sha256, MODEL_SHA256)
        assert run.host(name)["changed"] == []
        assert differences(before[name], snapshot(ssh, name)) == []
        answer = get(fleet, name, "/health")
        assert answer is not None
        assert answer.status_code == 200
    # neither the model nor a part of it counts as fetched
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size] == []


@pytest.mark.parametrize("host", ["edge-1", "edge-3"])
def test_release_that_is_too_slow_is_rolled_back_and_the_host_failed(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh, host: str
) -> None:
    units = "cat /etc/systemd/system/edgellm.*"
    before = ssh(host, units)
    run = roll_out("--limit", host, "--data", "ttft_budget_ms=1", *SOME_CHANGE)
    run.assert_bad(host, "failed", "slow: median TTFT", "over the budget of 1 ms", "ttft_budget_ms")
    record = run.host(host)
    assert [name for name in run.changed()[host] if name in (SERVICE, ROLLED_BACK)] == [
        *(SERVICE, ROLLED_BACK)
    ]
    assert record["ttft_ms"]["median"] > 1
    assert record["release"] == first.release(host)  # the one that runs now
    assert ssh.current_release(host) == first.release(host)
    assert ssh.running_release(host) == first.release(host)
    assert ssh(host, units) == before
    assert ssh(host, "systemctl is-active edgellm").strip() == "active"
    again = roll_out("--limit", host, *FAST).assert_ok(host)
    assert set(again.changed()[host]) <= {PRUNED}  # the failed release made one too many
