"""The release's files, the units, and the service that runs them."""

from __future__ import annotations

from pyinfra.api.operation import OperationMeta

from edgellm import layout, render
from edgellm.facts.service import SLICE, UNIT
from edgellm.operations import paths, service
from edgellm.operations.paths import HostDirectory, HostFile
from edgellm.prepare import Context
from edgellm.release import Release
from edgellm.steps.step import step

UNITS = (UNIT, SLICE)


@step("Server")
def start_server(ctx: Context, *placed: OperationMeta) -> None:
    """`placed`: the operations that placed what the service runs."""
    service.account_present(name="System account edgellm present")
    paths.present(
        name="API key files present",
        files=_key_files(ctx),
        directories=() if ctx.probe_key is None else (HostDirectory(path=layout.CONFIG_DIR),),
    )
    release_files = paths.present(
        name="Release files present",
        files=_release_files(ctx.release),
        directories=_directories(ctx.release),
        links=_release_links(ctx.release),
    )
    units = paths.present(
        name="systemd units present",
        files=tuple(
            HostFile(path=f"{layout.UNIT_DIR}/{file.name}", content=file.content)
            for file in ctx.release.files
            if file.name in UNITS
        ),
    )
    service.running(
        name="Service runs the release",
        release_id=ctx.release.id,
        repaired=lambda: any(done.did_change() for done in (*placed, release_files, units)),
    )


def _key_files(ctx: Context) -> tuple[HostFile, ...]:
    if ctx.probe_key is None:
        return ()
    return (
        HostFile(
            path=layout.API_KEYS,
            content=render.api_keys_file(ctx.api_key_hashes),
            mode="0640",
            group=layout.USER,
        ),
        HostFile(path=layout.PROBE_KEY, content=ctx.probe_key + "\n", mode="0600"),
    )


def _directories(release: Release) -> tuple[HostDirectory, ...]:
    own = (layout.INSTALL_DIR, layout.MODELS, layout.RUNTIMES, layout.RELEASES)
    return tuple(HostDirectory(path=path) for path in (*own, layout.release_directory(release.id)))


def _release_files(release: Release) -> tuple[HostFile, ...]:
    directory = layout.release_directory(release.id)
    return tuple(
        HostFile(path=f"{directory}/{file.name}", content=file.content, mode=f"{file.mode:04o}")
        for file in release.files
    )


def _release_links(release: Release) -> tuple[tuple[str, str], ...]:
    directory = layout.release_directory(release.id)
    return (
        (f"{directory}/model.gguf", f"../../models/{release.model_sha256}.gguf"),
        (f"{directory}/runtime", f"../../runtimes/{release.runtime_id}"),
    )
