"""All that a roll-out wants of one host, as values."""

from __future__ import annotations

import hashlib
import posixpath
from pathlib import PurePosixPath

import pytest

from edgellm import layout, render
from edgellm.desired import (
    RESERVE_DROP_INS,
    ZRAM_FILES,
    HostDirectory,
    HostFile,
    PathGroup,
    desired_state,
    kernel_paths,
    key_paths,
    release_paths,
    reserve_paths,
    zram_paths,
)
from edgellm.observed import PathState
from edgellm.release import Release, ReleaseFile
from edgellm.tuning import TuningPlan
from tests.rolled_out import BOARDS, MODEL_SHA256, RUNTIME_ID, Case, rolled_out

GENERATOR = Case(
    board="raspberry-pi-4", profile={"zram_devices": ()}, tools={"zram_generator": True}
)


def plan_of(case: Case) -> TuningPlan:
    return rolled_out(case).plan


def places(group: PathGroup) -> set[str]:
    return {file.path for file in group.files}


def test_a_file_states_what_is_found_where_it_is_as_it_should_be() -> None:
    file = HostFile(path="/etc/x", content="ü\n", mode="0640", group="edgellm")
    assert file.state == PathState(
        kind="file",
        mode="0640",
        owner="root",
        group="edgellm",
        sha256=hashlib.sha256("ü\n".encode()).hexdigest(),
    )
    assert HostDirectory(path="/etc/y").state == PathState(
        kind="directory", mode="0755", owner="root", group="root"
    )


@pytest.mark.parametrize("name", BOARDS)
def test_every_path_belongs_to_one_group_and_to_the_layout(name: str) -> None:
    desired = rolled_out(Case(board=name, api_keys=True)).desired
    paths = [path for group in desired.groups for path in group.paths]
    assert len(paths) == len(set(paths))
    assert desired.paths == tuple(sorted(paths))
    for path in paths:
        assert path.startswith(tuple(layout.EVERYTHING)), path


@pytest.mark.parametrize(
    ("case", "sysctl"),
    [
        (Case(), layout.SYSCTL_CONF),
        (
            Case(profile={"swappiness_files": ("/etc/sysctl.d/99-local.conf",)}),
            layout.SYSCTL_CONF_LAST,
        ),
        (Case(board="podman-container"), None),
    ],
)
def test_one_sysctl_file_at_most_and_the_other_name_is_absent(
    case: Case, sysctl: str | None
) -> None:
    group = kernel_paths(plan_of(case), render.text)
    names = {layout.SYSCTL_CONF, layout.SYSCTL_CONF_LAST}
    assert places(group) & names == ({sysctl} if sysctl else set())
    assert set(group.absent) & names == names - {sysctl}
    assert layout.LIMITS_CONF in places(group)


def test_the_governors_file_is_there_only_where_one_is_asked_for() -> None:
    asked = kernel_paths(plan_of(Case(settings={"cpu_governor": "performance"})), render.text)
    assert layout.GOVERNOR_CONF in places(asked)
    assert layout.GOVERNOR_CONF in kernel_paths(plan_of(Case()), render.text).absent


@pytest.mark.parametrize(
    ("case", "path"),
    [
        (Case(board="raspberry-pi-4"), layout.ZRAM_UNIT),
        (GENERATOR, layout.ZRAM_GENERATOR_CONF),
        (Case(board="raspberry-pi-5-trixie"), None),
        (Case(board="kunpeng-920"), None),
    ],
)
def test_zram_has_one_manager_and_the_others_file_is_absent(case: Case, path: str | None) -> None:
    group = zram_paths(plan_of(case).zram, render.text)
    both = {place for place, _ in ZRAM_FILES.values()}
    assert places(group) == ({path} if path else set())
    assert set(group.absent) == both - {path}


def test_reserved_slices_have_a_drop_in_each_or_none() -> None:
    plan = plan_of(Case(settings={"reserve_cpus": True}))
    assert places(reserve_paths(plan, render.text)) == set(RESERVE_DROP_INS)
    assert reserve_paths(plan_of(Case()), render.text).absent == RESERVE_DROP_INS


