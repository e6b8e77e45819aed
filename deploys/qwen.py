"""Roll the model out and prove each host. `pyinfra inventories/factory.py deploys/qwen.py`"""

from pyinfra import host, state

from edgellm import prepare, recorder, rollout, steps
from edgellm.prepare import Context


def install(ctx: Context) -> None:
    steps.install_packages(ctx)
    steps.tune_kernel(ctx)
    steps.set_up_zram(ctx)
    runtime = steps.place_runtime(ctx)
    model = steps.place_model(ctx)
    steps.start_server(ctx, runtime, model)  # entrypoint, unit, slice, current -> release
    steps.reserve_cores(ctx)  # only where the inventory asks for it
    steps.verify_or_roll_back(ctx)


recorder.begin("qwen", state)
context = prepare.context_for(host)  # settings + facts -> plan
if context is not None:  # else the host has already failed, with its reason
    for wave in host.loop(rollout.waves(state)):
        rollout.proven(name=f"Wave {wave.number} may begin", wave=wave)
        if host.name in wave.hosts:
            install(context)
