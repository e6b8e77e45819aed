"""One step of a roll-out each, in the order of deploys/qwen.py. They carry out, never decide."""

from edgellm.steps.bench import compare_with_plain_start
from edgellm.steps.cores import reserve_cores
from edgellm.steps.diagnose import collect_evidence
from edgellm.steps.kernel import tune_kernel
from edgellm.steps.memory import set_up_zram
from edgellm.steps.model import place_model
from edgellm.steps.packages import install_packages
from edgellm.steps.runtime import place_runtime
from edgellm.steps.server import start_server
from edgellm.steps.tune import measure_candidates
from edgellm.steps.uninstall import remove_everything
from edgellm.steps.verify import verify, verify_or_roll_back

__all__ = [
    "collect_evidence",
    "compare_with_plain_start",
    "install_packages",
    "measure_candidates",
    "place_model",
    "place_runtime",
    "remove_everything",
    "reserve_cores",
    "set_up_zram",
    "start_server",
    "tune_kernel",
    "verify",
    "verify_or_roll_back",
]
