"""The arithmetic of a run where nobody says: bf16 where the hardware gains from it, else float32."""

import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from torch import Tensor

from finetune.distributed.signals import is_first_process
from finetune.system.machine import num_cores
from finetune.system.messages import WrongUsage

log = logging.getLogger(__name__)

WITHOUT_FLOAT64 = {"mps"}  # kinds of devices; what is to be exact there is computed on the CPU


def automatic_precision(
    accelerator: str | Accelerator,
    checkpoint: Mapping[str, Any] | None,
    goes_on: bool,
    faster_on_cpu: Callable[[], str] = lambda: "bf16-mixed",
) -> str:
    """Return what `trainer.precision` should be on the devices that Lightning would choose for `accelerator`.

    A GPU gains from bf16 if it computes in it. A CPU can gain only if it has instructions for it, AVX512-BF16 or AMX:
    others compute in float32 all the same, and convert besides.

    Args:
        accelerator: As the trainer is given it.
        checkpoint: What the command begins with. A run goes on as it was; a network that learned in another precision
            than bf16 is evaluated in that one.
        goes_on: Whether the command is the rest of the checkpoint's run.
        faster_on_cpu: What says which precision is faster on a CPU with such instructions.
    """
    before = checkpoint["finetune"].get("precision") if checkpoint else None
    if before and (goes_on or before != "bf16-mixed"):
        return before
    wants_cuda = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    if wants_cuda and CUDAAccelerator.is_available():
        gains = torch.cuda.is_bf16_supported(including_emulation=False)
    elif accelerator in ("auto", "cpu") or isinstance(accelerator, CPUAccelerator):
        return faster_on_cpu() if _cpu_has_bf16() else "32-true"
    else:
        gains = False
    return "bf16-mixed" if gains else "32-true"


def check_precision(precision: Any) -> None:
    """Make sure that a precision does not need a package that is missing here; a checkpoint may name it.

    Raises:
        WrongUsage: It does.
    """
    if str(precision).startswith("transformer-engine") and find_spec("transformer_engine") is None:
        raise WrongUsage(
            f"precision {precision} needs NVIDIA's package transformer_engine, which is not installed: "
            "give --precision 32-true"
        )


def allow_tf32() -> None:
    """Let GPUs multiply float32 matrices in TF32, as they do convolutions: faster, with 10 bits of mantissa."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # on a CPU the same word would mean bf16


def prepare_arithmetic(trainer: pl.Trainer) -> None:
    """Allow TF32. Warn of a CPU that has no bf16 where that is asked for, and of one that other programs use."""
    allow_tf32()
    is_cpu, precision = trainer.strategy.root_device.type == "cpu", str(trainer.precision)
    if not is_cpu or not is_first_process():
        return
    if precision.startswith("bf16") and not _cpu_has_bf16():
        log.warning(
            "this processor computes in no bf16: %s may be ten times slower than 32-true", precision
        )

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    # threads wait for one another after each operation, so one that is interrupted holds up all
    if torch.get_num_threads() > 1 and load >= num_cores():
        log.warning(
            "other programs use this machine (load %.1f on %d cores): one thread may be several times faster. "
            "Start the command with OMP_NUM_THREADS=1",
            load,
            num_cores(),
        )


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def double(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no such."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()
