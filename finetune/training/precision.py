"""The default precision of a run: bf16 if the hardware is faster with it, else float32."""

import logging
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from torch import Tensor, nn

from finetune.distributed.signals import is_rank_zero

log = logging.getLogger(__name__)

# device types without float64; exact sums are computed on the CPU instead
WITHOUT_FLOAT64 = {"mps"}


def automatic_precision(
    accelerator: str | Accelerator,
    checkpoint: Mapping[str, Any] | None,
    is_resumed: bool,
    network: nn.Module | None = None,
) -> str:
    """Return the default of `trainer.precision` on the devices that Lightning would choose for `accelerator`.

    A GPU is faster in bf16 if it supports it. A CPU can be faster only if it has instructions for bf16, AVX512-BF16 or
    AMX. Other CPUs compute in float32 and lose time with conversions. Depthwise convolutions are slower in bf16: in
    docs/decisions.md, ResNet-18 trains up to 2.5 times faster on a CPU, EfficientNet-Lite0 2 times slower.

    Args:
        accelerator: The accelerator of the Trainer.
        checkpoint: The checkpoint that the command loads. A resumed run keeps its precision. A network that was trained
            in another precision than bf16 is evaluated in that precision.
        is_resumed: Whether the command resumes the run of the checkpoint.
        network: The network that is trained; None for an evaluation.
    """
    trained_in = checkpoint["finetune"].get("precision") if checkpoint else None
    if trained_in and (is_resumed or trained_in != "bf16-mixed"):
        return trained_in
    may_be_cuda = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    if may_be_cuda and CUDAAccelerator.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16-mixed" if has_bf16 else "32-true"
    may_be_cpu = accelerator in ("auto", "cpu") or isinstance(accelerator, CPUAccelerator)
    is_faster = may_be_cpu and _cpu_has_bf16() and not _has_depthwise(network)
    return "bf16-mixed" if is_faster else "32-true"


def allow_tf32() -> None:
    """Let GPUs multiply float32 matrices in TF32, as for convolutions. It is faster, with 10 bits of mantissa."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # on a CPU "high" would mean bf16


def prepare_arithmetic(trainer: pl.Trainer) -> None:
    """Allow TF32, and warn if bf16 is requested on a CPU without it."""
    allow_tf32()
    precision = str(trainer.precision)
    is_cpu = trainer.strategy.root_device.type == "cpu"
    if is_cpu and is_rank_zero() and precision.startswith("bf16") and not _cpu_has_bf16():
        log.warning(
            "this processor does not support bf16: %s may be ten times slower than 32-true",
            precision,
        )


def _cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _has_depthwise(network: nn.Module | None) -> bool:
    modules = () if network is None else network.modules()
    convolutions = (module for module in modules if isinstance(module, nn.Conv2d))
    return any(one.groups == one.in_channels > 1 for one in convolutions)


def double(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64. If its device does not support float64, the result is on the CPU."""
    return (tensor.cpu() if tensor.device.type in WITHOUT_FLOAT64 else tensor).double()
