"""Prove each host anew, as it is. `pyinfra -y inventories/factory.py deploys/verify.py`

The roll-out's smoke test and its comparison of every knob; changes and starts nothing.
Exit code as that of an audit: docs/reports.md.
"""

from pyinfra import host, state

from edgellm import prepare, recorder, steps

recorder.begin("verify", state, ok_when=recorder.OkWhen.PROVEN)
context = prepare.context_for(host)
if context is not None:  # else the host has already failed, with its reason
    steps.verify(context)
