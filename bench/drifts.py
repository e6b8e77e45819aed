"""Drifts that an update or a hand brings about: injected, named by an audit, repaired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm import layout
from edgellm.drift import Verdict
from edgellm.report import short

ENTRYPOINT = f"{layout.CURRENT}/entrypoint.sh"
UNIT = f"{layout.UNIT_DIR}/edgellm.service"
RESTART = "systemctl daemon-reload && systemctl restart edgellm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """`command` runs as root in a host; `named`: what an audit must name, and nothing else."""

    what: str
    command: str
    named: tuple[str, ...]


DRIFTS = (
    Drift(
        what="vm.swappiness reverted",
        command="sysctl -qw vm.swappiness=60",
        named=("swappiness",),
    ),
    Drift(
        what="vm.swappiness overridden by a later file",
        command="echo vm.swappiness=60 > /etc/sysctl.d/99-vendor.conf",
        named=("swappiness",),
    ),
    Drift(
        what="unit edited, and in force",
        command=f"sed -i s/^LimitNOFILE=.*/LimitNOFILE=2000/ {UNIT} && {RESTART}",
        named=(UNIT,),
    ),
    Drift(
        what="entrypoint edited, and in force",
        command=f"sed -i s/--batch/--other/ {ENTRYPOINT} && systemctl restart edgellm",
        named=("entrypoint.sh",),
    ),
    Drift(
        what="slice removed",
        command=f"rm {layout.UNIT_DIR}/edgellm.slice && systemctl daemon-reload",
        named=(f"{layout.UNIT_DIR}/edgellm.slice",),
    ),
    Drift(
        what="current points elsewhere",
        command=f"ln -sfn /tmp {layout.CURRENT}",
        named=("release",),
    ),
    Drift(
        what="limits.d file edited",
        command=f"echo '# mine' >> {layout.LIMITS_CONF}",
        named=("login_limits",),
    ),
    Drift(
        what="model rotted under an unchanged stat",
        command=f"cd {layout.MODELS} && for model in *.gguf; do touch -r $model /run/mtime && "
        "printf x | dd of=$model bs=1 seek=5000 conv=notrunc status=none && "
        "touch -r /run/mtime $model; done",
        named=("model",),
    ),
    Drift(
        what="service stopped and disabled",
        command="systemctl disable -q --now edgellm",
        named=("service",),
    ),
    Drift(
        what="server.env given away",
        command=f"chown edgellm {layout.CURRENT}/server.env",
        named=("server.env",),
    ),
    Drift(
        what="libgomp removed by the package manager",
        command="dpkg --remove --force-depends libgomp1",
        named=("packages",),
    ),
    Drift(
        what="account removed",
        command="systemctl stop edgellm.socket edgellm && userdel edgellm",
        named=("account", "socket"),
    ),
)


def rounds(
    drifts: Sequence[Drift], hosts: Sequence[str], untouched: int
) -> Iterator[dict[str, Drift]]:
    """Host -> its drift, one a host at a time; the last `untouched` hosts get none in any round."""
    drifted = hosts[: len(hosts) - untouched]
    for first in range(0, len(drifts), len(drifted)):
        yield dict(zip(drifted, drifts[first:], strict=False))


def not_in_order(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """fleet.json of an audit -> host: the knobs that drifted, or that nobody could tell, sorted."""
    bad = (Verdict.DRIFTED.value, Verdict.UNKNOWN.value)
    return {
        host["name"]: sorted(
            short(knob["knob"]) for knob in host["knobs"] if knob["verdict"] in bad
        )
        for host in report["hosts"]
    }


def is_named(drift: Drift, knobs: Sequence[str]) -> bool:
    """Exactly: a knob too many is a false alarm."""
    return sorted(drift.named) == sorted(knobs)
