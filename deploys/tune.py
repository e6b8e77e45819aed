"""Measure on each host which knobs win on it. `pyinfra inventories/factory.py deploys/tune.py`

Stores the result there and changes no service; deploys/qwen.py uses it. Up to tune_budget_s.
"""

from pyinfra import host, state

from edgellm import prepare, recorder, steps

recorder.begin("tune", state, ok_when=recorder.OkWhen.DONE)
context = prepare.context_for(host)
if context is not None:  # else the host has already failed, with its reason
    steps.measure_candidates(context)
