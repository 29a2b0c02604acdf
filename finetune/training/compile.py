"""Compiles the network by torch."""

import logging
import os
import shutil
from typing import Any, Protocol

import pytorch_lightning as pl
import torch

from finetune.distributed.sync_batch_norm import SharedBatchNorm
from finetune.models.image_classifier import ImageClassifier

log = logging.getLogger(__name__)

_MIN_LOGGED_SECONDS = 0.5  # shorter compilations are not logged


class HasImageClassifier(Protocol):
    """The attributes of a module that this callback uses."""

    image_classifier: ImageClassifier


class Compile(pl.Callback):
    """Compiles the network before its first use, and logs how long that took.

    A compiled network ignores hooks that are added later, so it is compiled when training begins. Compilation is in
    place, inside the module that DDP wraps, so names in checkpoints do not change.
    """

    def __init__(self) -> None:
        self._logged_seconds = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # torch would raise a long error during the first batch.
        compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
        if not any(shutil.which(name) for name in compilers):
            raise ValueError(
                f"model.compile needs a C++ compiler, and there is no {' or '.join(compilers)} on this machine"
            )
        self._logged_seconds = seconds_compiling()
        # Hide the warning that CUDA's tools are there but no GPU is.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def _compile(self, trainer: pl.Trainer, pl_module: HasImageClassifier) -> None:
        network = pl_module.image_classifier.network
        # for example by the fit before a test; torch has no public name for it
        is_done = network._compiled_call_impl is not None  # noqa: SLF001
        if is_done or (trainer.state.fn == "fit" and not trainer.training):
            return
        for module in network.modules():
            # Its collectives can't be compiled. torch would split it into many graphs and compile each.
            if isinstance(module, SharedBatchNorm):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        network.compile()

    on_train_start = on_validation_start = on_test_start = on_predict_start = _compile  # type: ignore[assignment]

    def _log_seconds(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds = seconds_compiling()
        if trainer.is_global_zero and seconds > self._logged_seconds + _MIN_LOGGED_SECONDS:
            log.info("compiling took %.0f s", seconds - self._logged_seconds)
        self._logged_seconds = seconds

    on_train_epoch_end = on_test_end = on_predict_end = _log_seconds  # type: ignore[assignment]


def seconds_compiling() -> float:
    """Return the seconds that this process has spent compiling, as torch has measured them."""
    # imported here since it takes a second; torch's own benchmarks use this function
    from torch._dynamo.utils import calculate_time_spent  # noqa: PLC2701

    return calculate_time_spent().get("total_wall_time", 0.0)
