"""Both servers do the same, and neither always goes first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import rounds
from bench.rounds import QUICK, Bench, take_turns
from bench.servers import Server


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.setattr(rounds, "SETTLE_S", 0)

    def server(name: str) -> Server:
        process = subprocess.Popen(["true"])
        process.wait()
        return Server(name=name, model="m", port=1, process=process, log_path=tmp_path / name)

    return Bench(
        ours=server("ours"), common_way=server("common"), sizes=QUICK, say=lambda line: None
    )


def test_who_begins_changes_with_each_round(bench: Bench) -> None:
    order: list[str] = []
    take_turns(bench, "", 3, lambda server, number: order.append(f"{server.name} {number}"))
    assert order == ["ours 0", "common 0", "common 1", "ours 1", "ours 2", "common 2"]


def test_each_sides_figures_are_in_the_order_of_rounds(bench: Bench) -> None:
    ours, common_way = take_turns(bench, "", 3, lambda server, n: (server.name, n))
    assert ours == [("ours", 0), ("ours", 1), ("ours", 2)]
    assert common_way == [("common", 0), ("common", 1), ("common", 2)]
