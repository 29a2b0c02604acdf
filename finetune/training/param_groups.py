"""Parameter groups of the optimizer: learning rates of the stages, and which parameters have weight decay."""

from torch import nn
from torch.optim import Optimizer

from finetune.models.stages import depths, head, stage_parameters

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
    network: nn.Module,
    head_lr_multiplier: float,
    layer_decay: float = 1.0,
    decay_norm_and_bias: bool = True,
) -> list[dict]:
    """Return named parameter groups, stem first. Each trainable parameter is in exactly one, frozen ones are in none.

    The network does not change. Without layer decay the groups are `backbone` and `head`. With it each stage has a
    group: the head has depth 0, the last stage depth 1, and so on to the stem (`depths`). A stage of depth d trains
    with `layer_decay ** d` times the learning rate.

    Args:
        network: The network, after `freeze`.
        head_lr_multiplier: The head's learning rate relative to the optimizer's.
        layer_decay: Ratio of the learning rates of neighbouring stages, in (0, 1].
        decay_norm_and_bias: If false, biases, norm parameters and those of `_WITHOUT_DECAY` get separate groups
            without weight decay, `…_no_decay`.

    Returns:
        Groups with `name`, `params` and `lr_multiplier` for `scale_learning_rates`, and `weight_decay` if it is 0.

    Source: layer-wise decay of BEiT (arXiv:2106.08254), counted as its `LayerDecayValueAssigner` does.
    """
    parts = stage_parameters(network)
    multipliers = {name: layer_decay**depth for name, depth in depths(network).items()}
    if layer_decay == 1:
        parts = {
            "backbone": [parameter for parameters in parts.values() for parameter in parameters]
        }
        multipliers = {"backbone": 1.0}
    parts["head"] = list(head(network).parameters())
    multipliers["head"] = head_lr_multiplier
    exempt_ids = set() if decay_norm_and_bias else _without_decay(network)
    groups = []
    for name, parameters in parts.items():
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        exempt = [p for p in trainable if id(p) in exempt_ids]
        decayed = [p for p in trainable if id(p) not in exempt_ids]
        if decayed:
            groups.append({"name": name, "params": decayed, "lr_multiplier": multipliers[name]})
        if exempt:
            groups.append(
                {
                    "name": f"{name}_no_decay",
                    "params": exempt,
                    "lr_multiplier": multipliers[name],
                    "weight_decay": 0.0,
                }
            )
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
