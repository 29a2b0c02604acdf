"""Optimizers that update all weights in one pass over memory, where torch has such: the step is bound by memory."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

_FUSED = (SGD, Adam, AdamW)


def fuse(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer of a plain network take its fused way, unless it was told which way to take; return it.

    It computes the same up to rounding. torch 2.15's way on CPUs walks through weight, gradient and state side by side,
    whatever their layouts: those that differ are brought to the weight's first.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    # What is spread over devices is a class of its own.
    is_plain = all(type(p) is torch.nn.Parameter and p.device.type in ("cpu", "cuda") for p in parameters)
    if type(optimizer) in _FUSED and is_plain and not any(_is_told(group) for group in groups):
        for group in groups:
            group["fused"] = True
        optimizer.register_step_pre_hook(_lay_out_first)
    chosen = [group.get("fused") for group in groups]

    def choose(loaded: Optimizer) -> None:  # a checkpoint has the way of the devices that it comes from
        for group, fused in zip(loaded.param_groups, chosen, strict=True):
            if "fused" in group:
                group["fused"] = fused

    optimizer.register_load_state_dict_post_hook(choose)
    return optimizer


def _is_told(group: dict[str, Any]) -> bool:
    return (
        any(group.get(name) is not None for name in ("foreach", "fused"))
        or bool(group.get("differentiable"))
        or bool(group.get("capturable"))
    )


def _lay_out_first(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Lay out before the step; where a closure computes the gradients, between the two."""
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)  # the first is the optimizer
    if closure is None:
        lay_out(optimizer)
        return None

    def closure_then_laid_out() -> Any:
        loss = closure()
        lay_out(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure_then_laid_out}


def lay_out(optimizer: Optimizer) -> None:
    """Bring gradients and state to the layout of their weights."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and _layout(p.grad) != _layout(p):
                p.grad = torch.empty_like(p).copy_(p.grad)
            state = optimizer.state.get(p, {})
            for name, value in state.items():
                if torch.is_tensor(value) and value.shape == p.shape and _layout(value) != _layout(p):
                    state[name] = torch.empty_like(p).copy_(value)


def _layout(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
