"""Roll the model out and prove each host. `pyinfra inventories/factory.py deploys/qwen.py`"""

from pyinfra import host, state

from edgellm import prepare, recorder, steps


def install() -> None:
    ctx = prepare.context_for(host)  # settings + facts -> plan
    if ctx is None:  # this host has already failed, with its reason
        return
    steps.install_packages(ctx)
    steps.tune_kernel(ctx.plan)
    steps.set_up_zram(ctx.plan.zram)
    steps.place_runtime(ctx)
    steps.place_model(ctx)
    steps.start_server(ctx)  # entrypoint, unit, slice, current -> release
    steps.verify_or_roll_back(ctx)


recorder.begin("qwen", state)
install()
