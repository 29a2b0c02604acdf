"""The arithmetic of a run where nobody says: bf16 where the hardware gains from it, else float32."""

from typing import Literal

import torch
from pytorch_lightning.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator


def automatic_precision(accelerator: str | Accelerator) -> Literal["bf16-mixed", "32-true"]:
    """Return what `trainer.precision` should be on the devices that Lightning would choose for `accelerator`.

    A GPU gains from bf16 if it computes in it; a CPU only with instructions of its own for it, AVX512-BF16 or AMX:
    others compute in float32 all the same, and convert besides.
    """
    wants_cuda = accelerator in ("auto", "gpu", "cuda") or isinstance(accelerator, CUDAAccelerator)
    if wants_cuda and CUDAAccelerator.is_available():
        gains = torch.cuda.is_bf16_supported(including_emulation=False)
    elif accelerator in ("auto", "cpu") or isinstance(accelerator, CPUAccelerator):
        capabilities = torch.cpu.get_capabilities()
        gains = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    else:
        gains = False
    return "bf16-mixed" if gains else "32-true"


def allow_tf32() -> None:
    """Let GPUs multiply float32 matrices in TF32, as they do convolutions: faster, with 10 bits of mantissa."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # on a CPU the same word would mean bf16
