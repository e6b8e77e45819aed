"""What bench.verification calls a report that is not true."""

from __future__ import annotations

from typing import Any

import pytest

from bench.verification import untrue
from edgellm.reports import schema

OUTPUT = """--> Starting operation: Release files present
    [edge-1] Success
    [edge-2] Success
--> Starting operation: Service runs the release
    [edge-1] Success
    [edge-2] No changes
"""
RELEASES = {"edge-1": "new", "edge-2": "old"}


def host(name: str, **changed: Any) -> dict[str, Any]:
    return {"name": name, "status": "pending", "release": "old", "changed": ["files"]} | changed


def found(*hosts: dict[str, Any], by: str | None = "SIGINT") -> schema.Fleet:
    return schema.load(
        {
            "schema_version": 2,
            "run_id": "x",
            "started_at": "2026-12-02T10:15:00+00:00",
            "ended_at": "2026-12-02T10:16:00+00:00",
            "deploy": "qwen",
            "interrupted_by": by,
            "hosts": hosts,
        }
    )


EDGE_1 = host("edge-1", status="ok", release="new", changed=["files", "service"])
EDGE_2 = host("edge-2")


def test_a_report_that_tells_what_was_printed_and_what_is_there_is_true() -> None:
    assert untrue(found(EDGE_1, EDGE_2), RELEASES, OUTPUT) == []


def test_an_operation_that_was_noted_when_the_signal_came_need_not_be_printed() -> None:
    noted = EDGE_2 | {"changed": ["files", "units"]}
    assert untrue(found(EDGE_1, noted), RELEASES, OUTPUT) == []


@pytest.mark.parametrize(
    ("hosts", "fault"),
    [
        ((EDGE_1,), "tells of edge-1 alone"),
        ((EDGE_1, EDGE_2 | {"changed": []}), "edge-2: 0 changes of 1"),
        ((EDGE_1, EDGE_2 | {"changed": ["a", "b", "c"]}), "edge-2: 3 changes of 1"),
        ((EDGE_1, EDGE_2 | {"status": "ok", "release": "new"}), "edge-2: ok with new, has old"),
        ((EDGE_1, EDGE_2 | {"status": "failed", "reason": "cut"}), "edge-2: failed, cut"),
    ],
)
def test_what_is_left_out_or_not_so_is_a_fault(hosts: tuple[Any, ...], fault: str) -> None:
    assert untrue(found(*hosts), RELEASES, OUTPUT) == [fault]


def test_a_report_that_does_not_say_that_it_was_interrupted_is_not_true() -> None:
    assert untrue(found(EDGE_1, EDGE_2, by=None), RELEASES, OUTPUT) == ["interrupted_by None"]
