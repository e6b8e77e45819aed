"""Every path on a host that is ours. Pure: names only."""

from __future__ import annotations

import posixpath

INSTALL_DIR = "/opt/edgellm"
MODELS = f"{INSTALL_DIR}/models"
RUNTIMES = f"{INSTALL_DIR}/runtimes"
RELEASES = f"{INSTALL_DIR}/releases"
CURRENT = f"{INSTALL_DIR}/current"  # -> releases/<id>
PREVIOUS = f"{INSTALL_DIR}/previous"  # -> releases/<id>
CONFIG_DIR = "/etc/edgellm"
API_KEYS = f"{CONFIG_DIR}/api_keys"
PROBE_KEY = f"{CONFIG_DIR}/probe.key"
UPSTREAM_KEY = f"{CONFIG_DIR}/upstream.key"
BEFORE = f"{INSTALL_DIR}/before"  # values from before our first change, for uninstall.py
# Beside BEFORE, not in STATE_DIR: that one belongs to the service's user, these are trusted.
RECORDED = f"{INSTALL_DIR}/recorded.json"  # RecordedHost of the last verified roll-out
MEASURED = f"{INSTALL_DIR}/measured.json"  # what deploys/tune.py found on the host itself
# Real time (rr, fifo) by the release id in one of these; see templates/entrypoint.sh.j2
REALTIME_CONFIRMED = f"{INSTALL_DIR}/realtime-confirmed"
REALTIME_TRIAL = "/run/edgellm-realtime-trial"
STATE_DIR = "/var/lib/edgellm"
UNIT_DIR = "/etc/systemd/system"
SYSCTL_DIR = "/etc/sysctl.d"
SYSCTL_CONF = f"{SYSCTL_DIR}/90-edgellm.conf"
SYSCTL_CONF_LAST = f"{SYSCTL_DIR}/zz-edgellm.conf"  # where a file of others sorts after the first
GOVERNOR_CONF = "/etc/tmpfiles.d/90-edgellm.conf"
LIMITS_CONF = "/etc/security/limits.d/90-edgellm.conf"
ZRAM_UNIT = f"{UNIT_DIR}/edgellm-zram.service"
ZRAM_GENERATOR_CONF = "/etc/systemd/zram-generator.conf.d/90-edgellm.conf"
UNITS = ("edgellm.service", "edgellm.socket", "edgellm.slice")  # in a release, and in UNIT_DIR
UPSTREAM_FOLDER = "upstream.d"  # of a release: <an operator's unit>.conf, our drop-in for it
# In <an operator's unit>.d/, so that uninstall.py finds it whatever unit that was
DROP_IN = "90-edgellm.conf"
RESERVED_SLICES = ("system.slice", "user.slice")  # kept off our cores by reserve_cpus
MARK = "# Rendered by edgellm;"  # how every file of ours begins
USER = "edgellm"


def drop_in_path(unit: str) -> str:
    """Our drop-in of a unit that is not ours."""
    return posixpath.join(UNIT_DIR, f"{unit}.d", DROP_IN)


# What uninstall.py removes; the parents that a distribution has are left.
EVERYTHING = (
    INSTALL_DIR,
    CONFIG_DIR,
    STATE_DIR,
    f"{UNIT_DIR}/edgellm.service",
    f"{UNIT_DIR}/edgellm.socket",
    f"{UNIT_DIR}/edgellm.slice",
    ZRAM_UNIT,
    ZRAM_GENERATOR_CONF,
    SYSCTL_CONF,
    SYSCTL_CONF_LAST,
    LIMITS_CONF,
    GOVERNOR_CONF,
    *(drop_in_path(name) for name in RESERVED_SLICES),
    REALTIME_TRIAL,
)


def model_path(sha256: str) -> str:
    """Where a model lies on a host."""
    return posixpath.join(MODELS, f"{sha256}.gguf")


def runtime_directory(runtime_id: str) -> str:
    """Where a runtime is unpacked on a host."""
    return posixpath.join(RUNTIMES, runtime_id)


def release_directory(release_id: str) -> str:
    """Where a release's files lie on a host."""
    return posixpath.join(RELEASES, release_id)
