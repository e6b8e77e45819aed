"""The fleet of factory.yaml as pyinfra's groups. Another file: EDGELLM_FLEET=path.

Data of a host, each beating the one before: group_data/all.py, defaults.settings of the YAML file
(group `factory`), group_data/<architecture>.py, group_data/site_<site>.py, group_data/canary.py or
wave_<n>.py, the host's own settings.

Groups: arm64, x86_64, site_<site>, canary, wave_<n>; each works with --limit.

A password for sudo comes from the environment variable EDGELLM_SUDO_PASSWORD, or is asked for.
"""

import os
import sys
from pathlib import Path

from pyinfra import config

from edgellm import recorder
from edgellm.errors import InventoryError
from edgellm.inventory import load_fleet
from edgellm.report import ExitCode

try:
    _fleet = load_fleet(
        Path(os.environ.get("EDGELLM_FLEET") or Path(__file__).with_suffix(".yaml"))
    )
except InventoryError as _error:
    print(_error, file=sys.stderr)
    sys.exit(ExitCode.BAD_INPUT)  # pyinfra wraps every Exception in a traceback, but not this

# In pyinfra's configuration, not in host data: debug-inventory prints host data.
if os.environ.get("EDGELLM_SUDO_PASSWORD") and config.SUDO_PASSWORD is None:
    config.SUDO_PASSWORD = os.environ["EDGELLM_SUDO_PASSWORD"]

# Declared first: pyinfra lets the last group win, and would add this file's group at the end.
factory = (_fleet.names(), dict(_fleet.settings))
globals().update(_fleet.groups())

recorder.attach_before_connecting()
