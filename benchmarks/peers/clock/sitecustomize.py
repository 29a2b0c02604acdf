"""Writes down when each optimizer step ended, for whichever program trains: one line of time.monotonic() a step.

Python imports a module of this name at its start: with this folder in PYTHONPATH the clock is in every process, in our
environment as in a peer's, and no line of the measured program is touched. Torch is only waited for, not imported:
processes that do without it stay without it.
"""

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder

LOG = os.environ.get("COMPARE_CLOCK")


def tick(*_) -> None:
    """Note a step. By hand where an optimizer isn't torch's, as fastai's."""
    if LOG:
        with open(LOG, "a") as file:
            file.write(f"{time.monotonic():.6f}\n")


class AfterOptimizer(MetaPathFinder):
    """Hooks `tick` into all of torch's optimizers as soon as their module is there."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_hook(module):
            execute(module)
            module.register_optimizer_step_post_hook(tick)

        spec.loader.exec_module = execute_and_hook
        return spec


if LOG:
    sys.meta_path.insert(0, AfterOptimizer())
