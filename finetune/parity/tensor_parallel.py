"""Linear layers spread over devices, each of which holds a part of their weights.

In y = x W^T a device holds some rows of W (out, in) and computes some of the outputs ("column-wise", after W^T), or it
holds some columns of W, takes some of the inputs, and the devices' results are summed ("row-wise"). The second needs
just the inputs that the first has made (Megatron-LM, arXiv:1909.08053, section 3).
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
    """List the dotted names of all linear layers, in order."""
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]


def shard_linear(network: nn.Module, names: Sequence[str], mesh: DeviceMesh) -> nn.Module:
    """Spread linear layers in place: the first is cut column-wise, the next row-wise, and so on.

    The first takes the same input on all devices, the last gives its whole output to all. What lies between a
    column-wise and a row-wise layer must treat each value by itself (ReLU), since a device has only some. Parameters
    become DTensors under their old names. Their values are those of the first device; other weights are left alone and
    must be the same on all. Sizes need not divide by k: the last devices hold less, or nothing.

    Args:
        network: Whole, on this process's device.
        names: The layers, in forward order.
        mesh: The devices that share the layers, one-dimensional.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"layers are spread over one axis of devices, not over {mesh.ndim}: pass mesh[axis]"
        )
    plan: dict[str, ParallelStyle] = {}
    for i, name in enumerate(names):
        if i % 2:
            plan[name] = RowwiseParallel()
        elif name == names[-1]:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
        else:  # stays a DTensor, which knows the whole size although parts may be uneven
            plan[name] = ColwiseParallel(use_local_output=False)
    return parallelize_module(network, mesh, plan)


def full_state(network: nn.Module) -> dict[str, Tensor]:
    """Copy the state of a network with spread layers, each whole again; all processes of the mesh must call it."""
    state = network.state_dict()
    return {
        n: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for n, value in state.items()
    }