def test_keys_are_readable_for_the_service_and_the_probes_key_for_root_alone() -> None:
    group = key_paths("hash\n", "probe", "upstream")
    assert {(f.path, f.mode, f.owner, f.group) for f in group.files} == {
        (layout.API_KEYS, "0640", "root", "edgellm"),
        (layout.PROBE_KEY, "0600", "root", "root"),
        (layout.UPSTREAM_KEY, "0640", "root", "edgellm"),
    }
    assert [item.path for item in group.directories] == [layout.CONFIG_DIR]


@pytest.mark.parametrize(
    ("keys", "files"),
    [
        ((None, None, None), set()),
        (("hash\n", None, None), set()),
        (("hash\n", "probe", None), {layout.API_KEYS, layout.PROBE_KEY}),
        ((None, None, "upstream"), {layout.UPSTREAM_KEY}),
    ],
)
def test_keys_of_before_stay_for_the_way_back(
    keys: tuple[str | None, str | None, str | None], files: set[str]
) -> None:
    group = key_paths(*keys)
    assert places(group) == files
    assert group.absent == ()
    assert bool(group.directories) is bool(files)


def test_a_release_makes_each_directory_before_what_lies_in_it() -> None:
    files = [
        ReleaseFile(name=name, content="x", mode=0o644) for name in ("app/a/b.py", "server.env")
    ]
    release = Release.of(model_sha256=MODEL_SHA256, runtime_id=RUNTIME_ID, files=files)
    group = release_paths(release)
    root = layout.release_directory(release.id)
    made = [item.path for item in group.directories]
    assert made[-3:] == [root, f"{root}/app", f"{root}/app/a"]
    for path in made[1:]:
        assert str(PurePosixPath(path).parent) in made, path
    for file in group.files:
        assert posixpath.dirname(file.path) in made


def test_links_of_a_release_lead_to_its_model_and_its_runtime() -> None:
    desired = rolled_out(Case()).desired
    root = desired.release_directory
    ends = {
        path: posixpath.normpath(posixpath.join(root, to)) for path, to in desired.release.links
    }
    assert ends == {
        f"{root}/model.gguf": desired.model_path,
        f"{root}/runtime": desired.runtime_directory,
    }


def test_without_a_model_of_ours_there_is_no_link_to_one() -> None:
    settings = {"engine": "forward", "upstream_url": "http://127.0.0.1:8080/v1"}
    desired = rolled_out(Case(settings=settings)).desired
    assert (desired.model_path, desired.model_sha256) == (None, None)
    assert [path.rpartition("/")[2] for path, _ in desired.release.links] == ["runtime"]


def test_units_are_those_of_the_release_word_for_word() -> None:
    desired = rolled_out(Case()).desired
    root = desired.release_directory
    in_release = {file.path: file.content for file in desired.release.files}
    assert {file.path.rpartition("/")[2] for file in desired.units.files} == set(layout.UNITS)
    for unit in desired.units.files:
        assert unit.content == in_release[f"{root}/{unit.path.rpartition('/')[2]}"]


def test_the_entrypoint_alone_may_be_executed() -> None:
    desired = rolled_out(Case(api_keys=True)).desired
    files = [file for group in desired.groups for file in group.files]
    executable = {file.path.rpartition("/")[2] for file in files if int(file.mode, 8) & 0o111}
    assert executable == {"entrypoint.sh"}
    assert not [file.path for file in files if int(file.mode, 8) & 0o022]


def test_the_upstreams_drop_in_is_wanted_of_its_own_unit() -> None:
    case = Case(
        settings={
            "engine": "forward",
            "upstream_url": "http://127.0.0.1:8080/v1",
            "upstream_unit": "ollama.service",
        }
    )
    desired = rolled_out(case).desired
    assert desired.upstream_unit == "ollama.service"
    assert desired.upstream_drop_in == render.upstream_drop_in(desired.plan)


def test_the_text_of_files_comes_from_who_asks() -> None:
    host = rolled_out(Case(board="raspberry-pi-4"))
    asked: list[str] = []

    def text(template: str, **values: object) -> str:
        asked.append(template)
        return "x"

    desired_state(
        settings=host.desired.settings,
        plan=host.plan,
        release=Release.of(model_sha256=None, runtime_id=RUNTIME_ID, files=()),
        text=text,
    )
    assert sorted(asked) == [
        "90-edgellm.limits.conf.j2",
        "90-edgellm.sysctl.conf.j2",
        "edgellm-zram.service.j2",
    ]
