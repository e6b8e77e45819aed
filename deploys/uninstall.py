"""Leave the hosts as they were. `pyinfra inventories/factory.py deploys/uninstall.py`"""

from edgellm import steps

steps.remove_everything()
