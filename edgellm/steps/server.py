"""The release's files, the units, and the service that runs them."""

from __future__ import annotations

from pathlib import PurePosixPath

from pyinfra.api.operation import OperationMeta

from edgellm import layout, render
from edgellm.operations import paths, service, upstream
from edgellm.operations.paths import HostDirectory, HostFile
from edgellm.prepare import Context
from edgellm.release import Release
from edgellm.steps.step import step


@step("Server")
def start_server(ctx: Context, *placed: OperationMeta | None) -> None:
    """`placed`: the operations that placed what the service runs."""
    service.account_present(name="System account edgellm present")
    paths.present(
        name="API key files present",
        files=_key_files(ctx),
        directories=(HostDirectory(path=layout.CONFIG_DIR),) if _key_files(ctx) else (),
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
            if file.name in layout.UNITS
        ),
    )
    unit = ctx.settings.upstream_unit
    upstream.tuned(
        name="Upstream server tuned",
        unit=unit,
        drop_in=None if unit is None else render.upstream_drop_in(ctx.plan),
    )
    service.running(
        name="Service runs the release",
        release_id=ctx.release.id,
        repaired=lambda: any(
            done.did_change() for done in (*placed, release_files, units) if done is not None
        ),
    )


def _key_files(ctx: Context) -> tuple[HostFile, ...]:
    files = []
    if ctx.probe_key is not None:
        hashes = render.api_keys_file(ctx.api_key_hashes)
        files.append(HostFile(path=layout.API_KEYS, content=hashes, mode="0640", group=layout.USER))
        files.append(HostFile(path=layout.PROBE_KEY, content=ctx.probe_key + "\n", mode="0600"))
    if ctx.upstream_key is not None:
        key = ctx.upstream_key + "\n"
        files.append(
            HostFile(path=layout.UPSTREAM_KEY, content=key, mode="0640", group=layout.USER)
        )
    return tuple(files)


def _directories(release: Release) -> tuple[HostDirectory, ...]:
    own = (layout.INSTALL_DIR, layout.MODELS, layout.RUNTIMES, layout.RELEASES)
    root = layout.release_directory(release.id)
    # Each before what lies in it: they are made in this order
    inner = {
        str(parent)
        for file in release.files
        for parent in PurePosixPath(file.name).parents
        if parent.name
    }
    return tuple(
        HostDirectory(path=path) for path in (*own, root, *(f"{root}/{i}" for i in sorted(inner)))
    )


def _release_files(release: Release) -> tuple[HostFile, ...]:
    directory = layout.release_directory(release.id)
    return tuple(
        HostFile(path=f"{directory}/{file.name}", content=file.content, mode=f"{file.mode:04o}")
        for file in release.files
    )


def _release_links(release: Release) -> tuple[tuple[str, str], ...]:
    directory = layout.release_directory(release.id)
    runtime = (f"{directory}/runtime", f"../../runtimes/{release.runtime_id}")
    if release.model_sha256 is None:
        return (runtime,)
    return ((f"{directory}/model.gguf", f"../../models/{release.model_sha256}.gguf"), runtime)
