"""Optimizers that update all weights in one pass over memory, where torch has such: the step is bound by memory."""

from typing import Any

import torch
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
    is_plain = all(
        type(p) is torch.nn.Parameter and p.device.type in ("cpu", "cuda") for p in parameters
    )
    if type(optimizer) in _FUSED and is_plain and not any(_is_told(group) for group in groups):
        for group in groups:
            group["fused"] = True
        optimizer.register_step_pre_hook(_lay_out_first)
    chosen = [group.get("fused") for group in groups]

    # a checkpoint has way and layouts of the devices that it comes from
    def adapt(loaded: Optimizer) -> None:
        for group, fused in zip(loaded.param_groups, chosen, strict=True):
            if "fused" in group:
                group["fused"] = fused
        if type(loaded) in _FUSED:
            _check_state(loaded)
        _lay_out_state(loaded)

    optimizer.register_load_state_dict_post_hook(adapt)
    return optimizer


def _is_told(group: dict[str, Any]) -> bool:
    return (
        any(group.get(name) is not None for name in ("foreach", "fused"))
        or bool(group.get("differentiable"))
        or bool(group.get("capturable"))
    )


def _lay_out_first(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Lay out the gradients before the step; where a closure computes them, between the two."""
    # the first is the optimizer
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if closure is None:
        _lay_out_gradients(optimizer)
        return None

    def closure_then_laid_out() -> Any:
        loss = closure()
        _lay_out_gradients(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": closure_then_laid_out}


def _lay_out_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)


def _check_state(optimizer: Optimizer) -> None:
    """Make sure that loaded state has the shapes of the weights: the fused way would read other memory.

    Raises:
        ValueError: It has not.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in optimizer.state.get(p, {}).items():
                expected = () if name == "step" else tuple(p.shape)
                if torch.is_tensor(value) and tuple(value.shape) != expected:
                    raise ValueError(
                        f"the optimizer state of the checkpoint is damaged: {name} has the shape {tuple(value.shape)}, "
                        f"expected {expected}"
                    )


def _lay_out_state(optimizer: Optimizer) -> None:
    """Once is enough: state begins as a gradient, and stays as it is.

    The fused way reads Adam's `step` on the device; torch leaves that of a checkpoint without this way on the CPU.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for name, value in state.items():
                if name == "step" and group.get("fused"):
                    state[name] = value.to(p.device)
                elif (
                    torch.is_tensor(value)
                    and value.shape == p.shape
                    and value.stride() != p.stride()
                ):
                    state[name] = torch.empty_like(p).copy_(value)
