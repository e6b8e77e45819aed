"""The release's files, the units, and the service that runs them."""

from __future__ import annotations

from pyinfra.api.operation import OperationMeta

from edgellm.operations import paths, service, upstream
from edgellm.prepare import Context
from edgellm.steps.step import step


@step("Server")
def start_server(ctx: Context, *placed: OperationMeta | None) -> None:
    """`placed`: the operations that placed what the service runs."""
    desired = ctx.desired
    service.account_present(name="System account edgellm present")
    keys = paths.present(
        name="API key files present",
        files=desired.keys.files,
        directories=desired.keys.directories,
        absent=desired.keys.absent,
    )
    release_files = paths.present(
        name="Release files present",
        files=desired.release.files,
        directories=desired.release.directories,
        links=desired.release.links,
    )
    units = paths.present(name="systemd units present", files=desired.units.files)
    upstream.tuned(
        name="Upstream server tuned",
        unit=desired.upstream_unit,
        drop_in=desired.upstream_drop_in,
    )
    service.running(
        name="Service runs the release",
        release_id=ctx.release.id,
        plan=ctx.plan,
        upstream_unit=desired.upstream_unit,
        own_app=ctx.settings.server_app is not None,
        guard_s=ctx.smoke_test.all_ends_within_s + service.GUARD_SLACK_S,
        repaired=lambda: any(
            done.did_change() for done in (*placed, keys, release_files, units) if done is not None
        ),
    )
