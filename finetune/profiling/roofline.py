"""The least time that a training step can take on a device, from what the device was measured to do.

Convolutions and matrix products must do their operations and must read and write their tensors once; all else, such as
batch norm and ReLU, could be fused into them and is not counted. Each of them takes at least as long as the slower of
the two (the roofline model, doi:10.1145/1498765.1498785).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from finetune.profiling.step_timing import timed


@dataclass(frozen=True)
class Rates:
    """What a device does at best: floating point operations and bytes a second."""

    operations: float
    bytes: float


class Work(TorchDispatchMode):
    """Lists operations and bytes of each convolution and matrix product that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.products.append((int(count(*args, **(kwargs or {}), out_val=out)), num_bytes))
        return out


def measured_rates(device: torch.device, dtype: torch.dtype, repeats: int = 9) -> Rates:
    """Return what the device does at its fastest of a large matrix product in `dtype`, and of a large copy."""
    n, num_bytes = 4096 if device.type == "cuda" else 2048, 2**28
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = min(timed(lambda: a @ b, device, repeats))
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy = min(timed(lambda: target.copy_(source), device, repeats))
    return Rates(2 * n**3 / product, 2 * num_bytes / copy)


def least_seconds(step: Callable[[], Any], rates: Rates) -> dict[str, float]:
    """Run a step, and return its operations, the bytes it must move, and the least seconds it can take."""
    with torch.compiler.set_stance("force_eager"), Work() as work:
        step()
    return {
        "operations": float(sum(operations for operations, _ in work.products)),
        "bytes": float(sum(num_bytes for _, num_bytes in work.products)),
        "seconds": sum(max(o / rates.operations, b / rates.bytes) for o, b in work.products),
    }
