"""All that a roll-out wants of one host, as values: the steps carry it out, audit compares with it.

The text of files comes from the one who asks (render.text), so that this room touches nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from edgellm import layout
from edgellm.observed import PathState
from edgellm.release import Release
from edgellm.settings import Settings
from edgellm.tuning import TuningPlan, ZramPlan

# ZramPlan.manager -> (where its file lies, the template it is rendered from)
ZRAM_FILES = {
    "own-unit": (layout.ZRAM_UNIT, "edgellm-zram.service.j2"),
    "zram-generator": (layout.ZRAM_GENERATOR_CONF, "zram-generator.conf.j2"),
}
RESERVE_DROP_INS = tuple(layout.drop_in_path(name) for name in layout.RESERVED_SLICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """One text file and whose it is."""

    path: str
    content: str
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"

    @property
    def state(self) -> PathState:
        """What PathStates says where the file is as it should be."""
        return PathState(
            kind="file",
            mode=self.mode,
            owner=self.owner,
            group=self.group,
            sha256=hashlib.sha256(self.content.encode()).hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDirectory:
    """One directory and whose it is."""

    path: str
    mode: str = "0755"
    owner: str = "root"
    group: str = "root"

    @property
    def state(self) -> PathState:
        return PathState(kind="directory", mode=self.mode, owner=self.owner, group=self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathGroup:
    """What one operation sees to: present in this order, and `absent` afterwards."""

    directories: tuple[HostDirectory, ...] = ()
    files: tuple[HostFile, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # (path, target)
    absent: tuple[str, ...] = ()  # ours, from another plan, and not wanted by this one

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that must be looked at, sorted."""
        return tuple(
            sorted(
                (
                    *(item.path for item in self.directories),
                    *(file.path for file in self.files),
                    *(path for path, _ in self.links),
                    *self.absent,
                )
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """One host as it is after a roll-out."""

    settings: Settings
    plan: TuningPlan
    release_id: str
    model_sha256: str | None  # None: another server on the host has the model
    runtime_id: str
    kernel: PathGroup  # sysctl.d, limits.d, the clock's governor
    zram: PathGroup
    keys: PathGroup
    release: PathGroup
    units: PathGroup
    reserve: PathGroup  # drop-ins that keep other slices off our cores
    upstream_unit: str | None  # the operator's own server, which has a drop-in of ours
    upstream_drop_in: str | None

    @property
    def groups(self) -> tuple[PathGroup, ...]:
        return (self.kernel, self.zram, self.keys, self.release, self.units, self.reserve)

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path of every group, sorted."""
        return tuple(sorted({path for group in self.groups for path in group.paths}))

    @property
    def model_path(self) -> str | None:
        return None if self.model_sha256 is None else layout.model_path(self.model_sha256)

    @property
    def runtime_directory(self) -> str:
        return layout.runtime_directory(self.runtime_id)

    @property
    def release_directory(self) -> str:
        return layout.release_directory(self.release_id)


def desired_state(
    *,
    settings: Settings,
    plan: TuningPlan,
    release: Release,
    text: Callable[..., str],
    api_keys_text: str | None = None,
    probe_key: str | None = None,
    upstream_key: str | None = None,
    upstream_drop_in: str | None = None,
) -> DesiredState:
    """`text`: render.text. `api_keys_text` and `probe_key`: both, or none where no key is asked."""
    return DesiredState(
        settings=settings,
        plan=plan,
        release_id=release.id,
        model_sha256=release.model_sha256,
        runtime_id=release.runtime_id,
        kernel=kernel_paths(plan, text),
        zram=zram_paths(plan.zram, text),
        keys=key_paths(api_keys_text, probe_key, upstream_key),
        release=release_paths(release),
        units=unit_paths(release),
        reserve=reserve_paths(plan, text),
        upstream_unit=settings.upstream_unit,
        upstream_drop_in=upstream_drop_in,
    )


def kernel_paths(plan: TuningPlan, text: Callable[..., str]) -> PathGroup:
    limits = text("90-edgellm.limits.conf.j2", plan=plan)
    files = [HostFile(path=layout.LIMITS_CONF, content=limits)]
    if plan.swappiness is not None:
        sysctl = text("90-edgellm.sysctl.conf.j2", plan=plan)
        files.append(HostFile(path=f"{layout.SYSCTL_DIR}/{plan.sysctl_name}", content=sysctl))
    if plan.cpu_governor is not None:
        governor = text("90-edgellm.governor.conf.j2", plan=plan)
        files.append(HostFile(path=layout.GOVERNOR_CONF, content=governor))
    ours = (layout.SYSCTL_CONF, layout.SYSCTL_CONF_LAST, layout.GOVERNOR_CONF)
    return _group(files, ours)


def zram_paths(plan: ZramPlan, text: Callable[..., str]) -> PathGroup:
    files = []
    if plan.manager in ZRAM_FILES:
        path, template = ZRAM_FILES[plan.manager]
        files.append(HostFile(path=path, content=text(template, plan=plan)))
    return _group(files, tuple(path for path, _ in ZRAM_FILES.values()))


def key_paths(
    api_keys_text: str | None, probe_key: str | None, upstream_key: str | None
) -> PathGroup:
    """Nothing of it is `absent`: the previous release may ask for keys when it comes back."""
    files = []
    if api_keys_text is not None and probe_key is not None:
        files.append(
            HostFile(path=layout.API_KEYS, content=api_keys_text, mode="0640", group=layout.USER)
        )
        files.append(HostFile(path=layout.PROBE_KEY, content=probe_key + "\n", mode="0600"))
    if upstream_key is not None:
        key = upstream_key + "\n"
        files.append(
            HostFile(path=layout.UPSTREAM_KEY, content=key, mode="0640", group=layout.USER)
        )
    directories = (HostDirectory(path=layout.CONFIG_DIR),) if files else ()
    return PathGroup(directories=directories, files=tuple(files))


def release_paths(release: Release) -> PathGroup:
    own = (layout.INSTALL_DIR, layout.MODELS, layout.RUNTIMES, layout.RELEASES)
    root = layout.release_directory(release.id)
    # Each before what lies in it: they are made in this order
    inner = {
        str(parent)
        for file in release.files
        for parent in PurePosixPath(file.name).parents
        if parent.name
    }
    directories = (*own, root, *(f"{root}/{name}" for name in sorted(inner)))
    links = [(f"{root}/runtime", f"../../runtimes/{release.runtime_id}")]
    if release.model_sha256 is not None:
        links.insert(0, (f"{root}/model.gguf", f"../../models/{release.model_sha256}.gguf"))
    return PathGroup(
        directories=tuple(HostDirectory(path=path) for path in directories),
        files=tuple(
            HostFile(path=f"{root}/{file.name}", content=file.content, mode=f"{file.mode:04o}")
            for file in release.files
        ),
        links=tuple(links),
    )


def unit_paths(release: Release) -> PathGroup:
    return PathGroup(
        files=tuple(
            HostFile(path=f"{layout.UNIT_DIR}/{file.name}", content=file.content)
            for file in release.files
            if file.name in layout.UNITS
        )
    )


def reserve_paths(plan: TuningPlan, text: Callable[..., str]) -> PathGroup:
    files = []
    if plan.reserved_cpus is not None:
        content = text("reserved.slice.conf.j2", plan=plan)
        files = [HostFile(path=path, content=content) for path in RESERVE_DROP_INS]
    return _group(files, RESERVE_DROP_INS)


def _group(files: list[HostFile], ours: tuple[str, ...]) -> PathGroup:
    """These files, and none of `ours` beside them."""
    wanted = {file.path for file in files}
    return PathGroup(files=tuple(files), absent=tuple(path for path in ours if path not in wanted))
