"""What may be pruned under /opt/edgellm: never what a kept release needs."""

from __future__ import annotations

import pytest

from edgellm.facts.installed import InstallDir, InstalledRelease

RELEASES = "/opt/edgellm/releases"
MODELS = "/opt/edgellm/models"
RUNTIMES = "/opt/edgellm/runtimes"


def release(name: str, mtime_ns: int, *links: str) -> InstalledRelease:
    return InstalledRelease(id=name, mtime_ns=mtime_ns, links=links)


def installed(
    *releases: InstalledRelease,
    models: tuple[str, ...] = (),
    runtimes: tuple[str, ...] = (),
    current: str | None = None,
    previous: str | None = None,
) -> InstallDir:
    return InstallDir(
        releases=releases, models=models, runtimes=runtimes, current=current, previous=previous
    )


def test_a_fresh_host_has_nothing_to_prune() -> None:
    assert installed().prunable(keep=2) == ()


def test_as_many_releases_as_are_kept_stay() -> None:
    found = installed(release("old", 1), release("new", 2), current="new", previous="old")
    assert found.prunable(keep=2) == ()


def test_the_oldest_release_goes_first() -> None:
    found = installed(release("a", 1), release("b", 3), release("c", 2), current="b", previous="c")
    assert found.prunable(keep=2) == (f"{RELEASES}/a",)


def test_current_and_previous_stay_although_they_are_the_oldest() -> None:
    found = installed(
        release("current", 1),
        release("previous", 2),
        release("tried-and-failed", 9),
        current="current",
        previous="previous",
    )
    assert found.prunable(keep=2) == (f"{RELEASES}/tried-and-failed",)


def test_beyond_current_and_previous_the_newest_stay() -> None:
    found = installed(
        release("current", 1),
        release("previous", 2),
        release("x", 3),
        release("y", 4),
        current="current",
        previous="previous",
    )
    assert found.prunable(keep=3) == (f"{RELEASES}/x",)


def test_a_first_release_without_a_previous_one_stays() -> None:
    assert installed(release("only", 1), current="only").prunable(keep=2) == ()


def test_model_and_runtime_of_a_pruned_release_go_with_it() -> None:
    found = installed(
        release("old", 1, "old.gguf", "rt-old"),
        release("mid", 2, "new.gguf", "rt-new"),
        release("new", 3, "new.gguf", "rt-new"),
        models=("new.gguf", "new.gguf.manifest.json", "old.gguf", "old.gguf.manifest.json"),
        runtimes=("rt-new", "rt-old"),
        current="new",
        previous="mid",
    )
    assert found.prunable(keep=2) == (
        f"{RELEASES}/old",
        f"{MODELS}/old.gguf",
        f"{MODELS}/old.gguf.manifest.json",
        f"{RUNTIMES}/rt-old",
    )


def test_a_model_that_a_kept_release_shares_with_a_pruned_one_stays_with_its_manifest() -> None:
    found = installed(
        release("old", 1, "m.gguf", "rt"),
        release("mid", 2, "m.gguf", "rt"),
        release("new", 3, "m.gguf", "rt"),
        models=("m.gguf", "m.gguf.manifest.json"),
        runtimes=("rt",),
        current="new",
        previous="mid",
    )
    assert found.prunable(keep=2) == (f"{RELEASES}/old",)


def test_archives_that_an_unpacking_left_behind_go() -> None:
    found = installed(
        release("new", 1, "rt"),
        runtimes=("rt", "rt-bad.tar.gz", "rt-bad.tar.gz.manifest.json"),
        current="new",
    )
    assert found.prunable(keep=2) == (
        f"{RUNTIMES}/rt-bad.tar.gz",
        f"{RUNTIMES}/rt-bad.tar.gz.manifest.json",
    )


@pytest.mark.parametrize("keep", range(2, 6))
def test_never_more_than_keep_releases_stay(keep: int) -> None:
    releases = [release(f"r{n}", n) for n in range(10)]
    found = installed(*releases, current="r4", previous="r0")
    gone = found.prunable(keep)
    assert len(releases) - len(gone) == keep
    assert not {f"{RELEASES}/r4", f"{RELEASES}/r0"} & set(gone)


def test_releases_of_the_same_time_are_ordered_by_name_so_that_two_runs_agree() -> None:
    one = installed(release("a", 1), release("b", 1), release("c", 1), current="c")
    two = installed(release("c", 1), release("b", 1), release("a", 1), current="c")
    assert one.prunable(keep=2) == two.prunable(keep=2) == (f"{RELEASES}/a",)


def test_what_cut_transfers_left_goes_although_nothing_else_does() -> None:
    part = "/opt/edgellm/models/.abc.gguf.part"
    found = InstallDir(
        releases=(), models=(), runtimes=(), current=None, previous=None, leftovers=(part,)
    )
    assert found.prunable(keep=2) == (part,)
