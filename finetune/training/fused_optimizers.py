"""Fused optimizers, which update all weights in one pass over memory. Memory bandwidth limits an optimizer step.

They compute the same as others up to rounding. On CPUs torch 2.15 assumes that weight, gradient and state have the same
memory layout.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

_FUSED = (SGD, Adam, AdamW)


def fuse(optimizer: Optimizer) -> Optimizer:
    """Switch an optimizer to torch's fused implementation, if there is one, and return it.

    An optimizer whose implementation the user has chosen does not change. Call `lay_out_gradients` before each step.
    """
    groups = optimizer.param_groups
    is_possible = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    if type(optimizer) in _FUSED and is_possible and not any(map(_is_explicit, groups)):
        for group in groups:
            group["fused"] = True
        optimizer.register_load_state_dict_post_hook(_adapt_state)
    return optimizer


def _is_explicit(group: dict[str, Any]) -> bool:
    is_chosen = any(group.get(name) is not None for name in ("foreach", "fused"))
    return is_chosen or bool(group.get("differentiable") or group.get("capturable"))


def lay_out_gradients(optimizer: Optimizer) -> None:
    """Give gradients the memory layout of their weights."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = _laid_out(p.grad, p)


def _laid_out(value: Tensor, p: Tensor) -> Tensor:
    return value if value.stride() == p.stride() else torch.empty_like(p).copy_(value)


def _adapt_state(optimizer: Optimizer) -> None:
    """Adapt the state of a checkpoint, which has the implementation and the layouts of the devices that wrote it.

    New state has the layout of a gradient.

    Raises:
        ValueError: A shape is not that of the weight. Fused steps would read other memory.
    """
    for group in optimizer.param_groups:
        group["fused"] = True
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for name, value in state.items():
                if not torch.is_tensor(value):
                    continue
                expected = torch.Size() if name == "step" else p.shape
                if value.shape != expected:
                    raise ValueError(
                        f"the optimizer state of the checkpoint is damaged: {name} has the shape {tuple(value.shape)}, "
                        f"expected {tuple(expected)}"
                    )
                # fused steps read Adam's `step` on the device
                state[name] = value.to(p.device) if name == "step" else _laid_out(value, p)
