"""What Lightning's ModelParallelStrategy leaves to us: which device holds what of the network.

Its k devices form a mesh, data_parallel x tensor_parallel. Along the first axis a batch is shared out, and each device
holds a part of every weight (FSDP2), fetched when it is needed. Along the second all see the same pictures, and each
holds the rows of the head for a part of the classes.
"""

import math
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, OptimStateKeyType, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune.distributed.tensor_parallel import shard_head
from finetune.models.ensemble import members
from finetune.models.stages import head, stages
from finetune.system.messages import WrongUsage


class MeshStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, whose checkpoints are those of one device: one file, that any mesh can load.

    Args:
        data_parallel_size: Devices that share out a batch; `auto` is the number of machines.
        tensor_parallel_size: Devices that share the head; `auto` is the number of devices of a machine.
    """

    def __init__(
        self, data_parallel_size: Literal["auto"] | int = "auto", tensor_parallel_size: Literal["auto"] | int = "auto"
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        try:
            super().setup_environment()
        except RuntimeError as error:  # sizes that don't give the number of devices
            raise WrongUsage(str(error)) from error

    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.gradient_clip_val:  # torch can't take the norm of whole and sharded gradients together
            raise WrongUsage(
                "trainer.gradient_clip_val can't be had with trainer.strategy model_parallel: leave it out"
            )
        if trainer.precision == "16-mixed" and trainer.state.fn == "fit":  # nor scale them together
            raise WrongUsage("trainer.precision 16-mixed can't be had with model_parallel: take bf16-mixed or 32-true")
        super().setup(trainer)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        assert self.model is not None and self.device_mesh is not None
        copy_gradients(self.model, self.device_mesh)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
        # Lightning's own unpickles anything, and sends tensors from rank 0 as they lie in memory: channels_last weights
        # arrive permuted (torch 2.15). Here every device reads the file.
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", ()), strict=False):
            named = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self.model)
            set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return checkpoint


StrategyRegistry.register("model_parallel", MeshStrategy)


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Spread a network over a mesh, in place; once it is, nothing happens.

    Args:
        network: Every device holds all of it, with the same weights.
        mesh: With the axes `data_parallel` and `tensor_parallel`.

    Raises:
        ValueError: Both have several devices, which can't share the classes evenly.
        WrongUsage: It is an ensemble.
    """
    if len(members(network)) > 1:
        raise WrongUsage("trainer.strategy model_parallel spreads one network, not several (model.members)")
    if any(isinstance(parameter, DTensor) for parameter in network.parameters()):
        return
    num, sizes = len(head(network).weight), [mesh[axis].size() for axis in ("data_parallel", "tensor_parallel")]
    if min(sizes) > 1 and num % math.prod(sizes):  # torch 2.15 saves what is uneven along both, and can't load it
        both = " x ".join(map(str, sizes))
        raise ValueError(f"{num} classes can't be shared out evenly on a mesh of {both}: give one axis all devices")
    if mesh["tensor_parallel"].size() > 1:
        shard_head(network, mesh["tensor_parallel"])
    if mesh["data_parallel"].size() > 1:
        for parameter in network.parameters():  # FSDP2 takes no channels_last weights
            parameter.data = parameter.data.contiguous()
        for module in (*stages(network).values(), network):
            fully_shard(module, mesh=mesh["data_parallel"])


def copy_gradients(network: nn.Module, mesh: DeviceMesh) -> None:
    """Give devices that share a head the first one's gradients of all else, of which each holds a copy.

    They have seen the same pictures, but a GPU's sums are not always rounded alike, and what differs would only grow.
    """
    if (axis := mesh["tensor_parallel"]).size() == 1:
        return
    group = axis.get_group()
    for gradient in (parameter.grad for parameter in network.parameters()):
        if isinstance(gradient, DTensor):
            copied = None if "tensor_parallel" in (gradient.device_mesh.mesh_dim_names or ()) else gradient.to_local()
        else:
            copied = gradient
        if copied is not None:
            dist.broadcast(copied, dist.get_global_rank(group, 0), group)


def reshard(network: nn.Module) -> None:
    """Let go of what FSDP2 still holds whole after a forward pass: what were written there would be lost."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, the same on every device, into a parameter, sharded or not; call it under `no_grad`."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
