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
STATE_DIR = "/var/lib/edgellm"
UNIT_DIR = "/etc/systemd/system"
SYSCTL_CONF = "/etc/sysctl.d/90-edgellm.conf"
LIMITS_CONF = "/etc/security/limits.d/90-edgellm.conf"
ZRAM_UNIT = f"{UNIT_DIR}/edgellm-zram.service"
ZRAM_GENERATOR_CONF = "/etc/systemd/zram-generator.conf.d/90-edgellm.conf"
UNITS = ("edgellm.service", "edgellm.socket", "edgellm.slice")  # in a release, and in UNIT_DIR
UPSTREAM_FOLDER = "upstream.d"  # of a release: <an operator's unit>.conf, our drop-in for it
# In <an operator's unit>.d/, so that uninstall.py finds it whatever unit that was
DROP_IN = "90-edgellm.conf"
MARK = "# Rendered by edgellm;"  # how every file of ours begins
USER = "edgellm"

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
    LIMITS_CONF,
)


def model_path(sha256: str) -> str:
    """Where a model lies on a host."""
    return posixpath.join(MODELS, f"{sha256}.gguf")


def runtime_directory(runtime_id: str) -> str:
    """Where a runtime is unpacked on a host."""
    return posixpath.join(RUNTIMES, runtime_id)


def drop_in_path(unit: str) -> str:
    """Our drop-in of an operator's unit."""
    return posixpath.join(UNIT_DIR, f"{unit}.d", DROP_IN)


def release_directory(release_id: str) -> str:
    """Where a release's files lie on a host."""
    return posixpath.join(RELEASES, release_id)
