"""Fused optimizers, which update all weights in one pass over memory. Memory bandwidth limits an optimizer step."""

from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

_FUSED = (SGD, Adam, AdamW)


def fuse(optimizer: Optimizer) -> Optimizer:
    """Switch an optimizer to torch's fused implementation, if there is one, and return it.

    An optimizer whose implementation the user has chosen does not change, nor does one of sharded parameters. Fused
    steps compute the same up to rounding. On CPUs torch 2.15 assumes that weight, gradient and state have the same
    memory layout, so gradients and state are converted to the layout of the weight first.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    # Sharded parameters are of another class.
    is_plain = all(
        type(p) is torch.nn.Parameter and p.device.type in ("cpu", "cuda") for p in parameters
    )
    if type(optimizer) in _FUSED and is_plain and not any(_is_explicit(group) for group in groups):
        for group in groups:
            group["fused"] = True
        optimizer.register_step_pre_hook(_lay_out_first)
    chosen = [group.get("fused") for group in groups]

    # A checkpoint has the implementation and the layouts of the devices that it was written on.
    def adapt(loaded: Optimizer) -> None:
        for group, fused in zip(loaded.param_groups, chosen, strict=True):
            if "fused" in group:
                group["fused"] = fused
        if type(loaded) in _FUSED:
            _check_state(loaded)
        _lay_out_state(loaded)

    optimizer.register_load_state_dict_post_hook(adapt)
    return optimizer


def _is_explicit(group: dict[str, Any]) -> bool:
    return (
        any(group.get(name) is not None for name in ("foreach", "fused"))
        or bool(group.get("differentiable"))
        or bool(group.get("capturable"))
    )


def _lay_out_first(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook before a step: convert the layout of gradients. If a closure computes them, convert them after it."""
    # args[0] is the optimizer
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
    """Check that loaded state has the shapes of the weights. Fused steps would read other memory otherwise.

    Raises:
        ValueError: A shape differs.
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
    """Convert the layout of loaded state. New state needs no conversion, since it gets the layout of a gradient.

    Fused steps read Adam's `step` on the device. From a checkpoint of an unfused optimizer torch loads it to the CPU.
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
