"""Tensor parallelism: linear layers whose weights are sharded over devices.

Let y = x W^T. In a column-wise layer each device has some rows of W (out, in) and computes some of the outputs. In a
row-wise layer each device has some columns of W and takes some of the inputs. The results of all devices are summed.
A row-wise layer needs exactly the inputs that a column-wise layer before it computes on the same device (Megatron-LM,
arXiv:1909.08053, section 3).
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

# Shapes: K classes, k devices.


def linear_names(network: nn.Module) -> list[str]:
    """Return the dotted names of all linear layers, in order."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]


def shard_linear(network: nn.Module, names: Sequence[str], mesh: DeviceMesh) -> nn.Module:
    """Shard linear layers in place: the first is column-wise, the next one row-wise, and so on.

    The first layer takes the same input on all devices. The output of the last layer is complete on all devices. Layers
    between a column-wise and a row-wise layer must be elementwise (ReLU), since a device has only some of the values.
    Parameters become DTensors under their old names, with the values of the first device. All other weights do not
    change and must be the same on all devices. Sizes need not be divisible by k: the last devices have less or nothing.

    Args:
        network: The complete network, on the device of this process.
        names: The layers, in forward order.
        mesh: A one-dimensional mesh of the devices that share the layers.
    """
    plan: dict[str, ParallelStyle] = {}
    for i, name in enumerate(names):
        if i % 2:
            plan[name] = RowwiseParallel()
        elif name == names[-1]:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        else:  # the output stays a DTensor, which knows its global size even if parts are uneven
            plan[name] = ColwiseParallel(use_local_output=False)
    return parallelize_module(network, mesh, plan)


def full_state(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state dict of a sharded network, with complete layers. Every process must call this."""
    state = network.state_dict()
    return {
        n: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for n, value in state.items()
    }
