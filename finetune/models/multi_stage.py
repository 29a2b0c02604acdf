"""Networks whose head takes the pooled features of their last stages, not only those of the last one.

Features of earlier stages are less specific to the classes that a network was pretrained on. A head that is fitted on
frozen features gains by them (docs/decisions.md).

Such a network is the plain one with a wider head: names and shapes of all other parameters are the same, so weights of
the plain network load into it, and the other way round.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet

from finetune.models.stages import head, head_name
from finetune.settings.schema import MAX_STAGES
from finetune.system.messages import WrongUsage

# Shapes: B images, C channels and u x v positions of a stage, D features of all stages.


class MultiStage(nn.Module):
    """A network whose head takes the mean over all positions of each of its last stages, concatenated.

    The features are in the order of the stages, and end with those that the plain network's head takes. Usually these
    are the mean of the last stage. If the plain network has a layer between its last stage and its head, they are the
    output of this layer, and the mean of the last stage comes before them.

    Attributes:
        pooled_stages: Indices of the stages whose outputs are pooled, counted from the end: -1 is the last one.
        pooled_head_name: Dotted name of the head.
    """

    pooled_stages: tuple[int, ...]
    pooled_head_name: str

    def stage_outputs(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the outputs of `pooled_stages` (B, C, u, v), and the features of the plain network (B, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of normalized images (B, 3, h, w)."""
        return self.get_submodule(self.pooled_head_name)(join_features(*self.stage_outputs(x)))


def join_features(outputs: list[Tensor], last: Tensor) -> Tensor:
    """Return the input of the head, (B, D), from the result of `stage_outputs`."""
    pooled = [F.adaptive_avg_pool2d(output, 1).flatten(1) for output in outputs]
    return torch.cat([*pooled, last], dim=1)


class _MultiStageResNet(MultiStage):
    """For the ResNets of torchvision."""

    def stage_outputs(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        network: Any = self
        x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
        outputs = []
        for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
            x = stage(x)
            outputs.append(x)
        return [outputs[i] for i in self.pooled_stages], network.avgpool(x).flatten(1)


class _MultiStageTimm(MultiStage):
    """For networks of timm that return the outputs of their stages."""

    def stage_outputs(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        network: Any = self
        # The last stage is requested as well: without it some networks do not compute it.
        x, outputs = network.forward_intermediates(x, indices=[*range(self.pooled_stages[0], 0)])
        return outputs[: len(self.pooled_stages)], network.forward_head(x, pre_logits=True)


def most_stages(network: nn.Module) -> int:
    """Return the largest number of stages whose features the head of a network can take; 1 if only the last."""
    return max(1, min(MAX_STAGES, len(_channels(network))))


def use_stages(network: nn.Module, num_stages: int, backbone: str) -> None:
    """Let the head of a network take the pooled features of its last stages, in place.

    The head is a new one, Xavier-initialized. The class of the network is replaced by a derived one, as in
    `torch.nn.utils.parametrize`.

    Args:
        network: The network.
        num_stages: Number of stages; 1 changes nothing.
        backbone: The name of the network, for the error message.

    Raises:
        WrongUsage: The network does not support this number.
    """
    if num_stages == 1:
        return
    most = most_stages(network)
    if num_stages > most:
        how_many = "the last stage only" if most == 1 else f"at most {most} stages"
        raise WrongUsage(
            f"model.head_stages {num_stages}: the head of {backbone} can take the features of {how_many}: "
            f"pass {most}"
        )
    kind: type[MultiStage] = _MultiStageResNet if isinstance(network, ResNet) else _MultiStageTimm
    name = head_name(network)
    plain = head(network)
    channels = _channels(network)
    # The plain network's features stand for the last stage if they have its channels.
    end = -1 if channels[-1] == plain.in_features else 0
    pooled_stages = tuple(range(-num_stages, end))
    num_features = sum(channels[i] for i in pooled_stages) + plain.in_features
    wide = nn.Linear(num_features, plain.out_features)
    nn.init.xavier_uniform_(wide.weight)
    nn.init.zeros_(wide.bias)
    network.set_submodule(name, wide)
    network.__class__ = _derived(kind, type(network))  # type: ignore[arg-type]
    network.pooled_stages = pooled_stages  # type: ignore[assignment]
    network.pooled_head_name = name  # type: ignore[assignment]


@cache
def _derived(kind: type[MultiStage], plain: type[nn.Module]) -> type[nn.Module]:
    def reduce(self: nn.Module) -> tuple[Any, ...]:
        """Let the network be copied and pickled: pickle cannot find its class by name."""
        return _restore, (kind, plain), self.__dict__

    return type(f"MultiStage{plain.__name__}", (kind, plain), {"__reduce__": reduce})


def _restore(kind: type[MultiStage], plain: type[nn.Module]) -> nn.Module:
    derived = _derived(kind, plain)  # type: ignore[arg-type]
    return derived.__new__(derived)


def _channels(network: nn.Module) -> list[int]:
    """Return the number of channels of each of the last stages, in their order; empty if they are unknown.

    Only stages count whose outputs have fewer and fewer positions. A vision transformer has none of them.
    """
    if isinstance(network, ResNet):
        return [head(network).in_features // 2**halvings for halvings in (3, 2, 1, 0)]
    forward_head = getattr(network, "forward_head", None)
    infos = [*getattr(network, "feature_info", ())]
    if not hasattr(network, "forward_intermediates") or forward_head is None:
        return []
    if "pre_logits" not in inspect.signature(forward_head).parameters:
        return []
    if getattr(network, "head_hidden_size", None) != head(network).in_features:
        return []  # its head has several layers
    channels: list[int] = []
    reduction = 0
    for info in infos:
        if info["reduction"] <= reduction:
            channels.clear()
        channels.append(info["num_chs"])
        reduction = info["reduction"]
    return channels if len(channels) > 1 else []
