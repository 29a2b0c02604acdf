"""A network's parts in order from the stem to the head, and freezing them.

What is frozen stays so: what trains is settled once, before DDP wraps the network.
"""

from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from finetune.system.messages import WrongUsage

# Modules that only hold a row of stages, in torchvision's naming.
_CONTAINERS = {"features", "encoder", "layers", "blocks", "trunk_output"}


def head_name(network: nn.Module) -> str:
    """Dotted name of the last linear layer, like `fc` or `classifier.3`."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)][-1]


def head(network: nn.Module) -> nn.Linear:
    """The last linear layer."""
    return cast(nn.Linear, network.get_submodule(head_name(network)))


def stages(network: nn.Module) -> dict[str, nn.Module]:
    """Parts of the network from the stem to the last one before the head, without overlap, by dotted name.

    Together with the head they hold every parameter but those that lie directly on a container (ViT's `class_token`
    and `encoder.pos_embedding`). Modules without parameters are left out.
    """
    last = head_name(network)
    found = {}

    def walk(container: nn.Module, prefix: str) -> None:
        for name, module in container.named_children():
            path = prefix + name
            if name in _CONTAINERS or last.startswith(path + "."):
                walk(module, path + ".")
            elif path != last and next(module.parameters(), None) is not None:
                found[path] = module

    walk(network, "")
    return found


def freeze(network: nn.Module, last: str | None) -> list[nn.Module]:
    """Take the gradients from the stages up to a named one, and from the parameters that lie outside any stage.

    Args:
        network: Its parameters' `requires_grad` is set; the head's never is.
        last: Name of the last frozen stage, or of several together (`features`); `backbone` for all; None for nothing.

    Returns:
        The frozen modules: the caller keeps them in eval mode, so that their batch norm and dropout rest too.
    """
    if last is None:
        return []
    parts = stages(network)
    named = [i for i, name in enumerate(parts) if last == "backbone" or name == last or name.startswith(last + ".")]
    if not named:
        raise WrongUsage(
            f"there is no stage {last!r} to freeze; the stages are {', '.join(parts)}, and backbone is all"
        )
    frozen = list(parts.values())[: named[-1] + 1]
    for parameter in (*outside_stages(network), *(p for stage in frozen for p in stage.parameters())):
        parameter.requires_grad = False
    return frozen


def batch_norms(network: nn.Module) -> list[nn.Module]:
    """Every batch norm module of torch's."""
    return [module for module in network.modules() if isinstance(module, _BatchNorm)]


def outside_stages(network: nn.Module) -> list[nn.Parameter]:
    """Parameters that lie directly on a container, like ViT's class token: they go with the first stage."""
    inside = {id(p) for part in (*stages(network).values(), head(network)) for p in part.parameters()}
    return [parameter for parameter in network.parameters() if id(parameter) not in inside]
