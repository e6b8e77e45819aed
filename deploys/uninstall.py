"""Leave the hosts as they were. `pyinfra inventories/factory.py deploys/uninstall.py`"""

from pyinfra import state

from edgellm import recorder, steps

recorder.begin("uninstall", state, ok_when=recorder.OkWhen.DONE)
steps.remove_everything()
