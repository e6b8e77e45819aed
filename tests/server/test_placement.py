"""Workers take their places: real processes, real locks, real CPU masks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgellm_server.config import ConfigError, ServerConfig

REPO = Path(__file__).parents[2]
CPUS = sorted(os.sched_getaffinity(0))

WORKER = """
import json, os, sys, threading
from pathlib import Path
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as the engine's import does
from edgellm_server.placement import PlacementError, take_a_place
places = [tuple(cpus) for cpus in json.loads(sys.argv[1])]
try:
    place = take_a_place(places, Path(sys.argv[2]))
    index = place.index
    masks = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}
    print(json.dumps([index, *masks]), flush=True)
except PlacementError as error:
    print(json.dumps(str(error)), flush=True)
for line in sys.stdin:
    if line == "say ready\\n":
        place.say_ready()
    print(json.dumps(place.all_ready()), flush=True)
"""


@dataclass
class Told:
    """A worker process: what it said of its place, and what it says when asked."""

    process: subprocess.Popen[str]
    place: Any

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def started(places: list[list[int]], directory: Path) -> Iterator[Told]:
    """A worker; it holds its place until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(places), str(directory)],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Told(process, json.loads(process.stdout.readline()))
    finally:
        process.communicate(timeout=10)


@contextmanager
def worker(places: list[list[int]], directory: Path) -> Iterator[Any]:
    """What a worker says of its place; it holds the place until the block ends."""
    with started(places, directory) as told:
        yield told.place


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs to tell two places apart")
def test_each_worker_takes_a_place_of_its_own_and_runs_there(tmp_path: Path) -> None:
    places = [[CPUS[0]], [CPUS[1]]]
    with worker(places, tmp_path) as first, worker(places, tmp_path) as second:
        assert first == [0, [CPUS[0]]]
        assert second == [1, [CPUS[1]]]


def test_the_place_of_a_worker_that_died_is_free_for_the_next(tmp_path: Path) -> None:
    with worker([[CPUS[0]]], tmp_path) as first:
        assert first[0] == 0
    with worker([[CPUS[0]]], tmp_path) as next_one:
        assert next_one[0] == 0


def test_one_worker_too_many_is_told_so(tmp_path: Path) -> None:
    with worker([[CPUS[0]]], tmp_path), worker([[CPUS[0]]], tmp_path) as second:
        assert second == "want a free place among 1, have none: too many workers"


def test_a_place_on_a_cpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with worker([[4095]], tmp_path) as said:
        assert said == "worker 0: want CPUs [4095], have Invalid argument"


def test_workers_are_ready_together_and_a_new_one_is_waited_for(tmp_path: Path) -> None:
    places = [[CPUS[0]], [CPUS[0]]]
    with started(places, tmp_path) as first:
        with started(places, tmp_path) as second:
            assert first.ask("say ready") is False
            assert second.ask("say ready") is True
            assert first.ask("all ready?") is True
        with started(places, tmp_path) as third:  # in the place of the second, which has died
            assert first.ask("all ready?") is False
            assert third.ask("say ready") is True


ENVIRONMENT = {
    "EDGELLM_MODEL_PATH": "/m.gguf",
    "EDGELLM_MODEL_NAME": "m",
    "EDGELLM_N_THREADS": "1",
}


def test_worker_cpus_are_read_as_cpulists() -> None:
    config = ServerConfig.from_environ(ENVIRONMENT | {"EDGELLM_WORKER_CPUS": "0-2,4/5-7"})
    assert config.worker_cpus == ((0, 1, 2, 4), (5, 6, 7))


@pytest.mark.parametrize("raw", ["0-3/", "a", "0-3/4-", "0..3"])
def test_what_is_no_cpulist_is_a_fault(raw: str) -> None:
    with pytest.raises(ConfigError, match="EDGELLM_WORKER_CPUS: want cpulists"):
        ServerConfig.from_environ(ENVIRONMENT | {"EDGELLM_WORKER_CPUS": raw})
