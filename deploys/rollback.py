"""Back to the release before. `pyinfra inventories/factory.py deploys/rollback.py`"""

from pyinfra import state

from edgellm import recorder
from edgellm.operations import service

recorder.begin("rollback", state, ok_when=recorder.OkWhen.DONE)
service.rolled_back(name="Previous release runs", required=True)
