"""Networks along what torch.fx sees of their data flow: cut where they begin to learn, or with batch norm fused in."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from finetune.models.stages import head, head_name, stages


def split_frozen(network: nn.Module, frozen: Sequence[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """Return the frozen part of a network and the rest as modules that share its weights.

    The cut is before the first module that learns or is random, so all that needs no gradient is on the frozen side.

    Args:
        network: (B, 3, H, W) to (B, K).
        frozen: Its first stages.

    Returns:
        (B, 3, H, W) to (B, …), and (B, …) to (B, K); None where something else goes from the one to the other, where a
        function drops at random, or where torch.fx can't follow.
    """
    parts = {**stages(network), head_name(network): head(network)}
    halves = []
    for is_rest in (False, True):
        try:
            graph = _Tracer(parts).trace(network, _defaults(network))
        except Exception:  # whatever a network of timm's does with what it takes for pictures
            return None
        if any(_drops_for_good(node) for node in graph.nodes):
            return None
        pictures = next(node for node in graph.nodes if node.op == "placeholder")
        first = next(node for node in graph.nodes if _learns_or_is_random(network, node, frozen))
        if len(first.all_input_nodes) != 1:
            return None
        features = first.all_input_nodes[0]
        if is_rest:
            with graph.inserting_before(pictures):
                features.replace_all_uses_with(graph.placeholder("features"))
        else:
            graph.erase_node(next(node for node in graph.nodes if node.op == "output"))
            graph.output(features)
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))  # assertions are dead code too
        if is_rest:
            if pictures.users:
                return None
            graph.erase_node(pictures)
        for node in [n for n in graph.nodes if n.op == "placeholder" and n is not pictures and not n.users]:
            graph.erase_node(node)  # an argument that has its default
        halves.append(fx.GraphModule(network, graph))
    return halves[0], halves[1]


def fuse_batch_norm(part: nn.Module) -> nn.Module:
    """Return a copy with batch norm folded into the convolutions before it.

    What it computes is the same up to rounding. A part that torch.fx can't follow comes back as it is.

    Args:
        part: In eval mode.
    """
    from torch.fx.experimental.optimization import fuse  # only what evaluates or has something frozen needs it

    try:
        return fuse(part)
    except Exception:  # whatever a network of timm's does with what it takes for pictures
        return part


class _Tracer(fx.Tracer):
    """Follows what happens between the stages, and takes them and all that holds none as they are."""

    def __init__(self, parts: Iterable[str] = ()) -> None:  # torch makes one without, to unpickle a half
        super().__init__()
        self.containers = {name.rsplit(".", i)[0] for name in parts for i in range(1, name.count(".") + 1)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.containers


def _defaults(network: nn.Module) -> dict[str, Any]:
    """Return the values of a network's arguments beside the pictures."""
    parameters = inspect.signature(network.forward).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _drops_for_good(node: fx.Node) -> bool:
    """Whether a node is a dropout of `F.dropout(…, training=self.training)`: what that is now stays in the graph."""
    return bool(node.op == "call_function" and node.kwargs.get("training") and node.kwargs.get("p", 1))


def _learns_or_is_random(network: nn.Module, node: fx.Node, frozen: Sequence[nn.Module]) -> bool:
    if node.op == "get_attr":  # what lies directly on a container
        return any(name == node.target and parameter.requires_grad for name, parameter in network.named_parameters())
    if node.op != "call_module":
        return False
    module = network.get_submodule(str(node.target))
    if any(module is stage for stage in frozen):
        return False
    if any(_drops(part) for part in module.modules()):
        return True
    return bool([*module.parameters(), *module.buffers()])


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd | StochasticDepth):
        return module.p > 0
    return bool(getattr(module, "drop_prob", 0))  # timm's
