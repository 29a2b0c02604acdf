"""Compiles the network by torch."""

import logging
import os
import shutil
from typing import Any

import pytorch_lightning as pl
import torch

from finetune.distributed.sync_batch_norm import SharedBatchNorm


class Compile(pl.Callback):
    """Compiles the network before its first use.

    A compiled network ignores hooks that are added later, so it is compiled when training begins. Compilation is in
    place, inside the module that DDP wraps, so names in checkpoints do not change.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # torch would raise a long error during the first batch.
        compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
        if not any(shutil.which(name) for name in compilers):
            raise ValueError(
                f"model.compile needs a C++ compiler, and there is no {' or '.join(compilers)} on this machine"
            )
        # Hide the warning that CUDA's tools are there but no GPU is.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    def _compile(self, trainer: pl.Trainer, pl_module: Any) -> None:
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

    on_train_start = on_validation_start = on_test_start = on_predict_start = _compile
