"""The stages of a network, in order from the stem to the head, and freezing them.

Stages are frozen once, before DDP wraps the network, and stay frozen.
"""

import copy
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # noqa: PLC2701 (the base class of all)

from finetune.system.messages import WrongUsage

# Names of modules that only contain a sequence of stages: in torchvision, and the last two in networks of timm that
# have no `group_matcher`.
_CONTAINERS = {"features", "encoder", "layers", "blocks", "trunk_output", "stages", "dense_stages"}


def head_name(network: nn.Module) -> str:
    """Return the dotted name of the last linear layer, such as `fc` or `classifier.3`."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def head(network: nn.Module) -> nn.Linear:
    """Return the last linear layer."""
    return cast(nn.Linear, network.get_submodule(head_name(network)))


def without_head(network: nn.Module) -> nn.Module:
    """Return a copy of a network without its head. It shares all parameters and buffers with the network."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    copied = copy.deepcopy(network, shared)
    copied.set_submodule(head_name(copied), nn.Identity())
    return copied


def stages(network: nn.Module) -> dict[str, nn.Module]:
    """Return the stages of a network by dotted name, from the stem to the last one before the head, without overlap.

    Stages and head together contain every parameter, except those directly on a container (ViT's `class_token` and
    `encoder.pos_embedding`). Modules without parameters are skipped. In a network of timm a stage is as large as the
    layers of its `group_matcher` allow.
    """
    last = head_name(network)
    layers = _layers(network)
    parts = {}

    def layers_in(module: nn.Module, path: str) -> Iterator[int]:
        assert layers is not None
        return (layers[f"{path}.{name}"] for name, _ in module.named_parameters())

    def is_container(module: nn.Module, path: str) -> bool:
        if last.startswith(path + "."):
            return True
        if layers is None:
            return path.rpartition(".")[2] in _CONTAINERS
        return len(set(layers_in(module, path))) > 1 and next(module.children(), None) is not None

    def collect(container: nn.Module, prefix: str) -> None:
        for name, module in container.named_children():
            path = prefix + name
            if path == last or next(module.parameters(), None) is None:
                continue
            if is_container(module, path):
                collect(module, path + ".")
            else:
                parts[path] = module

    collect(network, "")
    if layers is None or callable(_groups(network)):
        # If `group_matcher` is a function, modules are registered in forward order. CaiT's layer numbers are not.
        return parts
    return dict(sorted(parts.items(), key=lambda part: min(layers_in(part[1], part[0]))))


def _layers(network: nn.Module) -> dict[str, int] | None:
    """Return the layer number of each parameter by name, as timm counts; None for a network without layer groups."""
    groups = _groups(network)
    if groups is None:
        return None
    from timm.models import group_parameters

    return group_parameters(network, groups, reverse=True)


def _groups(network: nn.Module) -> Any:
    """Return timm's rule from parameter names to layers: patterns or a function; None if there is none."""
    matcher = getattr(network, "group_matcher", None)
    try:
        return matcher and matcher(coarse=True)
    except AssertionError:  # timm raises this for networks without layer groups
        return None


def freeze(network: nn.Module, last: str | None) -> list[nn.Module]:
    """Freeze the parameters of all stages up to a named one; see `stage_parameters`.

    Args:
        network: `requires_grad` of its frozen parameters is set to False. The head is never frozen.
        last: Name of the last frozen stage or of a container of stages (`features`); `backbone` for all stages; None
            for no stage.

    Returns:
        The frozen modules. The caller must keep them in eval mode, so that batch norm and dropout are inactive.

    Raises:
        WrongUsage: There is no such stage.
    """
    if last is None:
        return []
    parts = stages(network)
    named = [
        i
        for i, name in enumerate(parts)
        if last == "backbone" or name == last or name.startswith(last + ".")
    ]
    if not named:
        raise WrongUsage(
            f"there is no stage {last!r} to freeze; the stages are {', '.join(parts)}, and backbone is all"
        )
    num_frozen = named[-1] + 1
    for parameters in list(stage_parameters(network).values())[:num_frozen]:
        for parameter in parameters:
            parameter.requires_grad = False
    return list(parts.values())[:num_frozen]


def batch_norms(network: nn.Module) -> list[nn.Module]:
    """Return all modules that are or derive from torch's batch norm."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def stage_parameters(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each stage by its name, including those directly on a container.

    If the container holds the head, its parameters belong to the last stage, for example the position embeddings of
    CLIP's pooling. All others belong to the first stage, for example ViT's class token.
    """
    result = {name: list(stage.parameters()) for name, stage in stages(network).items()}
    inside = {
        id(p) for parameters in (*result.values(), head(network).parameters()) for p in parameters
    }
    outside = {name: p for name, p in network.named_parameters() if id(p) not in inside}
    next_to_head = [
        name for name in outside if head_name(network).startswith(f"{name.rpartition('.')[0]}.")
    ]
    for stage in list(result)[-1:]:
        result[stage] += [outside.pop(name) for name in next_to_head]
    for stage in list(result)[:1]:
        result[stage] = [*outside.values(), *result[stage]]
    return result
