"""The live table's rows: readable for three hosts and for five hundred."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgellm.progress import HostProgress, Mark, group_of, headline, rows, stages_of

STAGES = ("Packages", "Model", "Verify")


def host(name: str, stage: int | None = None, **more: Any) -> HostProgress:
    return HostProgress(name=name, group=more.pop("group", "site_a"), stage=stage, **more)


def fleet(size: int) -> list[HostProgress]:
    """Halls of fifty, all in the second stage."""
    return [host(f"edge-{n:03d}", 1, group=f"site_hall_{n // 50}") for n in range(size)]


@pytest.mark.parametrize(
    ("given", "marks"),
    [
        (host("a"), (Mark.WAITING, Mark.WAITING, Mark.WAITING)),
        (host("a", 1), (Mark.DONE, Mark.NOW, Mark.WAITING)),
        (host("a", 1, failed="failed"), (Mark.DONE, Mark.FAILED, Mark.WAITING)),
        (host("a", failed="unreachable"), (Mark.FAILED, Mark.WAITING, Mark.WAITING)),
        (host("a", 1, is_held_back=True), (Mark.DONE, Mark.WAITING, Mark.WAITING)),
        (host("a", 2, is_done=True), (Mark.DONE, Mark.DONE, Mark.DONE)),
    ],
)
def test_each_stage_has_its_mark(given: HostProgress, marks: tuple[Mark, ...]) -> None:
    (row,) = rows([given], STAGES, most_rows=10)
    assert row.cells == marks


def test_failures_come_first_then_who_is_at_work_then_who_is_done() -> None:
    hosts = [
        host("a", 2, is_done=True),
        host("c", 1, transfer="model m: 120 of 429 MB"),
        host("b", 1, failed="failed"),
    ]
    found = rows(hosts, STAGES, most_rows=10)
    assert [(row.name, row.note) for row in found] == [
        ("b", "failed"),
        ("c", "model m: 120 of 429 MB"),
        ("a", "done"),
    ]


def test_a_host_that_an_earlier_wave_holds_back_has_not_failed() -> None:
    hosts = [
        host("a", 2, is_done=True),
        host("b", 0, is_held_back=True),
        host("c", 1, failed="failed"),
        host("d", 1),
        host("e"),
    ]
    found = rows(hosts, STAGES, most_rows=10)
    assert [(row.name, row.note) for row in found] == [
        *(("c", "failed"), ("d", ""), ("e", ""), ("b", "held back"), ("a", "done")),
    ]
    assert [row.name for row in found if row.failed] == ["c"]
    assert headline(hosts) == "5 hosts: 1 failed, 1 at work, 1 done, 1 held back, 1 waiting"


def test_many_hosts_are_one_line_a_group_with_their_counts() -> None:
    hosts = fleet(500)
    hosts[3] = replace(hosts[3], is_done=True)
    found = rows(hosts, STAGES, most_rows=24)
    assert [row.name for row in found] == [f"site_hall_{n} (50)" for n in range(10)]
    assert found[0].cells == ("50", "1", "1")
    assert found[0].note == "49 at work, 1 done"


def test_hosts_that_failed_keep_their_own_lines_and_their_groups_come_first() -> None:
    hosts = fleet(500)
    for number in (77, 401):
        hosts[number] = replace(hosts[number], failed="failed")
    found = rows(hosts, STAGES, most_rows=24)
    assert [row.name for row in found[:5]] == [
        *("edge-077", "edge-401", "site_hall_1 (50)", "site_hall_8 (50)", "site_hall_0 (50)"),
    ]
    assert [row.failed for row in found[:5]] == [True, True, True, True, False]


@pytest.mark.parametrize("size", [3, 30, 500])
@pytest.mark.parametrize("failed", [0, 1, 200])
@pytest.mark.parametrize("most_rows", [3, 10, 40])
def test_there_are_never_more_lines_than_the_terminal_has_room_for(
    size: int, failed: int, most_rows: int
) -> None:
    hosts = fleet(size)
    hosts = [replace(h, failed="failed") if n < failed else h for n, h in enumerate(hosts)]
    found = rows(hosts, STAGES, most_rows=most_rows)
    assert 1 <= len(found) <= most_rows
    assert all(len(row.cells) == len(STAGES) for row in found)


def test_failures_that_have_no_line_are_counted() -> None:
    hosts = [replace(h, failed="failed") for h in fleet(100)]
    found = rows(hosts, STAGES, most_rows=20)
    assert "and 92 more" in [row.name for row in found]


def test_the_headline_counts_every_host_once() -> None:
    hosts = [
        host("a", 2, is_done=True),
        host("b", 1),
        host("c", 1, failed="failed"),
        host("d"),
        host("e", 2, is_done=True, failed="failed"),
    ]
    assert headline(hosts) == "5 hosts: 2 failed, 1 at work, 1 done, 1 waiting"


def test_stages_are_what_stands_before_the_bar_in_their_order() -> None:
    names = ("Wave 1 may begin", "Model | Model present", "Verify | x", "Model | y")
    assert stages_of(names) == ("Model", "Verify")


def test_a_host_belongs_to_its_site_before_its_architecture() -> None:
    assert group_of(["arm64", "site_hall_a", "canary"]) == "site_hall_a"
    assert group_of(["arm64"]) == "arm64"
    assert group_of([]) == "all"
