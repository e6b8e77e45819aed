"""The script's output -> the files of a bundle; and the script itself, where nothing is there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from edgellm.diagnosis import bundle, collected, holds_texts, threads_table
from edgellm.operations.diagnose import SCRIPT, command, write

MARK = "0123456789abcdef"
STAT = (
    "stat 812 815 (engine 1) S 1 812 812 0 -1 4194368 90 0 0 0 41 3 0 0 20 -5 4 0 100 200 300 "
    "18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 -1 2 7 3 0 0 0 0 0 0 0 0 0 0 0"
)


def printed(*lines: str) -> list[str]:
    return ["a banner of the login shell", *lines, "", f"{MARK} end"]


def test_sections_are_told_apart_and_what_could_not_be_read_is_told() -> None:
    found = collected(
        printed(f"{MARK} units", "[Unit]", "", f"{MARK} journal", f"{MARK}? no journalctl"), MARK
    )
    assert found.sections == {"units": ("[Unit]",), "journal": ()}
    assert found.missing == ("journal: no journalctl",)
    assert found.complete


def test_a_log_line_that_looks_like_a_section_is_none() -> None:
    found = collected(printed(f"{MARK} journal", "ffff units", "@@ end"), MARK)
    assert list(found.sections) == ["journal"]


def test_an_answer_that_was_cut_is_told() -> None:
    found = collected([f"{MARK} units", "[Un"], MARK)
    files = bundle("edge-1", found, about={}, documents={}, absent={})
    assert "ended before its end" in files["README.txt"]


def test_a_thread_is_one_line_with_its_policy_priority_and_last_cpu() -> None:
    lines = [STAT, "cpus 815 Cpus_allowed_list:\t1-3", "schedstat 815 1500000000 250000000 7"]
    head, row = threads_table(lines).splitlines()
    assert dict(zip(head.split(), row.split(), strict=True)) == {
        **{"pid": "812", "tid": "815", "thread": "engine_1", "policy": "batch", "rtprio": "7"},
        **{"nice": "-5", "cpu": "2", "cpus": "1-3", "run_s": "1.50", "wait_s": "0.25"},
    }


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (("EDGELLM_LOG_PROMPTS=0",), False),
        (("EDGELLM_LOG_PROMPTS=1",), True),
        (("EDGELLM_LOG_PROMPTS=0", "EDGELLM_APP=main:app"), True),
        ((), True),
    ],
)
def test_a_journal_is_free_of_prompts_only_where_the_release_says_so(
    lines: tuple[str, ...], texts: bool
) -> None:
    assert holds_texts(lines) is texts


def test_no_file_of_a_bundle_holds_a_secret_whichever_it_came_by() -> None:
    secret = "spare-key-of-hall-b"
    names = ("units", "journal", "installed", "threads", "load")
    lines = [line for name in names for line in (f"{MARK} {name}", f"x {secret}")]
    files = bundle(
        "edge-1",
        collected(printed(*lines, f"{MARK}? {secret}"), MARK),
        about={"model": secret},
        documents={"plan": {"reasons": [{"text": f"x {secret}"}]}},
        absent={"knobs": secret},
        secrets=[secret],
    )
    assert {"plan.json", "README.txt", *(f"{name}.txt" for name in names)} == set(files)
    assert [name for name, text in files.items() if secret in text] == []


def test_the_readme_lists_the_holes_and_the_files() -> None:
    found = collected(printed(f"{MARK} units", "[Unit]"), MARK)
    files = bundle(
        "edge-1", found, about={"kernel": "6.6.31"}, documents={}, absent={"plan": "no python3"}
    )
    readme = files["README.txt"].splitlines()
    assert {"kernel: 6.6.31", "  plan: no python3", "  units.txt"} <= set(readme)


def run_script(*, path: str | None = None) -> list[str]:
    """The script as it is sent, on this machine."""
    _, _, script = shlex.split(command(MARK).get_raw_value())
    if path is not None:
        script = script.replace("PATH=", "IGNORED=", 1)
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env=os.environ if path is None else {"PATH": path},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return done.stdout.decode("ascii").splitlines()


def test_the_script_reads_this_machine_and_says_what_it_could_not() -> None:
    found = collected(run_script(), MARK)
    assert found.complete
    assert any(line.startswith("MemTotal:") for line in found.sections["memory"])
    assert any(line.startswith("pgfault ") for line in found.sections["vmstat"])
    assert any(line.startswith("cpu0 ") for line in found.sections["load"])
    assert found.sections["python"][0].startswith("Python 3.")


def test_a_host_with_hardly_any_tool_says_so_and_the_script_ends(tmp_path: Path) -> None:
    for tool in ("awk", "tr", "tail", "head", "cat", "grep", "sort", "uname", "ls"):
        source = shutil.which(tool)
        assert source is not None
        (tmp_path / tool).symlink_to(source)
    found = collected(run_script(path=str(tmp_path)), MARK)
    assert found.complete
    assert {"units: no systemctl", "journal: no journalctl", "python: no python3"} <= set(
        found.missing
    )
    assert any(line.startswith("MemTotal:") for line in found.sections["memory"])


def test_without_the_tool_that_takes_keys_out_nothing_leaves_the_host(tmp_path: Path) -> None:
    found = collected(run_script(path=str(tmp_path)), MARK)
    assert (found.sections, found.complete) == ({}, True)
    assert "awk" in found.missing[0]


def test_the_command_line_stays_far_below_the_kernels_limit() -> None:
    assert len(command(MARK).get_raw_value().encode()) < 32 * 1024
    assert SCRIPT.read_text().isascii()


def test_the_archive_is_its_owners_alone_and_stays_in_its_directory(tmp_path: Path) -> None:
    path = write("../@fake/edge-1", {"README.txt": "x\n"}, tmp_path / "diagnose")
    assert path.parent == tmp_path / "diagnose"
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        (member,) = archive.getmembers()
    assert ".." not in member.name.split("/")
    assert not member.name.startswith("/")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_documents_are_json() -> None:
    found = collected(printed(), MARK)
    files = bundle("e", found, about={}, documents={"plan": {"threads": 3}}, absent={})
    assert json.loads(files["plan.json"]) == {"threads": 3}
