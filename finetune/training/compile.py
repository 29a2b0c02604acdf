"""The network in faster forms: compiled by torch, and for evaluation in bf16 with batch norm fused in."""

import copy
import logging
import os
import shutil
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from torch import nn

from finetune.distributed.sync_batch_norm import SharedBatchNorm, plain_copy
from finetune.models.fx import fuse_batch_norm
from finetune.models.image_classifier import ImageClassifier

log = logging.getLogger(__name__)

_WORTH_TELLING = 0.5  # seconds


class HasImageClassifier(Protocol):
    """What these callbacks know of a module."""

    image_classifier: ImageClassifier


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
            raise ValueError(
                f"model.compile needs a C++ compiler, and there is no {' or '.join(compilers)} here"
            )
        self._told = seconds_compiling()
        # That it finds CUDA's tools but no GPU is no news.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def _compile(self, trainer: pl.Trainer, pl_module: HasImageClassifier) -> None:
        network = pl_module.image_classifier.network
        is_done = network._compiled_call_impl is not None  # by the fit before this test
        if is_done or (trainer.state.fn == "fit" and not trainer.training):
            return
        for module in network.modules():
            # its devices talk: nothing to compile, but each piece of it anew
            if isinstance(module, SharedBatchNorm):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        network.compile()

    on_train_start = on_validation_start = on_test_start = on_predict_start = _compile  # type: ignore[assignment]

    def _tell(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds = seconds_compiling()
        if trainer.is_global_zero and seconds > self._told + _WORTH_TELLING:
            log.info("compiling took %.0f s", seconds - self._told)
        self._told = seconds

    on_train_epoch_end = on_test_end = on_predict_end = _tell  # type: ignore[assignment]


class FuseBatchNorm(pl.Callback):
    """Lets `finetune validate`, `test` and `predict` in bf16 compute with a folded copy of the network.

    bf16 rounds more than folding does; in float32 the network stays as it is, and results are those of training's code.
    """

    def _fold(self, trainer: pl.Trainer, pl_module: HasImageClassifier) -> None:
        if trainer.state.fn != "fit" and trainer.precision == "bf16-mixed":
            # not the module: a checkpoint would hold it
            model = pl_module.image_classifier
            model.eval_forward = in_bf16(model.network).forward

    on_validation_start = on_test_start = on_predict_start = _fold  # type: ignore[assignment]

    def _leave(self, trainer: pl.Trainer, pl_module: HasImageClassifier, *_: Any) -> None:
        pl_module.image_classifier.eval_forward = None

    on_validation_end = on_test_end = on_predict_end = on_exception = _leave  # type: ignore[assignment]


def in_bf16(network: nn.Module) -> nn.Module:
    """Return a copy to evaluate under autocast to bf16: batch norm folded in, weights of products rounded already.

    Autocast would round them anew for every batch, which for a single picture takes as long as all the rest.

    Args:
        network: In eval mode.
    """
    is_shared = any(isinstance(module, SharedBatchNorm) for module in network.modules())
    fused = fuse_batch_norm(plain_copy(network) if is_shared else network)
    fused = copy.deepcopy(fused) if fused is network else fused
    for module in fused.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(torch.bfloat16)
    return fused


def seconds_compiling() -> float:
    """Return how long this process has been compiling, as torch has counted it."""
    # a second to import; torch's own benchmarks use it
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)
