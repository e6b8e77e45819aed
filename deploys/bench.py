"""What the plan is worth on each host. `pyinfra -y inventories/factory.py deploys/bench.py`

Against a plain start of the same server, idle and under load, in turns; up to tune_budget_s a
host. A table a host and reports/<run>/bench.json; leaves the service as it was.
"""

from pyinfra import host, state

from edgellm import prepare, recorder, steps

recorder.begin("bench", state, ok_when=recorder.OkWhen.DONE)
context = prepare.context_for(host)
if context is not None:  # else the host has already failed, with its reason
    steps.compare_with_plain_start(context)
