"""`--model.compile true`: torch.compile on what runs, and what its start costs."""

import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch

from finetune.batch_norm import SharedBatchNorm
from finetune.sharding import is_sharded

if TYPE_CHECKING:
    from finetune.classifier import Classifier

log = logging.getLogger(__name__)


class Compile(pl.Callback):
    """Compiles the network where it begins to be used, and says how long that took.

    Once training begins all hooks and weights are in place: what is compiled no longer sees a hook that is added. It
    happens in place, so that names in checkpoints stay, and inside what DDP wraps.
    """

    def __init__(self) -> None:
        self._told = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # torch finds it out in the middle of the first batch, in many lines.
        compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
        if not any(shutil.which(name) for name in compilers):
            raise ValueError(f"model.compile needs a C++ compiler, and there is no {' or '.join(compilers)} here")
        if is_sharded(trainer):
            raise ValueError("model.compile can't be had with trainer.strategy model_parallel: leave one out")
        self._told = seconds_compiling()
        # That it finds CUDA's tools but no GPU is no news.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def _compile(self, trainer: pl.Trainer, pl_module: "Classifier") -> None:
        is_done = pl_module.network._compiled_call_impl is not None  # by the fit before this test
        if is_done or (trainer.state.fn == "fit" and not trainer.training):
            return
        for module in pl_module.network.modules():
            if isinstance(module, SharedBatchNorm):  # its devices talk: nothing to compile, but each piece of it anew
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        pl_module.network.compile()
        if hasattr(pl_module, "rest"):
            pl_module.rest = torch.compile(pl_module.rest)

    on_train_start = on_validation_start = on_test_start = on_predict_start = _compile  # type: ignore[assignment]

    def _tell(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds = seconds_compiling()
        if trainer.is_global_zero and seconds > self._told + 0.5:
            log.info("compiling took %.0f s", seconds - self._told)
        self._told = seconds

    on_train_epoch_end = on_test_end = on_predict_end = _tell  # type: ignore[assignment]


def seconds_compiling() -> float:
    """Return how long this process has been compiling, as torch has counted it."""
    from torch._dynamo.utils import calculate_time_spent  # a second to import; torch's own benchmarks use it

    return calculate_time_spent().get("total_wall_time", 0.0)
