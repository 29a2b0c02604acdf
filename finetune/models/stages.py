"""A network's parts in order from the stem to the head, and freezing them.

What is frozen stays so: what trains is settled once, before DDP wraps the network.
"""

import copy
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from finetune.system.messages import WrongUsage

# Modules that only hold a row of stages, in torchvision's naming; the last two in that of those networks of timm's that
# don't say themselves which layers they have.
_CONTAINERS = {"features", "encoder", "layers", "blocks", "trunk_output", "stages", "dense_stages"}


def head_name(network: nn.Module) -> str:
    """Dotted name of the last linear layer, like `fc` or `classifier.3`."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def head(network: nn.Module) -> nn.Linear:
    """The last linear layer."""
    return cast(nn.Linear, network.get_submodule(head_name(network)))


def without_head(network: nn.Module) -> nn.Module:
    """Return a copy of a network that ends before its head, and shares its parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    found = copy.deepcopy(network, shared)
    found.set_submodule(head_name(found), nn.Identity())
    return found


def stages(network: nn.Module) -> dict[str, nn.Module]:
    """Parts of the network from the stem to the last one before the head, without overlap, by dotted name.

    Together with the head they hold every parameter but those that lie directly on a container (ViT's `class_token`
    and `encoder.pos_embedding`). Modules without parameters are left out. Those of a network of timm's are as large as
    its `group_matcher` lets them be.
    """
    last, layers = head_name(network), _layers(network)
    found = {}

    def walk(container: nn.Module, prefix: str) -> None:
        for name, module in container.named_children():
            path = prefix + name
            if path == last or next(module.parameters(), None) is None:
                continue
            if last.startswith(path + ".") or (
                name in _CONTAINERS if layers is None else _is_row(module, path)
            ):
                walk(module, path + ".")
            else:
                found[path] = module

    def _is_row(module: nn.Module, path: str) -> bool:
        return len(set(_layers_in(module, path))) > 1 and next(module.children(), None) is not None

    def _layers_in(module: nn.Module, path: str) -> Iterator[int]:
        assert layers is not None
        return (layers[f"{path}.{name}"] for name, _ in module.named_parameters())

    walk(network, "")
    if layers is None or callable(_groups(network)):
        # networks with such a function register in forward order, which CaiT's layers are not in
        return found
    return dict(sorted(found.items(), key=lambda part: min(_layers_in(part[1], part[0]))))


def depths(network: nn.Module) -> dict[str, int]:
    """Return how far each stage is from the head, by name: the last has depth 1, and so on to the stem.

    A stage of nothing but norm parameters has the depth of the one before it, to which it belongs. In a network of
    timm's all that is one layer to its `group_matcher` has one depth, and what is one with the head has depth 0.
    """
    parts, layers = stages(network), _layers(network)
    found, depth = {}, 0
    if layers is not None:
        last = layers[f"{head_name(network)}.weight"]
        for name, stage in parts.items():
            own = last - min(layers[f"{name}.{inner}"] for inner, _ in stage.named_parameters())
            found[name] = depth = depth if own == 0 and _is_norm(stage) else own
        return found
    for name in reversed(parts):
        # Counted from the head, a norm's depth is that of the stage before it, which comes next here.
        found[name] = depth + 1
        depth += not _is_norm(parts[name])
    return {name: found[name] for name in parts}


def _layers(network: nn.Module) -> dict[str, int] | None:
    """Return in which layer each parameter is, by its name and timm's count; None for a network that doesn't say."""
    groups = _groups(network)
    if groups is None:
        return None
    from timm.models import group_parameters

    return group_parameters(network, groups, reverse=True)


def _groups(network: nn.Module) -> Any:
    """Return how timm tells a network's layers by the names of parameters: patterns, or a function."""
    matcher = getattr(network, "group_matcher", None)
    try:
        return matcher and matcher(coarse=True)
    except AssertionError:  # timm's own word for a network that can't
        return None


def _is_norm(stage: nn.Module) -> bool:
    return all(parameter.ndim <= 1 for parameter in stage.parameters())


def check_solved(last: str | None, head_init: str, members: int) -> None:
    """Make sure that a head which is solved exactly, since all else is frozen, is the one that the settings describe.

    Raises:
        WrongUsage: It is not.
    """
    if last != "backbone":
        return
    if members > 1:
        raise WrongUsage(
            "model.freeze backbone solves the head, so model.members would all be alike: leave one out"
        )
    if head_init == "source":
        raise WrongUsage(
            "model.freeze backbone solves the head, so model.head_init source has no effect: leave one out"
        )


def freeze(network: nn.Module, last: str | None) -> list[nn.Module]:
    """Take the gradients from the stages up to a named one, with what lies beside them (`stage_parameters`).

    Args:
        network: Its parameters' `requires_grad` is set; the head's never is.
        last: Name of the last frozen stage, or of several together (`features`); `backbone` for all; None for nothing.

    Returns:
        The frozen modules: the caller keeps them in eval mode, so that their batch norm and dropout rest too.
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
        earlier = [name for name, depth in depths(network).items() if depth > 1]
        hint = f": --model.freeze {earlier[-1]} freezes all but the last" if earlier else ""
        raise WrongUsage(
            f"there is no stage {last!r} to freeze; the stages are {', '.join(parts)}, and backbone is all{hint}"
        )
    num_frozen = named[-1] + 1
    for parameters in list(stage_parameters(network).values())[:num_frozen]:
        for parameter in parameters:
            parameter.requires_grad = False
    return list(parts.values())[:num_frozen]


def batch_norms(network: nn.Module) -> list[nn.Module]:
    """Every batch norm module of torch's."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def stage_parameters(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of each stage by its name, and with them those that lie directly on a container.

    Where that holds the head, as CLIP's pooling with its positions does, they go with the last stage; all others, like
    ViT's class token, with the first.
    """
    found = {name: list(stage.parameters()) for name, stage in stages(network).items()}
    inside = {
        id(p) for parameters in (*found.values(), head(network).parameters()) for p in parameters
    }
    outside = {name: p for name, p in network.named_parameters() if id(p) not in inside}
    beside_head = [
        name for name in outside if head_name(network).startswith(f"{name.rpartition('.')[0]}.")
    ]
    for stage in list(found)[-1:]:
        found[stage] += [outside.pop(name) for name in beside_head]
    for stage in list(found)[:1]:
        found[stage] = [*outside.values(), *found[stage]]
    return found
