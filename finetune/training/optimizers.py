"""The optimizer: which parameters train at which rate and with weight decay, and fused steps.

Fused optimizers update all weights in one pass over memory, whose bandwidth limits an optimizer step. They compute the
same as others up to rounding. On CPUs torch 2.15 assumes that weight, gradient and state have the same memory layout.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from finetune.models.stages import head, stage_parameters

# Scales and position embeddings, which get no weight decay either: names of parameters or of modules that contain them.
# Sources: the authors' code of ConvNeXt (optim_factory.py: all parameters with one dimension; torchvision gives
# layer_scale three), DeiT (`no_weight_decay`: pos_embed, cls_token), Swin and Swin V2 (`no_weight_decay_keywords`).
_WITHOUT_DECAY = frozenset(
    (
        "layer_scale",
        "class_token",
        "pos_embedding",
        "relative_position_bias_table",
        "logit_scale",
        "cpb_mlp",
    )
)


def param_groups(
    network: nn.Module, head_lr_multiplier: float, decay_norm_and_bias: bool = True
) -> list[dict]:
    """Return named parameter groups, `backbone` and `head`. Each trainable parameter is in exactly one of them.

    The network does not change.

    Args:
        network: The network, after `freeze`.
        head_lr_multiplier: The head's learning rate relative to the optimizer's.
        decay_norm_and_bias: If false, biases, norm parameters and those of `_WITHOUT_DECAY` get separate groups
            without weight decay, `…_no_decay`.

    Returns:
        Groups with `name`, `params` and `lr_multiplier` for `scale_learning_rates`, and `weight_decay` if it is 0.
    """
    of_stages = stage_parameters(network).values()
    parts = {
        "backbone": ([p for parameters in of_stages for p in parameters], 1.0),
        "head": (list(head(network).parameters()), head_lr_multiplier),
    }
    exempt_ids = set() if decay_norm_and_bias else _without_decay(network)
    groups: list[dict] = []
    for name, (parameters, multiplier) in parts.items():
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        exempt = [p for p in trainable if id(p) in exempt_ids]
        decayed = [p for p in trainable if id(p) not in exempt_ids]
        if decayed:
            groups.append({"name": name, "params": decayed, "lr_multiplier": multiplier})
        if exempt:
            without = {"name": f"{name}_no_decay", "params": exempt, "weight_decay": 0.0}
            groups.append({**without, "lr_multiplier": multiplier})
    return groups


def scale_learning_rates(optimizer: Optimizer) -> None:
    """Multiply the learning rate of each group by its `lr_multiplier`, and remove that key."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group.pop("lr_multiplier", 1.0)


def _without_decay(network: nn.Module) -> set[int]:
    # networks of timm name further parameters
    own_names: set[str] = getattr(network, "no_weight_decay", set)()
    return {
        id(parameter)
        for name, parameter in network.named_parameters()
        if parameter.ndim <= 1
        or name in own_names
        or not _WITHOUT_DECAY.isdisjoint(name.split("."))
    }


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
