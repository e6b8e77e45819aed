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
BEFORE = f"{INSTALL_DIR}/before"  # values from before our first change, for uninstall.py
STATE_DIR = "/var/lib/edgellm"
UNIT_DIR = "/etc/systemd/system"
SYSCTL_CONF = "/etc/sysctl.d/90-edgellm.conf"
LIMITS_CONF = "/etc/security/limits.d/90-edgellm.conf"
ZRAM_UNIT = f"{UNIT_DIR}/edgellm-zram.service"
ZRAM_GENERATOR_CONF = "/etc/systemd/zram-generator.conf.d/90-edgellm.conf"
USER = "edgellm"

# What uninstall.py removes; the parents that a distribution has are left.
EVERYTHING = (
    INSTALL_DIR,
    CONFIG_DIR,
    STATE_DIR,
    f"{UNIT_DIR}/edgellm.service",
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


def release_directory(release_id: str) -> str:
    """Where a release's files lie on a host."""
    return posixpath.join(RELEASES, release_id)
