"""What is not as a roll-out leaves it. `pyinfra -y inventories/factory.py deploys/audit.py`

Changes nothing. Exit code 0: all in order, 2: something drifted, 1: of some host it cannot tell.
"""

from pyinfra import host, state

from edgellm import prepare, recorder

recorder.begin("audit", state, ok_when=recorder.OkWhen.IN_ORDER)
prepare.context_for(host)  # the plan, and every knob of it against what is there
