"""What the bench reads: /proc, the server's log lines and metrics, raw answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.clients import BrokenAnswerError, Counts, checked, faults, parse_status
from bench.process_tree import parse_rollup, parse_stat_ticks, tree
from bench.soak import last_quarter, parse_slots_busy, where_they_left


def test_a_rollup_gives_its_kilobytes() -> None:
    text = "55d3-7ffd ---p 00000000 00:00 0    [rollup]\nRss:    914 kB\nPss:    895 kB\n"
    assert parse_rollup(text) == {"Rss": 914, "Pss": 895}


def test_cpu_ticks_are_found_behind_a_name_with_spaces_and_parentheses() -> None:
    stat = "12 (a) b (c) S 1 12 12 0 -1 4194560 9 0 0 0 100 20 3 4 20 0 1 0 777"
    assert parse_stat_ticks(stat) == 127


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for pid, children in (("10", "11 12"), ("11", "13"), ("12", ""), ("13", "")):
        task = tmp_path / pid / "task" / pid
        task.mkdir(parents=True)
        (task / "children").write_text(children + "\n")
    return tmp_path


def test_a_tree_has_grandchildren_too(proc: Path) -> None:
    assert sorted(tree(10, proc)) == [10, 11, 12, 13]


def test_busy_slots_are_summed_over_workers() -> None:
    text = (
        "# TYPE edgellm_slots_busy gauge\n"
        'edgellm_slots_busy{worker="0"} 1.0\nedgellm_slots_busy{worker="1"} 2.0\n'
        'edgellm_slots{worker="0"} 4.0\n'
    )
    assert parse_slots_busy(text) == 3


def test_metrics_without_the_gauge_are_refused_not_read_as_free() -> None:
    with pytest.raises(ValueError, match="edgellm_slots_busy"):
        parse_slots_busy("up 1\n")


def test_the_log_tells_where_clients_left() -> None:
    def line(status: int, queue_ms: float | None, ttft_ms: float | None) -> dict[str, object]:
        return {"status": status, "queue_ms": queue_ms, "ttft_ms": ttft_ms, "finish_reason": None}

    lines = {
        "a": line(499, None, None),
        "b": line(499, 1.0, None),
        "c": line(200, 1.0, 50.0),
        "d": line(200, 1.0, 50.0) | {"finish_reason": "stop"},
        "e": line(503, None, None),
    }
    assert where_they_left(lines) == {"queue": 1, "prefill": 1, "decode": 1}


def test_a_stream_that_does_not_end_with_done_is_broken() -> None:
    assert checked(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\ndata: [DONE]\n\n", stream=True) == "200"
    with pytest.raises(BrokenAnswerError, match="DONE"):
        checked(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n", stream=True)


def test_an_error_inside_a_stream_is_no_answer() -> None:
    with pytest.raises(BrokenAnswerError, match="error"):
        checked(b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {}}\n\ndata: [DONE]\n\n', stream=True)


def test_no_status_line_is_broken() -> None:
    assert parse_status(b"HTTP/1.1 503 Service Unavailable\r\n") == "503"
    with pytest.raises(BrokenAnswerError):
        parse_status(b"")


def test_of_5xx_only_503_is_no_fault() -> None:
    counts = Counts()
    for status in ("200", "503", "500", "500", "499"):
        counts.add("stream", status)
    assert list(faults(counts)) == ["status 500: 2 times"]


def test_memory_that_filled_up_early_does_not_grow_in_the_last_quarter() -> None:
    filled = [{"pss_mb": mb} for mb in (100, 150, 190, 200, 200, 200, 200, 200)]
    leaking = [{"pss_mb": mb} for mb in (100, 110, 120, 130, 140, 150, 160, 170)]
    assert last_quarter(filled) == 0
    assert last_quarter(leaking) > 10
