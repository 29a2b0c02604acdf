"""Batch norm with the statistics of the global batch, on any number of devices.

torch's SyncBatchNorm works on GPUs only. In each layer the CPU waits for the statistics before it queues the next one.
In 16-bit precision a rank without images sends fewer bytes than the other ranks expect.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # noqa: PLC2701 (the base class of all)

# Shapes: b images of the per-rank batch (0 is allowed), C channels, N values of a channel in the global batch.


_AFTER_NORM = {"drop", "act"}  # the modules that timm's batch norm applies to its output


class SharedBatchNorm(_BatchNorm):
    """Batch norm of 1, 2 or 3 dimensions. In training mode it uses the statistics of the global batch."""

    process_group: Any = None  # the ranks that share a global batch; None for all

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (b, C, …), got {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, squared_deviations, count = _Normalize.apply(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            for average, value in (
                (self.running_mean, mean),
                (self.running_var, squared_deviations / (count - 1)),
            ):
                factor = (
                    1 / self.num_batches_tracked.to(average)
                    if self.momentum is None
                    else self.momentum
                )
                average.lerp_(value.to(average), factor)
        return output


class SharedBatchNormAct(SharedBatchNorm):
    """Like `SharedBatchNorm`, followed by the modules `drop` and `act` of timm's `BatchNormAct2d`."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class _Normalize(torch.autograd.Function):
    """Normalizes (b, C, …). Also returns the global batch's mean (C,), sum of squared deviations (C,) and N.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979),
    for the mean and squares of several parts. The gradient is that of arXiv:1502.03167, section 3, with sums over all
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, ...]:
        values = x if x.dtype == torch.float64 else x.float()
        C = x.size(1)
        num = x.numel() // C
        if num:
            but_channels = [0, *range(2, x.dim())]
            variance, mean = torch.var_mean(values, but_channels, correction=0)
        else:
            variance, mean = values.new_zeros(2, C)
        # No operation here synchronizes GPU and CPU: `num` is filled in on the device instead of copied to it.
        part = torch.cat([mean, num * variance, mean.new_full((1,), num)])
        parts = part.new_empty(dist.get_world_size(group), len(part))
        dist.all_gather(list(parts), part, group)
        means, squares, counts = parts.split([C, C, 1], dim=1)
        count = counts.sum()
        # Reading `count` makes the CPU wait, so it is only read if `num` allows the error. As num <= count, either all
        # ranks raise it or none does.
        if num < 2 and count < 2:
            raise ValueError(
                f"batch norm needs more than one value a channel to train, got input {tuple(x.shape)}"
            )
        if weight is not None and bias is not None:  # torch wants mean and weight in one dtype
            weight = weight.to(mean.dtype)
            bias = bias.to(mean.dtype)
        mean = (counts * means).sum(0) / count
        square = squares.sum(0) + (counts * (means - mean) ** 2).sum(0)
        ctx.save_for_backward(x, weight, mean, (square / count + eps).rsqrt(), count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, square, count)
        output = (
            F.batch_norm(x, mean, square / count, weight, bias, eps=eps)
            if num
            else torch.empty_like(x)
        )
        return output, mean, square, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_deviation, count = ctx.saved_tensors
        # sums of dy, and of dy times the normalized x, over the per-rank batch
        sums = mean.new_zeros(2, x.size(1))
        if x.numel():
            # the gradients of weight and bias
            ones = torch.ones_like(mean)
            wanted = [False, True, True]
            _, sums[1], sums[0] = torch.ops.aten.native_batch_norm_backward(
                gradient, x, ones, None, None, mean, inverse_deviation, True, 0.0, wanted
            )
        # DDP reduces the gradients of weight and bias itself.
        bias_gradient, weight_gradient = sums.clone()
        dist.all_reduce(sums, group=ctx.group)
        sums /= count
        # dx = scale * (dy - mean(dy) - (x - mean) * slope), in two passes over memory, rounded once
        scale = inverse_deviation if weight is None else inverse_deviation * weight
        slope = inverse_deviation * sums[1]
        shape = (1, -1, *[1] * (x.dim() - 2))
        offset = (scale * (mean * slope - sums[0])).view(shape)
        slope = (scale * slope).view(shape)
        scale = scale.view(shape)
        dx = torch.addcmul(
            torch.addcmul(offset, x, slope, value=-1), gradient, scale, out=torch.empty_like(x)
        )
        if weight is None:
            return dx, None, None, None, None
        return dx, weight_gradient, bias_gradient, None, None


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SharedBatchNorm)


def share_statistics(network: nn.Module, except_in: Collection[nn.Module] = ()) -> None:
    """Replace each batch norm by one with the statistics of the global batch. Parameters and buffers stay the same.

    Args:
        network: Its batch norm modules are replaced in place.
        except_in: Modules to skip, since their batch norm uses its running statistics anyway.

    Raises:
        ValueError: A batch norm is of an unsupported class.
    """
    for name, child in network.named_children():
        if any(child is module for module in except_in):
            continue
        if isinstance(child, _BatchNorm):
            shared_class = _shared_class(child)
            shared = shared_class.__new__(shared_class)
            shared.__dict__ = child.__dict__
            setattr(network, name, shared)
        else:
            share_statistics(child, except_in)


def _shared_class(norm: nn.Module) -> type[SharedBatchNorm]:
    if type(norm) in _PLAIN:
        return SharedBatchNorm
    is_timms = type(norm).__name__ == "BatchNormAct2d" and {*norm._modules} == _AFTER_NORM
    if is_timms or type(norm) is SharedBatchNormAct:
        return SharedBatchNormAct
    raise ValueError(f"{type(norm).__name__} does not support several devices: train on one")
