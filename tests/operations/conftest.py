"""Dataclasses of the product as YAML tags: `!ServiceState {active: true, …}`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from unittest.mock import patch

import yaml

from edgellm.facts.installed import InstallDir, InstalledRelease
from edgellm.facts.paths import PathState
from edgellm.facts.service import ServiceState
from edgellm.facts.zram import OwnZramState
from edgellm.operations.paths import HostDirectory, HostFile
from edgellm.tuning import ZramPlan

# pyinfra-testing imports pyinfra_cli, and that swaps threads and sockets of the whole process for
# gevent's. The server's tests in the same process need the real ones.
with patch("gevent.monkey.patch_all"):
    import pyinfra_cli  # noqa: F401

TAGGED = (
    HostDirectory,
    HostFile,
    InstallDir,
    InstalledRelease,
    OwnZramState,
    PathState,
    ServiceState,
    ZramPlan,
)


def _constructor(kind: type) -> Any:
    tuples = {f.name for f in fields(kind) if str(f.type).startswith("tuple")}

    def construct(loader: yaml.SafeLoader, node: yaml.MappingNode) -> Any:
        values = loader.construct_mapping(node, deep=True)
        return kind(
            **{str(key): tuple(value) if key in tuples else value for key, value in values.items()}
        )

    return construct


# pyinfra-testing reads its cases by yaml.safe_load
for _kind in TAGGED:
    yaml.SafeLoader.add_constructor(f"!{_kind.__name__}", _constructor(_kind))
